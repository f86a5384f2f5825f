"""The calls in progress, the way of a commit through the core, and the messages: every way into the server shares them."""
