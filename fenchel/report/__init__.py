"""A run directory to a page with pictures; needs no torch."""
