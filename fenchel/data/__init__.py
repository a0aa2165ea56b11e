"""Text to tokens to batches; knows no model."""
