"""The run that a server starts with: a new one, or the one in its checkpoints and log."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple

from gem_api.checkpoint import STATE
from gem_api.hyperparameters import FIXED, SHARD_SIZE, USED_BY_WORKERS, Hyperparameters, flag
from gem_api.process.files import lock, sync_directory
from gem_api.process.logs import Logger

from gem_server.config import ServerConfig, StartError
from gem_server.core.memory_budget import Memory
from gem_server.core.norm_bound import NormHistory
from gem_server.core.quarantine import Quarantine
from gem_server.core.state_machine import Core
from gem_server.durability import checkpoint, recovery
from gem_server.durability.journal import Journal
from gem_server.durability.log_file import LogFile
from gem_server.durability.segment import DamagedLog
from gem_server.durability.storage import DISK
from gem_server.rules import require_named


class Beginning(NamedTuple):
    """The run that a server starts with.

    Attributes:
        core: A new run's, or the one restored from the newest checkpoint and the log since.
        number: Number of the log's last record.
        outdated: Whether this start has changed hyper-parameters that the run's workers use.
        written: Unix time at which that checkpoint was written; None if a new run begins.
    """

    core: Core
    number: int
    outdated: bool
    written: float | None = None


def make_log(config: ServerConfig, run_id: str, number: int) -> tuple[Journal, LogFile] | None:
    """The log of a run whose last record is `number`, and its file; None if no log is kept. Raises StartError."""
    if config.durability != "log" or config.checkpoint_dir is None:
        return None
    directory = recovery.log_directory(config.checkpoint_dir)
    try:
        DISK.make_directories(directory, 0o700)
    except OSError as error:
        raise StartError(f"can't create the log's folder: {error}") from error
    return Journal(run_id, recovery.next_serial(config.checkpoint_dir), number), LogFile(DISK, directory)


def make_core(config: ServerConfig, clock: Callable[[], float], logger: Logger) -> Beginning:
    """A new core, or one restored from the newest checkpoint and the log since.

    Raises:
        StartError: There is no usable checkpoint, or the log is damaged.
    """
    try:
        if resumed := _resumed(config, clock, logger):
            return resumed
        _require_end(config.hyperparameters, config)
        return Beginning(_new_core(secrets.token_hex(4), _new_hyperparameters(config, logger), config), 0, False)
    except (ValueError, checkpoint.BadCheckpoint, DamagedLog) as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise StartError(f"can't read the checkpoints: {error}") from error


def _require_end(settings: Hyperparameters, config: ServerConfig) -> None:
    """Raises ValueError for a run without a limit, unless the user asked for one."""
    if settings.endless and not config.until_stopped:
        raise ValueError(
            "--epochs 0 without --steps would train forever: set one of them, or --until-stopped if that is what you want"
        )


def _new_hyperparameters(config: ServerConfig, logger: Logger) -> Hyperparameters:
    """The hyperparameters of a new run. Raises ValueError if the user wants shards smaller than a batch, or has given a setting
    that the rule does not use."""
    settings = config.hyperparameters
    settings.require_used(config.given)
    if settings.shard_size == SHARD_SIZE and "shard_size" not in config.given:
        settings = replace(settings, shard_size=settings.default_shard_size)
        if settings.shard_size != SHARD_SIZE:
            logger.info("shards hold whole batches", shard_size=settings.shard_size, batch_size=settings.batch_size)
    if settings.shard_size < settings.batch_size:
        raise ValueError(
            f"shard_size {settings.shard_size} would cut batches of --batch-size {settings.batch_size} short: "
            "set it to at least the batch size, or leave it out"
        )
    return settings


def _new_core(run_id: str, settings: Hyperparameters, config: ServerConfig) -> Core:
    return Core(
        run_id,
        settings,
        lease_seconds=config.lease_seconds,
        memory_limit=config.memory_limit,
        # The others deal no shards.
        min_workers=config.min_workers if config.range.leads else 1,
        start_quiet_seconds=config.start_quiet_seconds if config.range.leads else 0.0,
        new_id=lambda: secrets.token_hex(16),
        norms=NormHistory(config.max_norm_ratio),
        quarantine=Quarantine(config.rejections_until_quarantine),
        logged=config.durability == "log",
        stated=config.given,
        part=config.range,
    )


def _kept_core(run_id: str, kept: Hyperparameters, config: ServerConfig) -> Core:
    """A core for a resumed run. Raises ValueError if this server does not know its rule."""
    require_named(kept.rule, config.hyperparameters.rule)
    return _new_core(run_id, kept, config)


def _resumed(config: ServerConfig, clock: Callable[[], float], logger: Logger) -> Beginning | None:
    """The run of the newest checkpoint and the log since; None if a new run is to begin."""
    directory = config.checkpoint_dir
    if directory is None:
        return None
    if not config.resume:
        _require_no_checkpoint(directory)
        return None
    recovered = _recovered(directory, config, clock, logger)
    if recovered is None:  # as at a cluster's first start
        logger.info("no checkpoint to resume: a new run begins", checkpoint_dir=str(directory.absolute()))
        return None
    core = recovered.core
    changed = _change_hyperparameters(core, config, logger)
    _require_within_limit(core.memory)
    logger.info(
        "resumed", checkpoint=str(recovered.checkpoint), version=core.central.version, leases=len(core.leases.live),
        from_log=core.central.version - recovered.saved,
    )  # fmt: skip
    outdated = bool(changed.intersection(USED_BY_WORKERS))
    return Beginning(core, recovered.number, outdated, (recovered.checkpoint / STATE).stat().st_mtime)


def _require_no_checkpoint(directory: Path) -> None:
    """Raises ValueError: a new run must not mix its checkpoints with another's."""
    if checkpoint.list_checkpoints(directory):
        raise ValueError(
            f"{directory} already holds a run's checkpoints: add --resume to continue that run, or name another folder"
        )


