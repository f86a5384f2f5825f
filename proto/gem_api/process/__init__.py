"""What all processes share beside the contract: command-line options, logs, signals, metrics over HTTP."""
