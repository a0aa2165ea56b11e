"""Serving a model: requests that decode together, and the ways to reach them."""
