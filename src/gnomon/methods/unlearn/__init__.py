"""Forgetting on purpose, and measuring whether it happened."""
