"""The same comparison in simulated time: no exchange costs anything. For designs, ablations and clusters too large for one
machine."""
