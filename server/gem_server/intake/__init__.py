"""What every way in shares: the calls in progress, the way of a commit through the core, and the messages."""
