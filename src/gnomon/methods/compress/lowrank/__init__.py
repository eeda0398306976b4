"""Low-rank compression of trained decoders: plain SVD, ASVD, SVD-LLM (with its update), Dobi-SVD.

Paper: the pipelines with which "NuMuon", NeurIPS 2026, arXiv:2603.03597 v1, measures how compressible its models are;
       by their own names ASVD, SVD-LLM and Dobi-SVD.
Here:  factors of one matrix (`factors`), calibration (`calibrate`), ranks for a budget (`ranks`), Dobi-SVD's learned
       positions (`gate`, `pca`, `dobi`), SVD-LLM's second step (`svd_llm`), whole models (`compress`).
Not here: stored models (`gnomon apply lowrank`), training for low rank (`methods.optim.numuon`), the study.
       Dobi-SVD's remapping to 8 bits is left out: it changes what a number costs, not what the model computes.
Inferred: Dobi-SVD's weights of the share and of the range, the gate's positions ½, 1½, ..., V from outputs that are
       truncated already; the update's LoRA scale 2, linear schedule and all layers at once. ASVD's and Dobi-SVD's
       descriptions come from summaries of their repositories, not from their papers.
Differs from the paper: Dobi-SVD minimises the logarithm of the perplexity; keep=1 leaves a model dense (⌊mn/(m+n)⌋
       directions would not); B of SVD-LLM is taken as Σ^{-½} Uᵀ W, which is equal and inverts nothing.
Limits: ⌊κ m n/(m + n)⌋ keeps less than κ where matrices are small: compare pipelines with ranks="fit", which Dobi-SVD
       always has. ASVD's search stops at its smallest candidate, .4 by default. GPT-2's Conv1D is refused; experts
       that aren't `nn.Linear` stay as they are.

Shapes: W is m × n (outputs × inputs) and becomes A B, A m × k, B k × n; q = min(m, n).

>>> import torch
>>> from gnomon.core.tiny import build                        # or any model of yours
>>> model, text = build("tiny:llama-10k"), [torch.arange(64).view(2, 32)]
>>> small = compress_lowrank(model, "svd_llm", keep=0.6, calib=text, config=SVDLLMConfig(ranks="fit"))
>>> 0.58 < kept_share(small) <= 0.6, small.model.layers[0].mlp.up_proj.rank
(True, 5)
>>> dense = to_dense(small)                                   # as large as before, of the same low rank
>>> int(torch.linalg.matrix_rank(dense.model.layers[0].mlp.up_proj.weight.detach()))
5
"""

from ..calibration import Calib, LayerStats
from .asvd import search_ranks, sensitivities
from .calibrate import calibrate
from .compress import CONFIGS, METHODS, compress_lowrank
from .config import ASVDConfig, DobiConfig, LoraUpdate, SVDConfig, SVDLLMConfig
from .dobi import dobi_bases, dobi_ranks, learn_positions
from .factors import (
    Factored,
    asvd_factors,
    asvd_scale,
    factor_asvd,
    factor_svd,
    factor_svd_llm,
    rank_for,
    svd_factors,
    svd_llm_factors,
    whitening,
)
from .gate import gate, right_vectors, truncate
from .layers import compressible, ranks_of, replace, shapes
from .linear import LowRankLinear, to_dense
from .pca import IncrementalPCA
from .ranks import budget_ranks, fit_ranks, kept_share, sensitivity_ranks, uniform_ranks
from .svd_llm import lora_update

__all__ = [
    "CONFIGS",
    "METHODS",
    "ASVDConfig",
    "Calib",
    "DobiConfig",
    "Factored",
    "IncrementalPCA",
    "LayerStats",
    "LoraUpdate",
    "LowRankLinear",
    "SVDConfig",
    "SVDLLMConfig",
    "asvd_factors",
    "asvd_scale",
    "budget_ranks",
    "calibrate",
    "compress_lowrank",
    "compressible",
    "dobi_bases",
    "dobi_ranks",
    "factor_asvd",
    "factor_svd",
    "factor_svd_llm",
    "fit_ranks",
    "gate",
    "kept_share",
    "learn_positions",
    "lora_update",
    "rank_for",
    "ranks_of",
    "replace",
    "right_vectors",
    "search_ranks",
    "sensitivities",
    "sensitivity_ranks",
    "shapes",
    "svd_factors",
    "svd_llm_factors",
    "to_dense",
    "truncate",
    "uniform_ranks",
    "whitening",
]
