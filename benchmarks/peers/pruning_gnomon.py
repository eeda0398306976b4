"""Gnomon's Wanda or SparseGPT in a process of its own, as `pruning_llmcompressor.py` runs the other: same arguments."""

import importlib.metadata
import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM

from gnomon.methods.compress.pruning import prune


def main() -> None:
    folder, ids_file, method, sparsity, threads = sys.argv[1:6]
    torch.set_num_threads(int(threads))
    with open(ids_file) as file:  # noqa: PTH123
        ids = json.load(file)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    rows, size = torch.tensor(ids["calib"]), ids["batch"]
    began = time.perf_counter()
    report = prune(model, method, float(sparsity), calib=list(rows.split(size)))
    seconds = time.perf_counter() - began
    held = torch.tensor(ids["held"])
    with torch.no_grad():
        loss = float(model(input_ids=held, labels=held).loss)
    versions = {"gnomon": importlib.metadata.version("gnomon"), "torch": torch.__version__}
    found = {"seconds": seconds, "zeros": report.removed, "weights": report.weights, "loss": loss}
    print("RESULT " + json.dumps(found | {"versions": versions}), flush=True)


if __name__ == "__main__":
    main()
