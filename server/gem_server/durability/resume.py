"""The run that a server starts with: a new one, or the one that its checkpoints and log hold."""

from __future__ import annotations

import fcntl
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple

from gem_api.hyperparameters import FIXED, SHARD_SIZE, Hyperparameters, default_shard_size
from gem_api.process.logs import Logger

from gem_server.config import ServerConfig, StartError
from gem_server.core.norm_bound import NormHistory
from gem_server.core.quarantine import Quarantine
from gem_server.core.state_machine import Core
from gem_server.durability import checkpoint, recovery
from gem_server.durability.journal import Journal
from gem_server.durability.segment import DamagedLog
from gem_server.durability.storage import Storage
from gem_server.rules import require_named

# What workers go by, who are told of it when they register.
TOLD = (
    "learning_rate",
    "schedule",
    "warmup_versions",
    "decay_versions",
    "decay_factor",
    "weight_decay",
    "local_momentum",
    "steps",
)


class Beginning(NamedTuple):
    """What a server starts with.

    Attributes:
        core: A new run's, or as the newest checkpoint and the log since have it.
        number: The log's last record.
        outdated: Whether the run's workers go by settings that this start has changed.
    """

    core: Core
    number: int
    outdated: bool


def make_journal(config: ServerConfig, run_id: str, number: int) -> Journal | None:
    """The log of a run whose last record is `number`; None where none is kept. Raises StartError."""
    if config.durability != "log" or config.checkpoint_dir is None:
        return None
    directory = recovery.log_directory(config.checkpoint_dir)
    try:
        Storage().make_directories(directory, 0o700)
    except OSError as error:
        raise StartError(f"can't make a folder for the log: {error}") from error
    return Journal(Storage(), directory, run_id, recovery.next_serial(config.checkpoint_dir), number)


def make_core(config: ServerConfig, clock: Callable[[], float], logger: Logger) -> Beginning:
    """A new core, or the one that the newest checkpoint and the log since hold.

    Raises:
        StartError: There is no usable checkpoint, or the log is damaged.
    """
    try:
        if resumed := _resumed(config, clock, logger):
            return resumed
        _require_end(config.hyperparameters, config)
        return Beginning(_new_core(secrets.token_hex(4), _new_settings(config, logger), config), 0, False)
    except (ValueError, checkpoint.BadCheckpoint, DamagedLog) as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise StartError(f"can't read the checkpoints: {error}") from error


def _require_end(settings: Hyperparameters, config: ServerConfig) -> None:
    """Raises ValueError for a run without a limit, unless that is what the user asked for."""
    if settings.endless and not config.until_stopped:
        raise ValueError(
            "--epochs 0 without --steps would train for ever: give one of them, or --until-stopped if that is what you want"
        )


def _new_settings(config: ServerConfig, logger: Logger) -> Hyperparameters:
    """The settings of a new run, with shards that hold a batch at least. Raises ValueError if the user wants smaller ones."""
    settings = config.hyperparameters
    if settings.shard_size == SHARD_SIZE and "shard_size" not in config.given:
        settings = replace(settings, shard_size=default_shard_size(settings.batch_size))
        if settings.shard_size != SHARD_SIZE:
            logger.info("shards hold whole batches", shard_size=settings.shard_size, batch_size=settings.batch_size)
    if settings.shard_size < settings.batch_size:
        raise ValueError(
            f"--shard-size {settings.shard_size} would cut batches of --batch-size {settings.batch_size} short: "
            "raise the shard size to the batch size at least, or leave it out"
        )
    return settings


def _new_core(run_id: str, settings: Hyperparameters, config: ServerConfig) -> Core:
    return Core(
        run_id,
        settings,
        lease_seconds=config.lease_seconds,
        memory_limit=config.memory_limit,
        min_workers=config.min_workers,
        new_id=lambda: secrets.token_hex(16),
        norms=NormHistory(config.max_norm_ratio),
        quarantine=Quarantine(config.rejections_until_quarantine),
    )


def _kept_core(run_id: str, kept: Hyperparameters, config: ServerConfig) -> Core:
    """For a run that goes on. Raises ValueError where its settings mean nothing to this server."""
    require_named(kept.rule, config.hyperparameters.rule)
    return _new_core(run_id, kept, config)


def _resumed(config: ServerConfig, clock: Callable[[], float], logger: Logger) -> Beginning | None:
    directory = config.checkpoint_dir
    if directory is None:
        return None
    if not config.resume:
        if checkpoint.list_checkpoints(directory):
            raise ValueError(
                f"{directory} holds the checkpoints of another run: add --resume to go on with it, or name another folder"
            )
        return None
    recovered = recovery.recover(
        directory,
        lambda run_id, kept: _kept_core(run_id, kept, config),
        clock(),
        lambda path, why: logger.warning("checkpoint refused", path=str(path), why=why),
        logged=config.durability == "log",
    )
    if recovered is None:
        logger.info("nothing to resume; starting a new run", checkpoint_dir=str(directory))
        return None
    core, kept = recovered.core, recovered.core.settings
    if recovered.torn is not None:
        logger.info("the log ends within a record that nobody was promised", segment=str(recovered.torn))
    settings = resumed_settings(kept, config.hyperparameters, config.given)
    if not kept.endless:
        _require_end(settings, config)
    core.change(settings)
    if changed := {name: f"{old} -> {vars(settings)[name]}" for name, old in vars(kept).items() if old != vars(settings)[name]}:
        logger.warning("this start changes the run's settings", **changed)
    if core.memory.limit and core.memory.held > core.memory.limit:
        raise ValueError(f"the run's workers hold {core.memory.held} bytes, --memory-limit is {core.memory.limit}: raise it")
    logger.info(
        "resumed", checkpoint=str(recovered.checkpoint), version=core.central.version, leases=len(core.leases.live),
        from_log=core.central.version - recovered.saved,
    )  # fmt: skip
    return Beginning(core, recovered.number, outdated=any(name in changed for name in TOLD))


def lock_directory(directory: Path) -> IO[bytes]:
    """Keeps every other server out of a checkpoint directory until the returned file is closed. Raises StartError."""
    try:
        Storage().make_directories(directory)
        lock = (directory / ".lock").open("ab")
    except OSError as error:
        raise StartError(f"can't use {directory} for checkpoints: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise StartError(f"another server is using {directory}: stop it first, or name another folder") from None
    return lock


def resumed_settings(kept: Hyperparameters, asked: Hyperparameters, given: frozenset[str]) -> Hyperparameters:
    """The settings of a resumed run: the checkpoint's, changed where the user asked. Raises ValueError for what is fixed."""
    changes = {name: getattr(asked, name) for name in given if getattr(asked, name) != getattr(kept, name)}
    fixed = [f"--{name.replace('_', '-')} was {getattr(kept, name)}" for name in FIXED if name in changes]
    if fixed:
        raise ValueError(
            f"a resumed run can't change these: {', '.join(fixed)}; leave them out, or start a new run in another folder"
        )
    return replace(kept, **changes)
