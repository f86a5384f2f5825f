"""What survives a crash of the server: checkpoints and the write-ahead log, and how a run is rebuilt from them."""
