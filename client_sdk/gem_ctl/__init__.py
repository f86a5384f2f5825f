"""The operator's tools behind `gem-ctl`: they render what the server knows of a run."""
