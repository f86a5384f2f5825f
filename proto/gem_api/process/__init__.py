"""What all our processes share beside the contract: options, logs, signals, metrics over HTTP."""
