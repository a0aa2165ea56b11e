"""Queries, keys, values and a prior to outputs, with the derivative written out."""
