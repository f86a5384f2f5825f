"""Races of real processes, whose steps take simulated times: this server beside what a user would take instead."""
