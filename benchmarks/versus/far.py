"""The slow link of the profile `far`."""

from __future__ import annotations

REASON = "it needs a link with delay and a limited rate, and this kernel has no netem"


def possible() -> bool:
    return False
