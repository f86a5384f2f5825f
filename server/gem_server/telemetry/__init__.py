"""Reports about the run: Prometheus metrics, smoothed progress, the history file."""
