"""Optimizers and what they do to the weights."""
