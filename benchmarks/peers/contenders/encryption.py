"""TLS for contenders: a certificate, and sockets that use it."""

from __future__ import annotations

import shlex
import socket
import ssl
import subprocess
from pathlib import Path

from benchmarks.lib.load import LoadFailed
from benchmarks.peers.contenders.base import HOST, Place


def certificate(place: Place) -> Path:
    """The certificate that clients trust, in one file with its key."""
    return place.log.parent / "tls.pem"


def make_certificate(place: Place) -> Path:
    """Makes the certificate, for the loopback interface. Raises LoadFailed."""
    pem = certificate(place)
    command = shlex.split("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=benchmark")
    command += ["-addext", f"subjectAltName=IP:{HOST}", "-keyout", str(pem), "-out", "-"]
    try:
        made = subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LoadFailed(f"the openssl command made no certificate: {error}") from None
    with pem.open("ab") as file:
        file.write(made.stdout)
    return pem


def encrypted(sock: socket.socket, place: Place, server_side: bool) -> ssl.SSLSocket:
    """The socket with TLS, after the handshake."""
    if server_side:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate(place))
        return context.wrap_socket(sock, server_side=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificate(place))
    return context.wrap_socket(sock, server_hostname=HOST)
