"""Huffman-coded BF16, the entropy-coded peer that fixed-length formats are measured against.

`reference` has the format, an encoder and a decoder to read; `cpu` has both compiled. Both give `Coded`.
"""
