"""Tokens, certificates and roles of callers, and warnings about what is open."""
