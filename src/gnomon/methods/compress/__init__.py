"""Fewer bytes for the same model: formats, pruning, low rank, attribution of parameters."""
