"""Makes one run through the real service, with gem-train, and keeps the results of all in one JSON file, a line for each."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.lib import machine
from benchmarks.lib.launch import RunFailed, launch
from benchmarks.lib.results import DamagedError, Store, plain
from benchmarks.models.runs import METHODS, Outcome, Run

_TASK = "examples.character_transformer.task:Characters"
_OWN_TASK = "examples.character_transformer.task:CharactersOwnAdamW"
# One process for all workers: they begin together, which several processes don't, and these runs are short.
_COMMON = (
    "--shards=replicate", "--processes=1", "--durability=memory",
)  # fmt: skip
_PACKAGES = ("torch", "numpy", "numba", "grpcio")  # whose versions the results name
_SETTINGS = {"GEM_EVALUATE_EVERY": "100000", "GEM_LEASE_SECONDS": "600"}


def measure(run: Run, mnist: Path | None) -> Outcome:
    """Trains to the end. `mnist` is the folder of MNIST's files. Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="gem-models-") as name:
        scratch = Path(name)
        folder = launch(command(run, mnist, scratch), scratch / "output.txt", variables=variables(run))
        try:
            summary = json.loads(folder.summary.read_text())
        except (OSError, ValueError) as error:
            raise RunFailed(f"the run's folder can't be read: {error!r}") from error
    return Outcome(
        summary["outcome"], plain(summary["test_loss"]), plain(summary["test_accuracy"]), summary["seconds"],
        plain(summary["staleness_mean"]), plain(summary["pi_median"]),
    )  # fmt: skip


def command(run: Run, mnist: Path | None, runs: Path) -> list[str]:
    """gem-train's command line, which leaves its run folder in `runs`."""
    method = METHODS[run.method]
    task = "mnist" if run.task == "mnist" else _OWN_TASK if method.own else _TASK
    flags = [
        f"--task={task}", f"--rule={method.rule}{_settings(run)}", f"--optimizer={method.optimizer}", f"--runs={runs}",
        f"--workers={run.workers}", f"--steps={run.steps // method.local_steps}", f"--seed={run.seed}",
        f"--batch-size={run.batch_size}",
        *_COMMON,
    ]  # fmt: skip
    flags += [f"--data={mnist.resolve()}"] if run.task == "mnist" and mnist else []
    flags += [f"--local-steps={method.local_steps}"] if method.local_steps > 1 else []
    if not method.own:
        flags += [f"--learning-rate={run.rate}", f"--schedule=constant:warmup={run.warmup * run.workers}"]
    return [sys.executable, "-m", "gem_worker.launcher.cli", *flags]


def _settings(run: Run) -> str:
    """The rule's settings, as they follow its name."""
    if METHODS[run.method].rule == "diloco":
        return f":delay={run.workers}"
    return f":kappa={run.kappa}" if run.kappa is not None else ""


def variables(run: Run) -> dict[str, str]:
    """The environment variables: settings that are no options, and those of the workers' own optimizers."""
    if not METHODS[run.method].own:
        return _SETTINGS
    return {**_SETTINGS, "CHARACTERS_LEARNING_RATE": str(run.rate), "CHARACTERS_WARMUP_STEPS": str(run.warmup)}


def stored(path: Path) -> Store[Run, Outcome]:
    """The stored results. Raises DamagedError."""
    head = {"format": 1, "conditions": here()}
    return Store(path, "run", Run, lambda outcome: vars(outcome), lambda run, row: Outcome(**row), head)


def require_same_text(store: Store[Run, Outcome]) -> None:
    """Raises DamagedError if this Python's library, which the runs train on, is another text than that of the results."""
    theirs = store.head["conditions"].get("python")
    if theirs != platform.python_version():
        raise DamagedError(
            f"the results in {store.path} are on the standard library of Python {theirs}, and this is "
            f"{platform.python_version()}: continue with that version, or give another --out"
        )


def here() -> dict[str, Any]:
    """The conditions of runs on this machine: processor, cores, memory, system, Python and libraries."""
    return {**machine.description(), **{name: metadata.version(name) for name in _PACKAGES}}
