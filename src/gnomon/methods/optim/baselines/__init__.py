"""Rivals of this family's optimizers that no usable library has."""
