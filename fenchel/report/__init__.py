"""HTML reports of runs and inspections; imports no torch."""

from fenchel.report.page import page

__all__ = ["page"]
