"""Triton kernels of functions defined elsewhere; no result depends on this package."""
