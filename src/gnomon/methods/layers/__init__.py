"""Layers and attention that a model is built from or converted to."""
