"""NuMuon: Muon with a nuclear-norm budget on the update, so that trained weights compress better.

Paper: "NuMuon: Nuclear-Norm-Constrained Muon for Compressible LLM Training", NeurIPS 2026, arXiv:2603.03597 v1.
Here:  the linear minimisation oracle (Props 3.1 and 3.2) and its top-k form (`lmo`), rank schedules (`schedule`), the
       optimizers (`optimizer`, `combined`), which parameters they may take (`split`), spectra of what was trained.
Not here: compression of the trained model (`methods.compress.lowrank`), the study.
Differs from the paper: Krylov works on the smaller side of a matrix, which is the same method at less cost, and
       takes its last factorisation from a Gram matrix where that is as exact as the SVD. A last, partial direction
       (τ not a multiple of ρ) exists in `lmo_spectral_nuclear` only, as in the paper's practical form.
Inferred: the shape scale s ("match_rms_adamw"; the runs' isn't stated), no Nesterov, AdamW and not Lion for vectors,
       fused gate-and-up matrices treated like fused QKV.
Limits: s(m, n) takes rows as outputs, while GPT-2's Conv1D stores the transpose; "match_rms_adamw" is symmetric.
       A gradient of low rank r < k gets r directions.

Shapes: W and its momentum M are m × n (outputs × inputs), q = min(m, n), k = ⌈r(t) q⌉.

>>> import torch
>>> from gnomon.core.tiny import build                        # or any model of yours
>>> model, tokens = build("tiny:llama-10k"), torch.arange(64).view(2, 32)
>>> ranks = RankSchedule.cosine(1.0, 0.25, total_steps=20)    # Muon at first, a quarter of each rank at last
>>> optimizer = MuonWithAdamW(model, lr=3e-3, rank_fraction=ranks)
>>> losses = []
>>> for _ in range(20):
...     losses.append(model(tokens, labels=tokens).loss)
...     losses[-1].backward()
...     optimizer.step()
...     optimizer.zero_grad()
>>> bool(losses[-1] < losses[0]), min(s.stable_rank for s in spectral_report(model).values()) > 1
(True, True)
"""

from .combined import MuonWithAdamW
from .lmo import BACK_ENDS, Factors, lmo_spectral_nuclear, newton_schulz, top_k
from .optimizer import Muon, NuMuon, shape_scale
from .schedule import RankSchedule
from .spectra import Spectrum, spectral_report, spectrum
from .split import split_muon_params, why_not_muon

__all__ = [
    "BACK_ENDS",
    "Factors",
    "Muon",
    "MuonWithAdamW",
    "NuMuon",
    "RankSchedule",
    "Spectrum",
    "lmo_spectral_nuclear",
    "newton_schulz",
    "shape_scale",
    "spectral_report",
    "spectrum",
    "split_muon_params",
    "top_k",
    "why_not_muon",
]
