"""Sparse decoding: one query row per head against a long cache, of which only some values are read."""
