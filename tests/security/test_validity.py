"""When certificates end, read from real ones."""

from __future__ import annotations

import base64
import datetime

import pytest
from cryptography import x509
from gem_server.security.tls import TlsFiles
from gem_server.security.validity import ends_at
from kit.certificates import Authority, Pair
from kit.server import Live, config, serving

CENTURY = 36_500


def stated(pem: bytes) -> float:
    """What another library reads in the first certificate."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()


def element(tag: int, *contents: bytes) -> bytes:
    inside = b"".join(contents)
    return bytes([tag, len(inside)]) + inside


def old(from_: bytes, to: bytes) -> bytes:
    """A certificate of the first version, as PEM, as far as its end: it states no version."""
    signed = element(0x30, element(2, b"\x07"), element(0x30), element(0x30), element(0x30, from_, to))
    return b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(element(0x30, signed)) + b"-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("days", [(-9, -2), (-1, 1), (-1, 8000), (-1, CENTURY), (CENTURY, CENTURY + 1)])
def test_the_end_is_the_first_certificates_before_and_after_2050(days: tuple[int, int], authority: Authority) -> None:
    """Until 2049 it is a UTCTime, from 2050 on a GeneralizedTime (RFC 5280, section 4.1.2.5)."""
    pair = authority.issue("server", days=days)
    several = b"a comment\n" + pair.cert.read_bytes() + authority.cert.read_bytes()
    assert ends_at(several) == stated(pair.cert.read_bytes())


@pytest.mark.parametrize(
    ("to", "year"),
    [
        (element(0x17, b"491231235959Z"), 2049),
        (element(0x17, b"991231235959Z"), 1999),
        (element(0x18, b"20501231235959Z"), 2050),
        (element(0x18, b"99991231235959Z"), 9999),
    ],
)
def test_two_digits_of_a_year_are_of_1950_to_2049(to: bytes, year: int) -> None:
    assert (
        ends_at(old(element(0x17, b"260101000000Z"), to))
        == datetime.datetime(year, 12, 31, 23, 59, 59, tzinfo=datetime.UTC).timestamp()
    )


def test_what_is_no_certificate_is_a_value_error(authority: Authority) -> None:
    pem = authority.cert.read_bytes()
    begin, *body, end = pem.splitlines(keepends=True)
    for wrong in (
        b"", b"junk", begin + end, begin + b"AAAA\n" + end, begin + body[0] + end, begin + b"%%%\n" + end,
        old(element(0x17, b"260101000000Z"), element(0x17, b"soon")), old(element(0x17, b"260101000000Z"), element(4, b"x")),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"certificate|time data|base64|padding|characters"):
            ends_at(wrong)


# -- the metric


def shown(live: Live, setting: str) -> float | None:
    return live.metric("gem_certificate_expiry_timestamp_seconds", file=setting)


def test_the_ends_of_the_certificates_in_use_are_shown(own: Pair, authority: Authority) -> None:
    """A new certificate is, as soon as it can be used; what can't be is not."""
    with serving(config(tls=TlsFiles(own.cert, own.key, authority.cert))) as live:
        before, ends = own.cert.read_bytes(), stated(own.cert.read_bytes())
        assert (shown(live, "tls_cert"), shown(live, "tls_client_ca")) == (ends, stated(authority.cert.read_bytes()))
        other = authority.issue("other", days=(-1, 90))
        own.cert.write_bytes(other.cert.read_bytes())
        assert shown(live, "tls_cert") == ends  # its key is missing
        own.key.write_bytes(other.key.read_bytes())
        assert shown(live, "tls_cert") == stated(other.cert.read_bytes()) != ends
        assert own.cert.read_bytes() != before


def test_without_client_certificates_or_without_tls_there_is_no_end_to_show(own: Pair, live: Live) -> None:
    assert shown(live, "tls_cert") is None
    with serving(config(tls=TlsFiles(own.cert, own.key))) as encrypting:
        assert shown(encrypting, "tls_cert") is not None
        assert shown(encrypting, "tls_client_ca") is None
