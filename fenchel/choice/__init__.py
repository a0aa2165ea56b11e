"""Scores to weights: argmax over the simplex, its value, derivative, loss, certificate."""
