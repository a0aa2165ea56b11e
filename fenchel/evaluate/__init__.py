"""Perplexity, bits per byte, and the baselines they are read against."""
