"""Shared by all tests: a server in this process's own child, or in a thread, and clients that give up soon."""
