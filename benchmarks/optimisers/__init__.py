"""The study of optimisers, in parts: models and texts, rules, runs, studies, a picture."""
