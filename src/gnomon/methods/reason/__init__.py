"""Reasoning as a structure that can be checked."""
