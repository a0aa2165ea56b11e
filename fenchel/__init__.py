"""Transformers whose attention can be derived, measured and steered."""

__version__ = "0.1.0"
