"""One thread and no network for every test, set before anything loads torch.

This file's presence also puts this folder on the import path, so that tests can share helper modules.
"""

import os

os.environ.update(
    OMP_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
)
