"""Checks this project on one GPU, and measures it there: `python -m benchmarks.gpu`. docs/results/gpu/README.md says what it
prints, and how to bring it to a machine without a network."""
