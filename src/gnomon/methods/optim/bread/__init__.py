"""BREAD: block coordinate descent for fine-tuning, with cheap updates of the inactive blocks in the same backward.

Paper: "Accelerating Block Coordinate Descent for LLM Finetuning via Landscape Expansion", NeurIPS 2025.
Here:  the optimizer (`optimizer`), which without an expansion is BAdam; LoRA, LoRA+, SGD and signSGD expansions
       (`expansion`, `on_the_fly`); blocks and their order (`blocks`); memory by formula and measured (`memory`); the
       share of a backward pass that serves no update (`work`); the constructed case of Prop. 3.1 (`landscape`).
Not here: DoRA and PiSSA expansions, sharded models (ZeRO, FSDP), the study. LOMO and LISA are in `optim.baselines`.
Differs from the paper: bfloat16 weights under an SGD expansion are rounded stochastically by default, because to the
       nearest most updates vanish (`SGDExpansion.rounding`).
Differs from the authors' code: the first block gets K steps and not K - 1, adapters' states outlive a switch, norms
       and biases never decay, "partial" goes by the number of the layer and not by the order of names.
Inferred: LoRA's α = 4 r and all linear maps as targets; lr_scale = 5 for SGD, an example in the authors' code; no
       weight decay; norms and biases of inactive layers stay; a step of SGD isn't clipped.
Limits: a block's float32 copy is rounded to bfloat16 when its turn ends, and what was below an ulp is lost.

Notation: D blocks, K steps a turn, J the matrices that are expanded, r a rank.

>>> import tempfile, torch
>>> from transformers import AutoModelForCausalLM
>>> from gnomon.core.tiny import build                        # or any decoder of yours
>>> model, tokens = build("tiny:llama-10k"), torch.arange(64).view(2, 32)
>>> optimizer = BlockOptimizer(model, lr=3e-3, switch_every=5, expansion=LoRAExpansion(rank=4))
>>> for _ in range(10):
...     loss = model(tokens, labels=tokens).loss
...     loss.backward()
...     optimizer.step()
...     optimizer.zero_grad()
>>> optimizer.close()                                         # merges the adapters: a plain model again
>>> with tempfile.TemporaryDirectory() as folder:
...     model.save_pretrained(folder)
...     again = AutoModelForCausalLM.from_pretrained(folder)
>>> bool(model(tokens, labels=tokens).loss < 5.5), torch.equal(again(tokens).logits, model(tokens).logits)
(True, True)
"""

from typing import TYPE_CHECKING, Any

from gnomon.core.memory import state_bytes

from .blocks import Block, Partition, Turns, make_blocks
from .expansion import PRESETS, LoRAExpansion, SGDExpansion, preset, sgd_update_, stochastic_round
from .landscape import frozen_optimum, rank_one_expansion
from .memory import METHODS, PeakMemory, estimate_memory, measure_peak
from .optimizer import BlockOptimizer
from .work import BackwardWork, backward_work

if TYPE_CHECKING:
    from .trainer import BlockCallback

__all__ = [
    "METHODS",
    "PRESETS",
    "BackwardWork",
    "Block",
    "BlockCallback",
    "BlockOptimizer",
    "LoRAExpansion",
    "Partition",
    "PeakMemory",
    "SGDExpansion",
    "Turns",
    "backward_work",
    "estimate_memory",
    "frozen_optimum",
    "make_blocks",
    "measure_peak",
    "preset",
    "rank_one_expansion",
    "sgd_update_",
    "state_bytes",
    "stochastic_round",
]


def __getattr__(name: str) -> Any:
    """The Trainer's callback, which alone needs Transformers to be loaded."""
    if name == "BlockCallback":
        from .trainer import BlockCallback

        return BlockCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
