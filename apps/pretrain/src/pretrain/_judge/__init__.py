"""Scores of a model on the tasks of lm-eval, an extra."""
