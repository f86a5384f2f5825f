"""What survives the death of the server: the log of what happened, and how a run is rebuilt from it."""
