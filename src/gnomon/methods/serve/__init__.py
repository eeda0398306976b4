"""Serving policies: what an engine keeps in its cache, and how wide it decodes."""
