"""A session's calls: one attempt each, on one gRPC channel."""
