"""What an address is good for: whether a server can listen or be dialled there, and who can reach it."""

from __future__ import annotations

import ipaddress
import re

DEFAULT_PORT = 50051
_EXAMPLE = f"localhost:{DEFAULT_PORT}"
_GRPC_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:", "xds:")


def is_loopback(address: str) -> bool:
    """Whether only this machine's own processes reach "host:port". A name other than localhost may lead anywhere."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_address(text: str) -> str:
    """Checks the address of a server to connect to, and returns it as gRPC takes it: "host:port".

    The host is a name, an IPv4 address, or an IPv6 address in brackets. Without a port it is 50051. gRPC's own forms, such as
    "unix:/path" and "dns:///host:port", are returned unchecked.

    Raises:
        ValueError: It is not an address; the message says why and what to write.
    """
    if text.startswith(_GRPC_SCHEMES):
        return text
    host, port = text, str(DEFAULT_PORT)
    if given := re.fullmatch(r"(\[[^]]*\][^:]*|(?!\[)[^:]*):(.*)", text, re.DOTALL):
        host, port = given.groups()
    if why := _what_is_wrong(text, host, port):
        raise ValueError(f"{text!r} is not the address of a server: {why}")
    return f"{host}:{port}"


def names_a_port(address: str) -> bool:
    """Whether an address to listen on names its port; gRPC takes 443 if none is given."""
    return address.startswith("unix") or re.search(r":[0-9]+$", address) is not None


def _what_is_wrong(text: str, host: str, port: str) -> str:
    """Why nobody can connect there, and what to write instead; empty if all is well."""
    if url := re.match(r"[A-Za-z][\w+.-]*://", text):
        return f"leave out {url[0]!r}: write {text[url.end() :] or _EXAMPLE}"
    if not text:
        return f"write HOST:PORT, such as {_EXAMPLE}"
    if host.startswith("["):
        if not _is_ipv6(host):
            return f"{host!r} is not an IPv6 address in brackets"
    elif ":" in port:
        return "write an IPv6 address in brackets, as in [::1]:50051"
    elif not host:
        return f"the host is missing: write localhost{text}"
    elif not re.fullmatch(r"[\w.-]+", host):
        return f"{host!r} is not a host name"
    if not (re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= 65535):
        return f"the port {port!r} is not a number from 1 to 65535"
    return ""


def _is_ipv6(host: str) -> bool:
    try:
        return host.endswith("]") and ipaddress.ip_address(host[1:-1]).version == 6
    except ValueError:
        return False
