"""Round trips per second beside other parameter servers: `python -m benchmarks.peers`."""
