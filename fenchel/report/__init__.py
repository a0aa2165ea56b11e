"""HTML reports of runs and inspections; imports no torch."""

from fenchel.report.run_page import page

__all__ = ["page"]
