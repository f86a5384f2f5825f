"""Follows a run into an experiment tracker. `follow` polls the server; each tracker has a module, which imports its library."""
