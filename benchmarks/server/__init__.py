"""Measurements of this server alone, one module each; every module is a command."""
