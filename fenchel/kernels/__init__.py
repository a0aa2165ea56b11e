"""Fast versions of functions defined elsewhere; no answer depends on this package."""
