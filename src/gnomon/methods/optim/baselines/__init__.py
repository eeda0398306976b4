"""Rivals of the optimizers here that no usable library has."""
