"""Network addresses: their syntax, whether other machines can reach them, and names of workers."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
from contextlib import suppress
from typing import Any

DEFAULT_PORT = 50051
MAX_PORT = 65535
_EXAMPLE = f"localhost:{DEFAULT_PORT}"
_EVERY_ADDRESS = ("", "0.0.0.0", "::")
_GRPC_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:", "xds:")


def default_name() -> str:
    """A name for a worker. Containers may share the host's name, and all be process 1."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def is_unix(address: str) -> bool:
    """Whether it is a Unix socket in gRPC's syntax, "unix:/path" or "unix-abstract:name"."""
    return address.startswith(("unix:", "unix-abstract:"))


def is_loopback(address: str) -> bool:
    """Whether only processes on this machine can reach "host:port". A host name other than localhost counts as reachable."""
    if is_unix(address):
        return True
    host = _host(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_this_machine(address: str) -> bool:
    """Whether what is sent to "host:port" stays on this machine: it is a loopback address, or that of one of its interfaces."""
    if is_loopback(address):
        return True
    host = _host(address)
    try:
        version = ipaddress.ip_address(host).version
        with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing; the system chooses the source address
            return bool(probe.getsockname()[0] == host)
    except (ValueError, OSError):
        return False


def address_for_others(listening: str) -> str:
    """How other machines write an address that a server listens on. If it is every address of this machine, that is the one
    that its packets to others come from, or else its name."""
    if _host(listening) not in _EVERY_ADDRESS:
        return listening
    port = listening.rpartition(":")[2]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # kept for documentation (RFC 5737); sends nothing, the system chooses the source
        return f"{probe.getsockname()[0]}:{port}"
    return f"{socket.gethostname()}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of a "host:port", an IPv6 address without its brackets. Raises ValueError if the port is not a number."""
    return _host(address), int(address.rpartition(":")[2])


def with_port(address: str, port: int) -> str:
    """The "host:port" of the same host with another port."""
    return f"{address.rpartition(':')[0]}:{port}"


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def server_address(text: str) -> str:
    """Checks the address of a server to connect to, and returns it in gRPC's syntax: "host:port".

    The host is a name, an IPv4 address, or an IPv6 address in brackets. The default port is 50051. gRPC's own schemes, such as
    "unix:/path" and "dns:///host:port", are returned unchecked.

    Raises:
        ValueError: It is not an address. The message says why and what to write instead.
    """
    if text.startswith(_GRPC_SCHEMES):
        return text
    if "@" in text:  # before anything is shown of it
        raise ValueError(f"an address has no user or password: write {text.rpartition('@')[2] or _EXAMPLE}")
    host, port = text, str(DEFAULT_PORT)
    if given := re.fullmatch(r"(\[[^]]*\][^:]*|(?!\[)[^:]*):(.*)", text, re.DOTALL):
        host, port = given.groups()
    if why := _what_is_wrong(text, host, port):
        raise ValueError(f"{text!r} is not the address of a server: {why}")
    return f"{host}:{port}"


def names_a_port(address: str) -> bool:
    """Whether an address to listen on names its port, up to 65535. Without one, gRPC would listen on port 443."""
    port = re.search(r":([0-9]{1,5})$", address)
    return is_unix(address) or (port is not None and int(port[1]) <= MAX_PORT)


def is_tcp_address(address: str) -> bool:
    """Whether it is a "host:port" to listen on, with a port from 0 to 65535."""
    host, _, port = address.rpartition(":")
    return bool(host) and not is_unix(address) and re.fullmatch(r"[0-9]{1,5}", port) is not None and int(port) <= MAX_PORT


def where_to_listen(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """The address family and the address for a socket that listens on a host: a name, or an IP address without brackets.

    A host that means every address ("", "0.0.0.0" or "::") is one of IPv6 if the machine has that. The caller turns
    `IPV6_V6ONLY` off, so that the socket serves IPv4 too. gRPC does the same.

    Raises:
        OSError, OverflowError: The host is unknown, or there is no such port.
    """
    if host in _EVERY_ADDRESS:
        return (socket.AF_INET6, ("::", port)) if socket.has_dualstack_ipv6() else (socket.AF_INET, ("0.0.0.0", port))
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)  # of localhost: 127.0.0.1
    return family, address


def _what_is_wrong(text: str, host: str, port: str) -> str:
    """The fault of an invalid address, and what to write instead; empty if it is valid."""
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
    if not (re.fullmatch(r"[0-9]{1,5}", port) and 1 <= int(port) <= MAX_PORT):
        return f"the port {port!r} is not a number from 1 to 65535"
    return ""


def _is_ipv6(host: str) -> bool:
    try:
        return host.endswith("]") and ipaddress.ip_address(host[1:-1]).version == 6
    except ValueError:
        return False