def _recovered(directory: Path, config: ServerConfig, clock: Callable[[], float], logger: Logger) -> recovery.Recovered | None:
    recovered = recovery.recover(
        directory,
        lambda run_id, kept: _kept_core(run_id, kept, config),
        clock(),
        lambda path, why: logger.warning("checkpoint refused", path=str(path), why=why),
        logged=config.durability == "log",
    )
    if recovered is not None and recovered.torn is not None:
        logger.info("the log ends in an unacknowledged partial record, which is ignored", segment=str(recovered.torn))
    if recovered is not None and recovered.missing is not None:
        logger.warning(
            "no log follows the newest checkpoint: what was acknowledged after it, if anything, is lost. Unless you restored a "
            "backup, stop the server and put the folder's log back as it was", missing=str(recovered.missing),
        )  # fmt: skip
    if recovered is not None and recovered.unlogged:
        logger.warning(
            "no log was kept: commits after this checkpoint, if there were any, are lost, acknowledged ones too (--durability "
            "log keeps them)", version=recovered.saved,
        )  # fmt: skip
    return recovered


def _require_within_limit(memory: Memory) -> None:
    """Raises ValueError if the run's workers already hold more memory than this server allows."""
    if memory.limit and memory.held > memory.limit:
        raise ValueError(f"the run's workers hold {memory.held} bytes, but memory_limit is {memory.limit}: raise the limit")


def _change_hyperparameters(core: Core, config: ServerConfig, logger: Logger) -> set[str]:
    """Changes a resumed run's hyperparameters as the user asked; returns the changed names. Raises ValueError."""
    kept = core.settings
    wanted = resumed_hyperparameters(kept, config.hyperparameters, config.given)
    if not kept.endless:
        _require_end(wanted, config)
    core.change(wanted)
    changes = {name: f"{old} -> {new}" for name, old in vars(kept).items() if old != (new := vars(wanted)[name])}
    if changes:
        logger.warning("this start changes the run's hyperparameters", **changes)
    return set(changes)


def lock_directory(directory: Path, logger: Logger, resume: bool = False) -> IO[bytes]:
    """Locks a checkpoint folder, which is made if it does not exist, against other servers until the returned file is closed.
    With `resume` a new folder is a warning. Raises StartError."""
    if resume and not directory.exists():
        logger.warning(
            "--resume finds no such folder: is its name right? A new run begins", checkpoint_dir=str(directory.absolute())
        )
    with ExitStack() as opened:
        try:
            DISK.make_directories(directory)
            file = opened.enter_context((directory / ".lock").open("ab"))
            if not sync_directory(directory):
                logger.warning(
                    "this file system does not say when the names of files are on the disk: a crash of the machine may take "
                    "the newest checkpoint and what the log has acknowledged since", checkpoint_dir=str(directory),
                )  # fmt: skip
        except OSError as error:
            raise StartError(f"can't use {directory} for checkpoints: {error}") from error
        _lock(file, directory)
        opened.pop_all()
    return file


def _lock(file: IO[bytes], directory: Path) -> None:
    try:
        if lock(file):
            return
    except OSError as error:
        raise StartError(
            f"can't lock {directory}: {error.strerror}. Two servers in one folder would destroy the run: mount its file system "
            "with locks, or name a folder on another one"
        ) from error
    raise StartError(f"another server is using {directory}: stop it first, or name another folder")


def resumed_hyperparameters(kept: Hyperparameters, asked: Hyperparameters, given: frozenset[str]) -> Hyperparameters:
    """The checkpoint's hyper-parameters with the user's changes. Raises ValueError if a fixed one would change, or one that the
    rule does not use."""
    changes = {name: getattr(asked, name) for name in given if getattr(asked, name) != getattr(kept, name)}
    fixed = [f"{flag(name)} was {getattr(kept, name)}" for name in FIXED if name in changes]
    if fixed:
        raise ValueError(
            f"a resumed run can't change: {', '.join(fixed)}; leave them out, or start a new run in another folder"
        )
    changed = replace(kept, **changes)
    changed.require_used(changes)
    return changed
