"""Programs of others as workers: what has to change in them, and what they reach alone and with three workers."""
