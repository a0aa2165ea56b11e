"""Numbered scripts that teach by running."""
