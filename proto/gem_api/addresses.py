"""What an address says about who can reach it."""

from __future__ import annotations

import ipaddress


def is_loopback(address: str) -> bool:
    """Whether only this machine's own processes reach "host:port". A name other than localhost may lead anywhere."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
