"""One file per system: its baselines, data, budgets and claims."""
