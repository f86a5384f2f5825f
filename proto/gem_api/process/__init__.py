"""What all processes share besides the contract: command-line options, logs, signals, metrics over HTTP."""
