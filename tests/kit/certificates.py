"""Makes real certificates for tests: authorities, and the certificates that they sign."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from gem_server.security.tls import TlsFiles

DAY = datetime.timedelta(days=1)
LOOPBACK = ("localhost", "127.0.0.1")


class Pair:
    """A certificate and its private key, in two files."""

    def __init__(self, folder: Path, name: str) -> None:
        self.cert, self.key = folder / f"{name}.pem", folder / f"{name}.key"

    def write(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self.key.touch(mode=0o600)
        self.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )  # fmt: skip


class Authority:
    """A certificate authority; `cert` is its file."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        builder = _certificate(self._name, self._name, self._key, days=(-1, 30))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.cert = folder / f"{name}.pem"
        self.cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def delegate(self, name: str) -> Authority:
        """Another authority, whose own certificate this one has signed."""
        other = Authority(self._folder, name)
        builder = _certificate(other._name, self._name, other._key, days=(-1, 30))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        other.cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return other

    def issue(self, name: str, *, file: str = "", hosts: tuple[str, ...] = LOOPBACK, days: tuple[int, int] = (-1, 30)) -> Pair:
        """Issues a certificate with this common name, for these hosts. It is valid between two days, counted from now.

        It is written to the files that `file` names, over what was there.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _certificate(_named(name), self._name, key, days)
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        pair = Pair(self._folder, file or name.replace(":", "-"))
        pair.write(builder.sign(self._key, hashes.SHA256()), key)
        return pair


class Encryption:
    """What a server with TLS and its raw clients need.

    Attributes:
        files: The server's certificate and key.
        credentials: A client's of gRPC, which believes the server.
        context: The same for a lane.
    """

    def __init__(self, folder: Path) -> None:
        authority = Authority(folder)
        own = authority.issue("server")
        self.files = TlsFiles(own.cert, own.key)
        self.credentials = grpc.ssl_channel_credentials(authority.cert.read_bytes())
        self.context = ssl.create_default_context(cafile=str(authority.cert))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: tuple[int, int]
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + days[0] * DAY)
        .not_valid_after(now + days[1] * DAY)
    )
