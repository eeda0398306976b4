"""What happens between the logits and the next token."""
