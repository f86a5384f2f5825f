"""A server's settings, as `gem_api.process.settings` declares them, and what is made of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from gem_api.hyperparameters import Hyperparameters
from gem_api.process.addresses import MAX_PORT, host_and_port, is_tcp_address, is_unix, names_a_port, server_address, with_port
from gem_api.process.option_types import Bytes, Number, Whole
from gem_api.process.settings import DURABILITIES, ServerSettings

from gem_server.security.tls import TlsFiles

_QUARANTINE_AFTER = 3  # rejected commits in a row


class StartError(Exception):
    """The server can't start; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ServerSettings):
    """A server's configuration. `validate` says what is wrong with it.

    Attributes:
        hyperparameters: The run's. A resumed run keeps its own, except for those in `given`.
        given: Names of the hyper-parameters that the user stated, rather than left at their defaults.
        until_stopped: Whether the user wants a run without a limit of epochs or steps. Otherwise such a run is rejected.
        tls: PEM files of the server's certificate. None: connections are not encrypted.
    """

    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    given: frozenset[str] = frozenset()
    until_stopped: bool = False
    tls: TlsFiles | None = None

    @property
    def lane_address(self) -> str:
        """`lane_listen` with its default filled in; empty for none."""
        if self.lane_listen is not None:
            return self.lane_listen
        if is_unix(self.listen):
            return ""
        _, port = host_and_port(self.listen)
        return with_port(self.listen, port + 1 if 0 < port < MAX_PORT else 0)

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
        for each in fields(ServerSettings):
            kind, value = each.metadata["setting"].type, getattr(self, each.name)
            minimum = kind.min if isinstance(kind, Number | Whole | Bytes) and each.name != "lease_seconds" else None
            if minimum is not None and value is not None and not value >= minimum:  # not "<", so that NaN is rejected too
                yield f"{each.name} must be at least {minimum:g}, not {value}"
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
