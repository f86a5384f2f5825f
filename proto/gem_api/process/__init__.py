"""Command-line options, logs, signals and metrics over HTTP, which all processes share besides the contract."""
