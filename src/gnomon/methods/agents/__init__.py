"""Models that act in an environment."""
