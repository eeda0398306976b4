"""Training after pretraining: preferences, rewards, distillation."""
