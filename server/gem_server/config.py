"""How a server is to run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gem_api.hyperparameters import Hyperparameters

from gem_server.security.tls import TlsFiles


class StartError(Exception):
    """The server can't start; the message says what to do."""


@dataclass(frozen=True)
class ServerConfig:
    """How a server runs. Units and defaults: `gem-server --help`."""

    settings: Hyperparameters
    given: frozenset[str]  # the hyper-parameters that the user stated, rather than left at their defaults
    listen: str
    metrics_listen: str
    checkpoint_dir: Path | None
    checkpoint_interval: float
    keep: int
    resume: bool
    history: Path | None
    lease_seconds: float
    memory_limit: int
    min_workers: int = 1
    apply_threads: int = 0
    durability: str = "snapshot"  # memory, snapshot or log; memory without a checkpoint_dir
    log_limit: int = 1 << 30
    memory_socket: str = ""  # address of the Unix socket that hands out shared memory; empty for none
    max_norm_ratio: float = 0.0  # 0 for no bound
    quarantine_after: int | None = None  # None: QUARANTINE_AFTER where there is a bound, else never; 0: never
    until_stopped: bool = False  # whether a run without epochs and steps is what the user wants
    tokens: Path | None = None  # the file of bearer tokens; None to ask for none
    tls: TlsFiles | None = None  # None not to encrypt
