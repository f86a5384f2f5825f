"""How a client shows who it is, and which server it believes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import grpc
from gem_api.errors import InvalidRequest
from gem_api.process.addresses import is_loopback
from gem_api.process.secret_file import require_private, require_token

log = logging.getLogger("gem_client")
Source = str | PathLike[str]  # path of a PEM file


@dataclass(frozen=True)
class Security:
    """A token, TLS, both or neither.

    Attributes:
        token: The bearer token that every call carries.
        tls_ca: Authorities that the server's certificate must come from; encrypts.
        tls_cert: The client's own certificate, for a server that asks for one.
        tls_key: Its private key.

    Raises:
        InvalidRequest: They don't go together, or the token is none.
    """

    token: str | None = field(default=None, repr=False)
    tls_ca: Source | None = None
    tls_cert: Source | None = None
    tls_key: Source | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidRequest("a client certificate needs both tls_cert and tls_key")
        if self.tls_cert is not None and self.tls_ca is None:
            raise InvalidRequest("a client certificate needs tls_ca too: the authority that the server's comes from")
        if self.token is not None:
            _checked(lambda: require_token(str(self.token), "token"))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return (("authorization", f"Bearer {self.token}"),) if self.token is not None else ()

    def exposes_token(self, address: str) -> bool:
        """Whether the token crosses a network in the clear on its way there."""
        return self.token is not None and self.tls_ca is None and not is_loopback(address)

    def channel(self, address: str, options: Any) -> grpc.Channel:
        """A channel to the server. Raises InvalidRequest where a file can't be read."""
        if self.exposes_token(address):
            log.warning("the token goes to %s UNENCRYPTED, for everyone on the way to read: give tls_ca", address)
        if self.tls_ca is None:
            return grpc.insecure_channel(address, options=options)
        ca, key, cert = (_pem(path) for path in (self.tls_ca, self.tls_key, self.tls_cert))
        if self.tls_key is not None:
            _checked(lambda: require_private(Path(str(self.tls_key))))
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=options)


NONE = Security()


def _pem(path: Source | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"can't read {path}: {error.strerror}") from None
    if b"-----BEGIN " not in content:
        raise InvalidRequest(f"{path} is no PEM file")
    return content


def _checked(check: Callable[[], object]) -> None:
    try:
        check()
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
