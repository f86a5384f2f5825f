"""Checkpoints and the write-ahead log, which survive a crash of the server, and how a run is rebuilt from them."""
