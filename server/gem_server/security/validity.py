"""The end of a certificate. Python's ssl tells that of a peer's certificate alone."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from typing import NamedTuple

_FIRST = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.*?)-----END ", re.DOTALL)
_SEQUENCE, _INTEGER, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0x02, 0x17, 0x18  # ASN.1 tags


class _Element(NamedTuple):
    """An element of DER (ITU-T X.690): its tag, its contents, and the bytes that follow it."""

    tag: int
    contents: bytes
    rest: bytes


def ends_at(pem: bytes) -> float:
    """Returns the Unix time at which the first certificate in a PEM file ends. Raises ValueError."""
    found = _FIRST.search(pem)
    if found is None:
        raise ValueError("there is no certificate in the file")
    signed = _read(_read(base64.b64decode(found[1]), _SEQUENCE).contents, _SEQUENCE).contents
    # RFC 5280, section 4.1: [version], serial number, signature algorithm, issuer, validity {from, to}
    serial = _read(signed)
    rest = (serial if serial.tag == _INTEGER else _read(serial.rest, _INTEGER)).rest
    for _ in ("signature algorithm", "issuer"):
        rest = _read(rest, _SEQUENCE).rest
    return _unix(_read(_read(_read(rest, _SEQUENCE).contents).rest))


def _read(der: bytes, expected: int | None = None) -> _Element:
    """The first element of some DER. Raises ValueError."""
    if len(der) < 2 or expected not in (None, der[0]):
        raise ValueError("the certificate is not valid DER")
    length, begin = der[1], 2
    if length & 0x80:  # then these are the number of bytes that hold the length
        begin += length & 0x7F
        length = int.from_bytes(der[2:begin], "big")
    return _Element(der[0], der[begin : begin + length], der[begin + length :])


def _unix(time: _Element) -> float:
    """Unix seconds. Raises ValueError."""
    text = time.contents.decode("ascii")
    if time.tag == _UTC_TIME:  # has two digits for the years 1950 to 2049
        text = ("19" if text >= "5" else "20") + text
    elif time.tag != _GENERALIZED_TIME:
        raise ValueError("the certificate's end is not a time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
