"""The lane: a data connection beside gRPC that carries commits."""
