"""What the server reports about the run: Prometheus metrics, smoothed progress, the history file."""
