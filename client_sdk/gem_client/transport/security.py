"""A client's token and TLS files: how it authenticates itself and the server."""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import grpc
from gem_api.errors import InvalidRequest
from gem_api.process.addresses import is_this_machine
from gem_api.process.secret_file import require_private, require_token

from gem_client.transport.private_servers import FOLDER_VARIABLE, private_server

log = logging.getLogger("gem_client")
Source = str | PathLike[str]  # path of a PEM file


@dataclass(frozen=True)
class Security:
    """A token, TLS, both or neither: the arguments of `gem_client.connect`.

    Raises:
        InvalidRequest: The files do not go together, or the token is malformed.
    """

    token: str | None = field(default=None, repr=False)
    tls_ca: Source | None = None
    tls_cert: Source | None = None
    tls_key: Source | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequest("a client certificate needs both tls_cert and tls_key")
        if self.tls_cert is not None and self.tls_ca is None:
            raise InvalidRequest("a client certificate needs tls_ca too: the authority that issued the server's certificate")
        if self.token is not None:
            _checked(lambda: require_token(str(self.token), "token"))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token is not None else ()

    def exposes_token(self, address: str) -> bool:
        """Whether the token would be sent to `address` unencrypted over a network."""
        return self.token is not None and self.tls_ca is None and not is_this_machine(address)

    def context(self) -> ssl.SSLContext | None:
        """OpenSSL's configuration for a connection beside gRPC, which trusts what gRPC trusts; None if it is not encrypted.
        Raises OSError if a file can't be used."""
        if self.tls_ca is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: an authority of `tls_ca` need not be a root
        context.load_verify_locations(self.tls_ca)
        if self.tls_cert is not None:
            context.load_cert_chain(self.tls_cert, self.tls_key, password=_refuse_passphrase)
        return context

    def channel(self, address: str, options: Any) -> grpc.Channel:
        """Opens a channel to the server. Raises InvalidRequest if a file can't be read."""
        if self.exposes_token(address):
            log.warning("the token is sent to %s UNENCRYPTED, so that others on the network can read it: set tls_ca", address)
        if self.tls_ca is None:
            return grpc.insecure_channel(address, options=options)
        ca, key, cert = (_pem(name, getattr(self, name)) for name in ("tls_ca", "tls_key", "tls_cert"))
        if self.tls_key is not None:
            _checked(lambda: require_private(Path(str(self.tls_key))))
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=options)


NONE = Security()


def or_that_of_dry_run(address: str, security: Security) -> tuple[str, Security]:
    """The server to connect to, and how: in a dry run one of its own, whichever the caller names."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return address, security
    log.info("a dry run: its own server takes the place of %s", address)
    return private_server(Path(folder), address), NONE


def _pem(name: str, path: Source | None) -> bytes | None:
    """The content of the file that the argument of this name names. Raises InvalidRequest."""
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{name}: can't read {str(path)!r}: {error.strerror}. Name a PEM file") from None
    if b"-----BEGIN " not in content:
        raise InvalidRequest(f"{name}: {str(path)!r} is not a PEM file")
    if name != "tls_key" and not re.search(rb"-----BEGIN (TRUSTED |X509 )?CERTIFICATE-----", content):
        raise InvalidRequest(f"{name}: {str(path)!r} holds no certificate")
    return content


def _refuse_passphrase() -> str:
    raise OSError("the key has a passphrase, which nobody can be asked for")


def _checked(check: Callable[[], object]) -> None:
    try:
        check()
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
