"""Caches, sampling, decoding."""
