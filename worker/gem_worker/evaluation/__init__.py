"""Scores the model on held-out data: `gem-evaluator`, and the evaluations of `gem-train`."""
