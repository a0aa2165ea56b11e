"""Token ids to logits."""
