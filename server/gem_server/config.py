"""How a server runs. Every setting, its unit and its default are written down here; `gem-server` has an option for each."""

from __future__ import annotations

import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gem_api.hyperparameters import Hyperparameters
from gem_api.process.addresses import MAX_PORT, is_tcp_address, names_a_port, server_address
from gem_api.process.host_limits import default_limit
from gem_api.process.options import DURABILITIES
from gem_api.ranges import WHOLE, Range

from gem_server.security.tls import TlsFiles

_QUARANTINE_AFTER = 3  # rejected commits in a row


class StartError(Exception):
    """The server can't start; the message says what to do."""


def private_socket() -> str:
    """The address of a Unix socket without a file, new at each call; empty on systems other than Linux, which have none."""
    return f"@gem-{secrets.token_hex(8)}" if sys.platform == "linux" else ""


@dataclass(frozen=True)
class ServerConfig:
    """How a server runs. `validate` says what is wrong with it."""

    # The run's hyperparameters. A resumed run keeps its own, except for those in `given`.
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)

    # Names of the hyperparameters that the user stated, rather than left at their defaults.
    given: frozenset[str] = frozenset()

    # Whether the user wants a run without a limit of epochs or steps. Otherwise such a run is rejected.
    until_stopped: bool = False

    # -- several servers

    # Which part of the model this server holds.
    range: Range = WHOLE

    # Addresses of the servers of range 1, 2, …, as workers reach them, on the server of range 0.
    peers: tuple[str, ...] = ()

    # -- network

    # HOST:PORT to serve gRPC on. Port 0 picks a free one.
    listen: str = "127.0.0.1:50051"

    # HOST:PORT of the lane, which carries commits beside gRPC. Port 0 picks a free one. None: the host of `listen`, and the
    # port after its port; a free one if there is none, or if it is taken. Empty: none, and other machines commit over gRPC.
    lane_listen: str | None = None

    # HOST:PORT of the live page and the Prometheus metrics. Port 0 picks a free one. Empty: neither is served.
    metrics_listen: str = "127.0.0.1:9464"

    # Unix socket that hands shared memory to workers on this machine: a path, or "@NAME" for a Linux socket without a file.
    # Empty: no memory is shared.
    memory_socket: str = field(default_factory=private_socket)

    # -- security

    # File of bearer tokens. None: no token is asked for.
    tokens: Path | None = None

    # PEM files of the server's certificate. None: connections are not encrypted.
    tls: TlsFiles | None = None

    # -- workers

    # Seconds that a worker may be silent before its lease ends.
    lease_seconds: float = 15.0

    # Workers that must have joined before the first shard is handed out.
    min_workers: int = 1

    # Seconds in which no further worker must have joined before a new run's first shard is handed out. 0: do not wait for that.
    start_quiet_seconds: float = 0.0

    # Bytes that the model and the workers may take. 0: no limit. Default: four fifths of the machine's or container's memory.
    memory_limit: int = field(default_factory=default_limit)

    # Threads that apply a commit of a large model. 0: one for each core, at most 8.
    apply_threads: int = 0

    # A commit is rejected if its gradient's norm exceeds this multiple of the median of the run's last 100. 0: no bound.
    max_norm_ratio: float = 0.0

    # Rejected gradients in a row after which a worker is quarantined. 0: never. None: 3 with `max_norm_ratio`, else never.
    quarantine_after: int | None = None

    # -- durability

    # Folder for checkpoints and the write-ahead log. None: nothing is saved.
    checkpoint_dir: Path | None = None

    # Seconds between checkpoints. 0: only on request and at the end.
    checkpoint_interval: float = 30.0

    # Checkpoints to keep; older ones are removed.
    checkpoint_keep: int = 3

    # Whether to continue the run of the newest checkpoint in `checkpoint_dir`, if there is one.
    resume: bool = False

    # What survives a crash. "memory": only checkpoints made on request; "snapshot": everything up to the last checkpoint;
    # "log": every acknowledged commit. Without a `checkpoint_dir`, "snapshot" means "memory".
    durability: str = "snapshot"

    # Bytes of write-ahead log after which a checkpoint is written.
    log_limit: int = 1 << 30

    # CSV file that gets a line for every commit. None: commits.csv in `checkpoint_dir`. /dev/null: no history is written.
    history: Path | None = None

    @property
    def lane_address(self) -> str:
        """`lane_listen` with its default filled in; empty for none."""
        if self.lane_listen is not None:
            return self.lane_listen
        host, _, port = self.listen.rpartition(":")
        return "" if self.listen.startswith("unix") else f"{host}:{int(port) + 1 if 0 < int(port) < MAX_PORT else 0}"

    @property
    def history_file(self) -> Path | None:
        """`history` with its default filled in; None for none. Of several servers, only that of range 0 has a default."""
        if self.history is not None:
            return None if self.history == Path(os.devnull) else self.history
        return self.checkpoint_dir / "commits.csv" if self.checkpoint_dir and self.range.leads else None

    @property
    def rejections_until_quarantine(self) -> int:
        """`quarantine_after` with its default filled in; 0 for never."""
        if self.quarantine_after is not None:
            return self.quarantine_after
        return _QUARANTINE_AFTER if self.max_norm_ratio else 0

    def validate(self) -> None:
        """Raises StartError that names everything wrong with this configuration."""
        if problems := list(self._problems()):
            raise StartError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        if not names_a_port(self.listen):
            yield f"can't listen on {self.listen!r}: give --listen HOST:PORT, with a port up to {MAX_PORT}"
        elif self.lane_address and not is_tcp_address(self.lane_address):
            address = self.lane_address
            yield f"can't serve the lane on {address!r}: set lane_listen to HOST:PORT, such as 127.0.0.1:50052, or off"
        if self.resume and self.checkpoint_dir is None:
            yield "--resume needs --checkpoint-dir: say where the checkpoints are"
        if self.durability not in DURABILITIES:
            yield f"--durability must be one of {', '.join(DURABILITIES)}, not {self.durability!r}"
        if self.durability == "log" and self.checkpoint_dir is None:
            yield "--durability log needs --checkpoint-dir: say where to keep the checkpoints and the log"
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if value is not None and not value >= minimum:  # not "<", so that NaN is rejected too
                yield f"{name} must be at least {minimum:g}, not {value}"
        if not self.lease_seconds > 0:
            yield f"lease_seconds must be greater than 0, not {self.lease_seconds}"
        yield from self._problems_of_ranges()

    def _problems_of_ranges(self) -> Iterator[str]:
        part, expected = self.range, self.range.count - 1 if self.range.leads else 0
        if not part.whole and self.durability != "log":
            yield f"--range {part} needs --durability log: a range that lost commits would not fit the others any more"
        if len(self.peers) != expected:
            yield (
                f"--range {part} needs --peers with the {expected} addresses of ranges 1 to {expected}, not {len(self.peers)}"
                if expected
                else f"--peers belongs to the server of range 0 of several; this one is --range {part}"
            )
        for address in self.peers:
            if not names_a_port(address):
                yield f"--peers names {address!r}: give each server's HOST:PORT, such as 10.0.0.2:50051,10.0.0.3:50051"
                continue
            try:
                server_address(address)
            except ValueError as error:
                yield f"--peers: {error}"
        if twice := [address for address, count in Counter((*self.peers, self.listen)).items() if count > 1]:
            which = "this server's own address" if self.listen in twice else f"{twice[0]!r} twice"
            yield f"--peers names {which}: give each other range's server once, in order"


_MINIMA = {
    "checkpoint_interval": 0.0, "checkpoint_keep": 1, "memory_limit": 0, "min_workers": 1, "start_quiet_seconds": 0.0,
    "apply_threads": 0, "log_limit": 0, "max_norm_ratio": 0.0, "quarantine_after": 0,
}  # fmt: skip
