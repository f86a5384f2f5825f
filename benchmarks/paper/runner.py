"""Runs the experiments whose results are missing, one after the other, and saves each result at once."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gem_worker.tasks import TaskError, load_task

from benchmarks.lib.launch import RunFailed, launch
from benchmarks.paper import sequential, simulated
from benchmarks.paper.estimate import Pace, duration, seconds_left
from benchmarks.paper.experiments import Experiment
from benchmarks.paper.metrics_poller import MetricsPoller
from benchmarks.paper.results import Result, load, read_run

_SAY_SECONDS = 10.0
_GROUPS = 5  # processes that a staged run's workers are spread over: what is replaced at a time


@dataclass
class Runner:
    """Runs experiments.

    Args:
        folder: Keeps a file for each result.
        data: Folder of the task's data; None for a task that needs none.
        processes: Worker processes that a run's workers share.
        say: Prints a line.
    """

    folder: Path
    data: Path | None
    processes: int
    say: Callable[[str], None]
    failures: dict[str, str] = field(default_factory=dict)
    _pace: Pace = field(default_factory=Pace)
    _said: float = 0.0

    def path(self, experiment: Experiment) -> Path:
        return self.folder / f"{experiment.key}.json"

    def result(self, experiment: Experiment) -> Result | None:
        """The experiment's stored result, if there is one."""
        return load(self.path(experiment), experiment)

    def run(self, experiments: Sequence[Experiment]) -> None:
        """Runs the experiments without a result. If one fails, it is recorded in `failures`, and the others still run."""
        missing = [each for each in experiments if self.result(each) is None]
        left = duration(seconds_left(missing, None, 0, self._pace.rate()))
        self.say(f"{len(experiments)} experiments, {len(missing)} of them to run: at a guess {left}")
        for number, experiment in enumerate(missing, 1):
            self.say(f"[{number}/{len(missing)}] {experiment.key}")
            try:
                result = self._run(experiment, missing[number:])
            except (RunFailed, TaskError) as error:
                self.failures[experiment.key] = str(error)
                self.say(f"  no result: {error}")
                continue
            result.save(self.path(experiment))
            accuracy = "–" if result.test_accuracy is None else f"{100 * result.test_accuracy:.2f} %"
            self.say(f"  {result.outcome} after {duration(result.seconds)}, test accuracy {accuracy}")

    def _run(self, experiment: Experiment, later: Sequence[Experiment]) -> Result:
        progress = _Progress(experiment, later, self._pace, self._tell)
        if experiment.setting == "sequential":
            result = sequential.run(experiment, self.data, progress.done)
        elif experiment.setting == "simulated":
            result = simulated.run(experiment, load_task(experiment.task, self.data), progress.done)
        else:
            with tempfile.TemporaryDirectory(prefix="gem-paper-") as folder:
                result = self._follow(experiment, Path(folder), progress)
        progress.end()
        return result

    def _follow(self, experiment: Experiment, folder: Path, progress: _Progress) -> Result:
        """Makes the run, and reads the folder that it left. Raises RunFailed."""
        output = folder / "output.txt"
        monitor = MetricsPoller(output)

        def watch() -> None:
            monitor.poll()
            progress.done(monitor.version * experiment.local_steps)

        run_folder = launch(
            command(experiment, self.data, folder / "runs", self.processes), output, watch, variables(experiment)
        )
        try:
            return read_run(experiment, run_folder, monitor.tensors)
        except (OSError, ValueError, KeyError) as error:
            raise RunFailed(f"the run's folder can't be read: {error!r}") from error

    def _tell(self, line: str) -> None:
        now = time.monotonic()
        if now - self._said >= _SAY_SECONDS:
            self._said = now
            self.say(line)


@dataclass
class _Progress:
    """Reports the progress of the current experiment, and the time left."""

    experiment: Experiment
    later: Sequence[Experiment]
    pace: Pace
    tell: Callable[[str], None]
    began: float = 0.0
    first: int = 0
    gradients: int = 0

    def done(self, gradients: int) -> None:
        if gradients and not self.began:
            self.began, self.first = time.monotonic(), gradients
        self.gradients = gradients
        if gradients > self.first:
            rate = self.pace.rate(*self._measured())
            left = duration(seconds_left(self.later, self.experiment, gradients, rate))
            self.tell(f"  {gradients:,} of {self.experiment.gradients:,} gradients; about {left} left for all")

    def end(self) -> None:
        self.pace.add(self.experiment, *self._measured())

    def _measured(self) -> tuple[int, float]:
        if self.experiment.step_seconds or not self.began:
            return 0, 0.0
        return self.gradients - self.first, time.monotonic() - self.began


def command(experiment: Experiment, data: Path | None, runs: Path, processes: int) -> list[str]:
    """The command line of an experiment's own process, which leaves its run folder in `runs`."""
    staged = experiment.setting == "staged"
    flags = [
        f"--task={experiment.task}", f"--rule={_rule(experiment)}", f"--workers={experiment.workers}", f"--runs={runs}",
        f"--learning-rate={experiment.learning_rate}", f"--batch-size={experiment.batch_size}", f"--seed={experiment.seed}",
        "--shards=replicate",
    ]  # fmt: skip
    flags += [f"--data={data.resolve()}"] if data else []
    flags += [f"--local-steps={experiment.local_steps}"] if experiment.local_steps > 1 else []
    if staged:
        flags += [f"--step-seconds={experiment.step_seconds}"] if experiment.step_seconds else []
        commits = experiment.workers * experiment.commits_each
        flags += [f"--commits={commits}", f"--processes={_GROUPS}"]
        flags += [f"--slowdown={experiment.slowdown}", f"--replacements={experiment.replacements}"]
    else:
        flags += [f"--steps={experiment.commits_each}", "--durability=memory"]
        flags += [f"--processes={processes}"] if processes < experiment.workers else []
    return [sys.executable, "-m", "benchmarks.paper.staged" if staged else "gem_worker.launcher.cli", *flags]


def variables(experiment: Experiment) -> dict[str, str]:
    """The settings of gem-train that are no options, as environment variables."""
    return {"GEM_TURNS": experiment.turns, "GEM_STEP_SECONDS": str(experiment.step_seconds)}


def _rule(experiment: Experiment) -> str:
    """The rule with its settings, as --rule takes them."""
    settings = experiment.rule_options.split()
    if experiment.rule == "gem":
        settings += [f"{name}={getattr(experiment, name)}" for name in ("momentum", "kappa", "snapshot", "pi_max")]
    return f"{experiment.rule}:{','.join(settings)}" if settings else experiment.rule
