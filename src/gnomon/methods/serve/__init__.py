"""Serving many requests: caches, schedulers, routers."""
