"""One worker's part in a run: its leases, its commits on the way to the servers, and its shards of the data."""
