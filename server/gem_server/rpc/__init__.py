"""The edge: bytes to messages, errors to statuses, and the two ways that tensors travel."""
