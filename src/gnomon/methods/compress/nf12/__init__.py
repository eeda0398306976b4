"""NyoomFloat12: BF16 weights in a fixed 12 bits, not one bit changed, decoded inside the matrix product.

Paper: "NyoomFloat12 (NF12)", NeurIPS 2026; workshop version "NyoomFloat12: Lossless 12-bit Weight Compression for
       Post-Training Inference", ICLR 2026 workshop SPOT, OpenReview yYFj1E1mSZ.
Here:  the format: `encode`, :class:`NF12Tensor`, statistics (`Patterns`), names and checks of stored files
       (`pack`, `unpack`, `inspect`); its use: `linear`, layers on planes, and `compress_model`, which puts them
       into a model in memory; `save_nf12` and `load_nf12`.
Not here: the kernels (`gnomon.kernels.nf12`), converted checkpoints (`gnomon apply nf12`), the study.
Inferred: the byte layout, called planes-v1. Only the abstracts were available; the layout fits each of their
       statements and is no other implementation's.

Shapes: N rows, K columns, K_pad = K rounded up to whole groups of 8, E exceptional groups.

>>> import torch
>>> w = (torch.randn(64, 64) * 0.02).bfloat16()
>>> t = encode(w)
>>> bool((t.decode().view(torch.int16) == w.view(torch.int16)).all()), t.bits_per_weight < 13
(True, True)
>>> x = torch.randn(2, 64, dtype=torch.bfloat16)
>>> bool((linear(x, t, mode="buffered") == x @ w.T).all())  # the product that torch would have made
True
>>> sorted(pack("lm_head.weight", t))[:2]
['lm_head.weight.nf12_esc', 'lm_head.weight.nf12_ex']
"""

from .config import NF12Config
from .container import METADATA, Contents, Meta, choose, inspect, is_plane, pack, unpack
from .encode import Plan, encode, plan
from .entropy import Entropy, Patterns, gaussian_exceptions, gaussian_in_window, huffman_lengths
from .folders import load_nf12, save_nf12
from .linear import linear, linear_transposed, release_scratch
from .model import compress_model, decompress_model, install
from .modules import NF12Conv1D, NF12Embedding, NF12Linear, NF12ScaledEmbedding, NF12Weight
from .tensor import NF12Stats, NF12Tensor

__all__ = [
    "METADATA",
    "Contents",
    "Entropy",
    "Meta",
    "NF12Config",
    "NF12Conv1D",
    "NF12Embedding",
    "NF12Linear",
    "NF12ScaledEmbedding",
    "NF12Stats",
    "NF12Tensor",
    "NF12Weight",
    "Patterns",
    "Plan",
    "choose",
    "compress_model",
    "decompress_model",
    "encode",
    "gaussian_exceptions",
    "gaussian_in_window",
    "huffman_lengths",
    "inspect",
    "install",
    "is_plane",
    "linear",
    "linear_transposed",
    "load_nf12",
    "pack",
    "plan",
    "release_scratch",
    "save_nf12",
    "unpack",
]
