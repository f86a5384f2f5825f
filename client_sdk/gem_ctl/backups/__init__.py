"""Copies of a run outside its server: made, kept, and restored."""
