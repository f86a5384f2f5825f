"""Writes the safetensors format straight from the buffers, without a second copy of them in memory.

The library's own writer builds the whole file in memory first; a checkpoint of every worker's buffers would then need
as much memory again as the server holds. Reading is left to the library, which checks hostile files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gem_api.framing import bytes_of
from gem_api.layout import Vector

_PIECE = 1 << 24


def write_tensors(path: Path, tensors: Mapping[str, Vector], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Writes float32 tensors to a new file that only its owner can read, and waits until it is on disk.

    Format: u64 little-endian length of the header, a JSON header padded to 8 bytes, then the tensors without gaps.

    Returns:
        {"bytes": size of the file, "sha256": its hash}.

    Raises:
        OSError: The file exists, or could not be written whole.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        pieces: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
        for tensor in tensors.values():
            view = bytes_of(tensor)
            pieces += [view[at : at + _PIECE] for at in range(0, len(view), _PIECE)]
        for piece in pieces:
            digest.update(piece)
            size += file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}
