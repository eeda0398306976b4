"""llm-compressor's Wanda or SparseGPT in an environment of its own: a process that `pruning_peers.py` starts.

    python pruning_llmcompressor.py MODEL_FOLDER IDS.json METHOD SPARSITY THREADS

Prints one line of JSON: seconds of `oneshot` alone (no import, no loading), zeros and weights of the decoder's
matrices, loss on held-out ids, versions. Imports nothing of Gnomon, which needs not be installed there.
"""

import json
import sys
import time

import torch
from datasets import Dataset
from llmcompressor import __version__, oneshot
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, ids_file, method, sparsity, threads = sys.argv[1:6]
    torch.set_num_threads(int(threads))
    with open(ids_file) as file:  # noqa: PTH123
        ids = json.load(file)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids["calib"]]
    kind = {"wanda": WandaPruningModifier, "sparsegpt": SparseGPTModifier}[method]
    recipe = [
        kind(sparsity=float(sparsity), mask_structure="0:0", targets=["Linear"], ignore=["re:.*lm_head"])
    ]
    settings = {
        "max_seq_length": len(ids["calib"][0]),
        "num_calibration_samples": len(rows),
        "batch_size": ids["batch"],
        "shuffle_calibration_samples": False,
        "pipeline": "sequential",
    }
    began = time.perf_counter()
    oneshot(model=model, dataset=Dataset.from_list(rows), recipe=recipe, **settings)
    seconds = time.perf_counter() - began
    weights = [
        m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n
    ]
    held = torch.tensor(ids["held"])
    with torch.no_grad():
        loss = float(model(input_ids=held, labels=held).loss)
    found = {
        "seconds": seconds,
        "zeros": sum(int((w == 0).sum()) for w in weights),
        "weights": sum(w.numel() for w in weights),
        "loss": loss,
        "versions": {"llmcompressor": __version__, "torch": torch.__version__},
    }
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
