"""Methods that look inside a model."""
