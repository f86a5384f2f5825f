"""Writes the safetensors format straight from the buffers, without a second copy of them in memory.

The library's own writer builds the whole file in memory first; a checkpoint of every worker's buffers would then need
as much memory again as the server holds. Reading is left to the library, which checks hostile files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import chain
from typing import Any

from gem_api.framing import bytes_of
from gem_api.layout import Vector

from gem_server.durability.storage import NewFile

_PIECE = 1 << 24
_MAX_HEADER_BYTES = 100_000_000  # the library reads no larger ones


def write_tensors(
    file: NewFile, shapes: Mapping[str, tuple[int, ...]], tensor: Callable[[str], Vector], metadata: Mapping[str, str]
) -> dict[str, Any]:
    """Writes float32 tensors to a new file, waits until it is on the disk, and closes it.

    Args:
        file: The file.
        shapes: The tensors' names and shapes.
        tensor: Returns the tensor of a name. Called once for each name, in order, when it is about to be written.
        metadata: Strings for the header.

    Format: u64 little-endian length of the header, a JSON header padded to 8 bytes, then the tensors without gaps.

    Returns:
        {"bytes": size of the file, "sha256": its hash}.

    Raises:
        OSError: The file could not be written completely, or has so many tensors that nobody could read it.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with closing(file):
        if len(text) > _MAX_HEADER_BYTES:
            raise OSError(f"{len(shapes)} tensors are too many for one safetensors file: their names and shapes take 100 MB")
        for piece in chain([len(text).to_bytes(8, "little") + text], *(_pieces(tensor, name) for name in shapes)):
            digest.update(piece)
            file.write(size, [piece])
            size += len(piece)
        file.sync()
    return {"bytes": size, "sha256": digest.hexdigest()}


def _pieces(tensor: Callable[[str], Vector], name: str) -> Iterator[bytes | memoryview]:
    view = bytes_of(tensor(name))
    for at in range(0, len(view), _PIECE):
        yield view[at : at + _PIECE]
