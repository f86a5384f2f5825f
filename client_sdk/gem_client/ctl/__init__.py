"""The operator's tools behind `gem-ctl`."""
