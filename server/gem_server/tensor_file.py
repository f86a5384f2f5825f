"""Writes the safetensors format straight from the buffers, without a second copy of them in memory.

The library's own writer builds the whole file in memory first; a checkpoint of every worker's buffers would then need
as much memory again as the server holds. Reading is left to the library, which checks hostile files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from gem_api.framing import bytes_of
from gem_api.layout import Vector

from gem_server.durability.storage import NewFile

_PIECE = 1 << 24


def write_tensors(file: NewFile, tensors: Mapping[str, Vector], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Writes float32 tensors to a new file, waits until it is on the disk, and closes it.

    Format: u64 little-endian length of the header, a JSON header padded to 8 bytes, then the tensors without gaps.

    Returns:
        {"bytes": size of the file, "sha256": its hash}.

    Raises:
        OSError: It could not be written whole.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with closing(file):
        pieces: list[bytes | memoryview] = [len(text).to_bytes(8, "little") + text]
        for tensor in tensors.values():
            view = bytes_of(tensor)
            pieces += [view[at : at + _PIECE] for at in range(0, len(view), _PIECE)]
        for piece in pieces:
            digest.update(piece)
            file.write(size, [piece])
            size += len(piece)
        file.sync()
    return {"bytes": size, "sha256": digest.hexdigest()}
