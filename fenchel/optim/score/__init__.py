"""Query and key weights moved by the change of their scores.

``ScoreDescent`` and ``ScoreTrust`` are optimisers for training. ``score_step`` is the exact step
for one layer, and ``score_bounds`` has the bounds that belong to it; both are for study.
"""
