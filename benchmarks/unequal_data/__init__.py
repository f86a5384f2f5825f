"""Workers that differ, with data that differ: who learns what only the slowest worker has?"""
