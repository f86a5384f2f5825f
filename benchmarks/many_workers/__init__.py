"""Many workers simulated in one process: they train, under the server's own rules, in an order that can be chosen.

`python -m benchmarks.many_workers` makes the runs and the page docs/results/many-workers. `stability.py` says what to expect.
"""
