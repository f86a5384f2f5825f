"""Optimizers under many workers, on a character transformer and MNIST: `python -m benchmarks.models`."""
