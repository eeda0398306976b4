"""Set-LLM: a decoder that can't see in which order the elements of a set are written.

Paper: "Set-LLM: A Permutation-Invariant LLM", NeurIPS 2025, arXiv:2505.15433, sections 3 and 4, appendix B.
Here:  prompts that mix text and sets, SetPE and SetMask for any Transformers decoder with rotary positions, the six
       rungs of the ablation, a collator for Trainers, scoring and generation from one prefill, order sensitivity (also
       of chat models behind an API), a chat model that reads sets.
Not here: an Inspect AI task (`gnomon.plugins.inspect`); an attention kernel; training (`SetCollator` with any Trainer),
       the two-stage recipe's data.
Inferred: a choice is the option with the highest summed log-likelihood; a prompt must end in text (the response is read
       off its last token); responses end in EOS; ties of a majority are drawn; BOS is a part of its own.
Differs from the paper: orders that aren't all are the first ones, as in the paper, or drawn with a seed; canonical
       order is added as a rival.
Limits: rounding shows the order in less than float32. No sliding windows, ALiBi, learned positions or state-space
       layers; no flash attention; prefixes can't be cached across prompts, since prompts are bidirectional.

Shapes: N tokens of a prompt, R of a response, T = N + R.

>>> from gnomon.core.models import load
>>> loaded = load("tiny:llama-10k")                                # or AutoModelForCausalLM and its tokenizer
>>> reader = SetLLM(loaded.model, loaded.tokenizer)
>>> prompt = parse_set_markup("Which is red?<set><el> a rose</el><el> the sea</el></set> Answer:")
>>> turned = prompt.reordered([(1, 0)])
>>> one, two = (reader.score(p, [" a rose", " the sea"]) for p in (prompt, turned))
>>> bool((one - two).abs().max() < 1e-3)
True
"""

from ..own_masks import additive
from .chat import Asking, SetChat, read_choice
from .collate import SetCollator
from .masks import MODES, Rung, rung, set_attention_mask, set_positions
from .model import SetLLM, require_fit
from .order import OrderQuestion, OrderSensitivity, order_sensitivity, orders_of
from .prompt import Set, SetEncoding, SetPrompt, apply_chat_template, encode, parse_set_markup

__all__ = [
    "MODES",
    "Asking",
    "OrderQuestion",
    "OrderSensitivity",
    "Rung",
    "Set",
    "SetChat",
    "SetCollator",
    "SetEncoding",
    "SetLLM",
    "SetPrompt",
    "additive",
    "apply_chat_template",
    "encode",
    "order_sensitivity",
    "orders_of",
    "parse_set_markup",
    "read_choice",
    "require_fit",
    "rung",
    "set_attention_mask",
    "set_positions",
]
