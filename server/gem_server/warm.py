"""Compiles every rule's pass into numba's cache: `python -m gem_server.warm`, when an image is built."""

from __future__ import annotations

from gem_api import logs
from gem_api.hyperparameters import RULES

from gem_server.rules import make_rule
from gem_server.run import warm_up

if __name__ == "__main__":
    log = logs.configure("text")
    for rule in RULES:
        warm_up(make_rule(rule), log)
        log.info("compiled", rule=rule)
