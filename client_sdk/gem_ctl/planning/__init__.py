"""gem-ctl plan: what a run needs in closed form, and its speed, staleness and queue simulated in time."""
