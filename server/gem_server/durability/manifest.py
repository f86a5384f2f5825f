"""manifest.json: which checkpoints of all ranges belong together. It lies in the checkpoint folder of every range."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gem_api.ranges import MAX_RANGES

from gem_server.durability.schema import COUNT, require
from gem_server.durability.storage import Storage, write_atomically

FORMAT = "gem-manifest/1"
NAME = "manifest.json"
_ENTRY = {"address": str, "path": str, "version": COUNT, "sha256": str}
_MANIFEST = {"format": str, "run_id": str, "cut": {str: COUNT}, "ranges": [_ENTRY], "earlier": [str]}


class BadManifest(ValueError):
    """Not a manifest; the message says why."""


@dataclass(frozen=True)
class Entry:
    """One range's checkpoint.

    Attributes:
        address: The server's address, as workers reach it.
        path: The checkpoint's folder, on the server's machine.
        version: The version of the range's θ in it.
        sha256: SHA-256 of its state.json, in hexadecimal.
    """

    address: str
    path: str
    version: int
    sha256: str

    @property
    def name(self) -> str:
        """The folder's name."""
        return Path(self.path).name


@dataclass(frozen=True)
class Manifest:
    """The checkpoints of all ranges, in order.

    Attributes:
        run_id: The run's id.
        cut: Lease id to the largest sequence number of its commits that the checkpoints have.
        ranges: One entry for each range.
        earlier: Names of older checkpoints of the range that has this file. They are kept too, as the newest complete manifest
            may name one of them: the lead writes a manifest last, and only then is it complete.
    """

    run_id: str
    cut: Mapping[str, int]
    ranges: tuple[Entry, ...]
    earlier: tuple[str, ...] = ()


def write_manifest(directory: Path, manifest: Manifest, storage: Storage | None = None) -> Path:
    """Writes a manifest in place of an older one, and returns its path once it is on the disk. Raises OSError."""
    storage, scratch, path = storage or Storage(), directory / f".writing-manifest-{os.getpid()}", directory / NAME
    content = {"format": FORMAT, **asdict(manifest)}
    with write_atomically(storage, scratch, path):
        storage.remove(scratch)  # of a server that was killed
        with closing(storage.create(scratch)) as file:
            file.write(0, [json.dumps(content, indent=1).encode()])
            file.sync()
    return path


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest. Raises BadManifest if it is none, OSError if it can't be read."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        require(content, _MANIFEST, "the manifest")
    except (ValueError, RecursionError) as error:
        raise BadManifest(f"{path} is not a manifest: {error}") from None
    if content["format"] != FORMAT:
        raise BadManifest(f"{path}: its format is {content['format']!r}, this version reads {FORMAT!r}")
    if not 1 <= len(content["ranges"]) <= MAX_RANGES:
        raise BadManifest(f"{path} names {len(content['ranges'])} ranges: 1 to {MAX_RANGES} are possible")
    entries = tuple(Entry(*(entry[name] for name in _ENTRY)) for entry in content["ranges"])
    return Manifest(content["run_id"], content["cut"], entries, tuple(content["earlier"]))


def succeeding(directory: Path, index: int, manifest: Manifest, complete: bool) -> Manifest:
    """The manifest, with the checkpoints of range `index` that must be kept beside the one that it names.

    Args:
        directory: The folder with the manifest so far.
        index: The range.
        manifest: What comes next.
        complete: Whether the lead has written it, as the last of all.
    """
    try:
        before = read_manifest(directory / NAME)
    except (OSError, BadManifest):
        return manifest
    if not index or (complete and before.ranges == manifest.ranges):
        return manifest
    earlier = {*before.earlier, before.ranges[index].name} - {manifest.ranges[index].name}
    return replace(manifest, earlier=tuple(sorted(earlier)))


def kept_checkpoints(directory: Path, index: int) -> set[str]:
    """The names of the checkpoints of range `index` that the manifest in its folder keeps. Empty if there is no manifest, or it
    can't be read."""
    try:
        manifest = read_manifest(directory / NAME)
        return {manifest.ranges[index].name, *manifest.earlier}
    except (OSError, BadManifest, IndexError):
        return set()
