"""A run directory to a page with pictures; needs no torch."""

from fenchel.report.page import page

__all__ = ["page"]
