"""Search guided by a model."""
