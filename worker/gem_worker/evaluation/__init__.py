"""Evaluates the model on held-out data: for `gem-evaluator` and `gem-train`."""
