"""`gem-train`: runs a server and its workers on one machine until training is complete."""
