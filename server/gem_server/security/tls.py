"""TLS: the server's certificate, and the authority whose client certificates it accepts. Reloaded when a file changes."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from gem_api.process.logs import Logger
from gem_api.process.secret_file import require_private

from gem_server.security.tokens import may_pass, stamp
from gem_server.security.validity import ends_at

Stamps = list[tuple[int, ...]]


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

    def stamps(self) -> Stamps:
        return [stamp(path) for path in (self.cert, self.key, self.client_ca) if path is not None]


class _Usable(NamedTuple):
    """OpenSSL's configuration from files that it accepts, and the Unix time at which the first certificate of each ends."""

    context: ssl.SSLContext
    ends: dict[str, float]


class Certificates:
    """Provides gRPC and the lane with the current certificate at every handshake. Open connections keep theirs.

    Args:
        files: The PEM files.
        logger: Reports changed files that can't be used, for example a new certificate before its key; the previous ones stay
            in use.

    Raises:
        ValueError: A file can't be read or holds something else; key and certificate don't match.
    """

    def __init__(self, files: TlsFiles, logger: Logger) -> None:
        self._files = files
        self._logger = logger
        self._seen = self._told = files.stamps()
        self._first = load(files)
        self._usable, self._usable_seen = _usable(files), self._seen
        self._lock = threading.Lock()

    def credentials(self) -> Any:
        """Credentials for gRPC's `add_secure_port`."""
        return grpc.dynamic_ssl_server_credentials(
            self._first, self._changed, require_client_authentication=self._files.client_ca is not None
        )

    def context(self) -> ssl.SSLContext:
        """The context of the lane's handshakes: of the files as they are now, or the last ones that could be used."""
        return self._newest().context

    def ends(self) -> dict[str, float]:
        """The Unix time at which the first certificate in each file ends that a handshake would use now, by setting (tls_cert,
        tls_client_ca). A file whose time can't be read is left out. From any thread."""
        return self._newest().ends

    def _newest(self) -> _Usable:
        """The newest usable credentials: from the files as they are now, or those that were used last."""
        with self._lock:
            seen = self._files.stamps()
            if seen != self._usable_seen:
                try:
                    self._usable, self._usable_seen = _usable(self._files), seen
                except ValueError as error:
                    self._usable_seen = self._refused(error, seen, self._usable_seen)
            return self._usable

    def _changed(self) -> Any:
        """The files' new content; None if they have not changed. gRPC calls it on its own thread."""
        seen = self._files.stamps()
        if seen == self._seen:
            return None
        try:
            fresh = load(self._files)
        except ValueError as error:
            self._seen = self._refused(error, seen, self._seen)
            return None
        self._seen = seen
        self._logger.info("certificate reloaded", tls_cert=str(self._files.cert))
        return fresh

    def _refused(self, error: ValueError, seen: Stamps, before: Stamps) -> Stamps:
        """Logs, once, that changed files can't be used. Returns the stamps at which they need not be read again."""
        if seen != self._told:
            self._logger.warning("can't use the changed certificate; the previous one stays in use", why=str(error))
        self._told = seen
        return before if may_pass(error) else seen


def load(files: TlsFiles) -> Any:
    """gRPC's configuration from the files, after OpenSSL has accepted them. Raises ValueError."""
    _context(files)
    try:
        key, cert = files.key.read_bytes(), files.cert.read_bytes()
        authorities = files.client_ca.read_bytes() if files.client_ca is not None else None
    except OSError as error:
        raise ValueError(f"can't read {error.filename}: {error.strerror}") from error
    return grpc.ssl_server_certificate_configuration([(key, cert)], authorities)


def _usable(files: TlsFiles) -> _Usable:
    """Raises ValueError if the files can't be used."""
    context, ends = _context(files), {}
    for setting, path in (("tls_cert", files.cert), ("tls_client_ca", files.client_ca)):
        if path is not None:
            with suppress(OSError, ValueError):  # OpenSSL has accepted it: then it is only not watched
                ends[setting] = ends_at(path.read_bytes())
    return _Usable(context, ends)


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
