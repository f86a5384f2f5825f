"""`gem-train`: a server and its workers on one machine, followed until the run is complete."""
