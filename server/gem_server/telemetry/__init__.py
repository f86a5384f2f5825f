"""What the server tells about the run: Prometheus metrics, smoothed progress, the history file."""
