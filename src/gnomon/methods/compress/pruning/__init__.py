"""Pruning: which weights of a decoder are set to zero."""

from .allocation import Allocation, Shapes

__all__ = ["Allocation", "Shapes"]
