"""TLS: the server's certificate, and the authority whose client certificates it accepts. Reloaded when a file changes."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from gem_api.process.logs import Logger
from gem_api.process.secret_file import require_private

from gem_server.security.reloaded import Reloaded
from gem_server.security.validity import ends_at


@dataclass(frozen=True)
class TlsFiles:
    """PEM files.

    Attributes:
        cert: The server's certificate, followed by the intermediate certificates.
        key: Its private key, without a passphrase.
        client_ca: The authorities of client certificates, which clients then need; None if clients need no certificate.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None


class _Usable(NamedTuple):
    """OpenSSL's and gRPC's configuration from files that OpenSSL accepts, and the Unix time at which the first certificate of
    each ends, by setting."""

    context: ssl.SSLContext
    for_grpc: Any
    ends: dict[str, float]


class Certificates:
    """Provides gRPC and the lane with the current certificate at every handshake. Open connections keep theirs.

    Args:
        files: The PEM files.
        logger: Told when the files change.

    Raises:
        ValueError: A file can't be read or holds something else; key and certificate don't match.
    """

    def __init__(self, files: TlsFiles, logger: Logger) -> None:
        paths = [path for path in (files.cert, files.key, files.client_ca) if path is not None]
        self._files = files
        self._reloaded = Reloaded("certificate", paths, lambda: _read(files), logger)
        self._grpc_has = self._reloaded.newest()

    def credentials(self) -> Any:
        """Credentials for gRPC's `add_secure_port`."""
        return grpc.dynamic_ssl_server_credentials(
            self._grpc_has.for_grpc, self._changed, require_client_authentication=self._files.client_ca is not None
        )

    def context(self) -> ssl.SSLContext:
        """The context of the lane's handshakes: of the files as they are now, or the last ones that could be used."""
        return self._reloaded.newest().context

    def ends(self) -> dict[str, float]:
        """The Unix time at which the first certificate in each file ends that a handshake would use now, by setting (tls_cert,
        tls_client_ca). A file whose time can't be read is left out. From any thread."""
        return self._reloaded.newest().ends

    def _changed(self) -> Any:
        """gRPC's new configuration; None if it has not changed. gRPC calls it on its own thread."""
        newest = self._reloaded.newest()
        if newest is self._grpc_has:
            return None
        self._grpc_has = newest
        return newest.for_grpc


def _read(files: TlsFiles) -> _Usable:
    """Raises ValueError if the files can't be used."""
    context = _context(files)
    try:
        key, cert = files.key.read_bytes(), files.cert.read_bytes()
        authorities = files.client_ca.read_bytes() if files.client_ca is not None else None
    except OSError as error:
        raise ValueError(f"can't read {error.filename}: {error.strerror}") from error
    ends = {}
    for setting, pem in (("tls_cert", cert), ("tls_client_ca", authorities)):
        if pem is not None:
            with suppress(ValueError):  # OpenSSL has accepted it: then it is only not watched
                ends[setting] = ends_at(pem)
    return _Usable(context, grpc.ssl_server_certificate_configuration([(key, cert)], authorities), ends)


def _context(files: TlsFiles) -> ssl.SSLContext:
    """OpenSSL's configuration from the files. Raises ValueError."""
    require_private(files.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Messages state their lengths. A lane that the server stops reading can then still be told why.
    context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
    _check(
        "certificate and key", files.key, lambda: context.load_cert_chain(files.cert, files.key, password=_refuse_passphrase)
    )
    if files.client_ca is not None:
        _check("client authority", files.client_ca, lambda: context.load_verify_locations(files.client_ca))
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: the authority need not be a root
    return context


def _check(what: str, path: Path, try_it: Callable[[], None]) -> None:
    try:
        try_it()
    except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
        raise ValueError(f"TLS: {what} ({path}): {error}") from error


def _refuse_passphrase() -> str:
    raise ValueError("the key has a passphrase: give a key without one, readable by the server's user alone")
