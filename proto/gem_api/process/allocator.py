"""Tunes glibc's allocator for large, short-lived byte strings: Python's gRPC passes tensors as such."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 64 << 20))


def tune_allocator() -> bool:
    """Keeps freed memory for the next commit, instead of returning it to the kernel after every commit.

    All three settings together gave 1.1 to 1.5 times as many commits/s; the trim threshold alone gave fewer.

    Returns:
        Whether the C library took the settings: False on musl, macOS and Windows, where nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(mallopt(option, value) == 1 for option, value in _SETTINGS)
