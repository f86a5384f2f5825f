"""Runs a training script for a few commits, and finds what would go wrong with several workers: the process that
`gem-ctl doctor` starts. It looks at what happens, not at the script's text."""

from __future__ import annotations

import gc
import json
import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gem_api.process.lifetime import LAUNCHER, end_with_launcher
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gem_client.session import Session
from gem_client.torch.arguments import parts_of
from gem_client.torch.optimizer import Optimizer
from gem_client.torch.rank_session import RankSession
from gem_client.torch.sampler import ShardSampler

OK, LOOK, FAILS = "ok", "look at this", "will not work"


class _Enough(BaseException):
    """A loop with samples of its own has made its commits. A BaseException, so that `except Exception` does not catch it."""


class Observer(logging.Handler):
    """Notes what a script does with its session, its optimizer and its sampler, during a `with observer.noting()` block.

    Args:
        commits: Number of commits after which a loop without a sampler is stopped. With a sampler, the server ends the run.
        folder: Where the files of `torch.save` go meanwhile, so that none of the user's is overwritten.
    """

    def __init__(self, commits: int, folder: Path) -> None:
        super().__init__(logging.WARNING)
        self._commits, self._folder = commits, folder
        self._seen: set[str] = set()
        self._warnings: list[str] = []
        self._made: list[Optimizer] = []
        self._ended: list[Session] = []
        self._stepping = False  # whether the Optimizer is, which steps the one that it was given
        self._stepped_apart = ""  # the class of an optimizer that was stepped outside of ours
        self._with_gradient: dict[int, set[str]] = {}  # by the id of an optimizer that has made a step
        self._seeds = [torch.initial_seed()]  # at the start, when the worker joined, at its first commit
        self._statistics: list[tuple[torch.Tensor, int]] = []  # BatchNorm's, and their version when the run was over
        self._saved: dict[str, Path] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        see, log, save, load = self._seen.add, logging.getLogger("gem_client"), torch.save, torch.load
        notes: list[tuple[type, str, Callable[[Any], object]]] = [
            (Optimizer, "__init__", self._made.append),
            (Session, "join", lambda _: self._seeds.append(torch.initial_seed())),
            (Session, "commit", self._on_commit),
            (Session, "begin_commit", self._on_commit),
            (Session, "pull_final", self._on_end),
            (Session, "shards", lambda _: see("shards")),
            (Session, "is_first", lambda _: see("first")),
            (Session, "report_evaluation", lambda _: self._seen & {"first", "over"} or see("report")),
            (ShardSampler, "__init__", lambda _: see("sampler")),
            (ShardSampler, "__iter__", lambda _: see("drawn")),
            (ShardSampler, "items", lambda _: see("drawn")),
            (ShardSampler, "complete", lambda _: see("complete")),
            (ShardSampler, "epochs", lambda _: see("complete")),
        ]

        def save_apart(thing: Any, file: Any, *arguments: Any, **named: Any) -> None:
            if "first" not in self._seen:
                see("save")
            if isinstance(file, (str, os.PathLike)):
                file = self._saved.setdefault(os.path.abspath(file), self._folder / f"saved-{len(self._saved)}")
            save(thing, file, *arguments, **named)

        def load_saved(file: Any, *arguments: Any, **named: Any) -> Any:
            path = os.path.abspath(file) if isinstance(file, (str, os.PathLike)) else ""
            return load(self._saved.get(path, file), *arguments, **named)

        with ExitStack() as undo:
            for owner, name, note in notes:
                undo.enter_context(_noting(owner, name, note))
            undo.enter_context(patch.multiple(torch, save=save_apart, load=load_saved))
            undo.callback(register_optimizer_step_pre_hook(self._on_step).remove)
            undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
            log.addHandler(self)
            undo.callback(log.removeHandler, self)
            yield

    def emit(self, record: logging.LogRecord) -> None:
        self._warnings.append(record.getMessage())

    def _on_commit(self, session: Session) -> None:
        if "commit" not in self._seen:
            self._seen.add("commit")
            self._seeds.append(torch.initial_seed())
        if not self._dealt and session.steps_done >= self._commits:
            self._seen.add("stopped")
            raise _Enough

    def _on_end(self, session: Session) -> None:
        self._seen.add("over")
        self._ended.append(session)
        norms = [each for each in gc.get_objects() if issubclass(type(each), _NormBase) and each.running_mean is not None]
        trained = {id(each) for ours in self._optimizers if _session(ours) is session for each in ours.trained.values()}
        mine = [norm.running_mean for norm in norms if trained & set(map(id, norm.parameters()))]
        self._statistics += [(mean, mean._version) for mean in mine]

    def _on_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if isinstance(optimizer, Optimizer):
            self._stepping = True
        elif not self._stepping and any(part is optimizer for ours in self._optimizers for part in parts_of(ours.inner)):
            self._stepped_apart = type(optimizer).__name__

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if isinstance(optimizer, Optimizer):
            self._stepping = False
            names = self._with_gradient.setdefault(id(optimizer), set())
            names |= {name for name, each in optimizer.trained.items() if each.grad is not None}

    @property
    def _optimizers(self) -> list[Optimizer]:
        """Those that have joined a run."""
        return [each for each in self._made if getattr(each, "joined", False)]

    @property
    def _dealt(self) -> bool:
        """Whether the server deals the samples of the loop."""
        return ("drawn" if "sampler" in self._seen else "shards") in self._seen

    def findings(self, failure: str) -> list[tuple[str, str]]:
        """What was found: a level, and what was seen and what to do. `failure`: why the script failed; empty if it did not."""
        if self._stepped_apart:
            failure = (
                f"the loop steps a {self._stepped_apart} itself, and no commit has what that changes: make every step with the "
                f"Optimizer's own step(){'; ' if failure else ''}{failure}"
            )
        elif "sampler" in self._seen and not self._dealt:
            failure = (
                "the loop made a ShardSampler and takes its batches elsewhere: iterate over its loader(), or over "
                f"epoch.loader(), instead of a DataLoader of your own{'; ' if failure else ''}{failure}"
            )
        found = [(LOOK, f"the SDK warns: {text}") for text in dict.fromkeys(self._warnings)]
        if "commit" in self._seen:
            rows = [*self._of_parameters(), *self._of_samples()]
            rows += [] if failure else self._of_the_end()
            found += [(LOOK, bad) if is_bad else (OK, good) for is_bad, bad, good in rows if is_bad or good]
        return found + [(FAILS, failure)] * bool(failure)

    # -- rows: whether something is bad, and what to say if it is, and if it is not

    def _of_parameters(self) -> Iterator[tuple[bool, str, str]]:
        stepped = [each for each in self._optimizers if id(each) in self._with_gradient]
        missing = [name for each in stepped for name in each.trained if name not in self._with_gradient[id(each)]]
        first = f"such as {missing[0]}, " if missing else ""
        yield (
            bool(missing),
            f"{len(missing)} of the run's parameters, {first}got no gradient: an optimizer on the server may move them all the "
            "same. Freeze what is not to be trained before you make the Optimizer",
            "all parameters of the run got a gradient" if self._optimizers else "",
        )
        frozen = sum(len(each.spec.frozen) for each in self._optimizers)
        yield False, "", f"{frozen} frozen parameters: every worker loads the same values itself" if frozen else ""

    def _of_samples(self) -> Iterator[tuple[bool, str, str]]:
        start, joined, first = self._seeds[:3]
        dealt = self._dealt
        yield (
            not dealt and start != joined == first,
            f"the loop draws its own samples, and PyTorch's seed is {first}: workers with the same seed draw the same ones. "
            "Call torch.seed() once the Optimizer is made; seed NumPy, random and environments apart, too",
            f"the {'server deals the' if dealt else 'loop draws its own'} samples",
        )
        yield (
            "sampler" in self._seen and "complete" not in self._seen,
            "one pass over the sampler may end before the run does: loop over sampler.epochs(), or while not sampler.complete",
            "",
        )

    def _of_the_end(self) -> Iterator[tuple[bool, str, str]]:
        stopped = "stopped" in self._seen
        left_out = [each for each in self._optimizers if _session(each) not in self._ended]
        yield (
            stopped or "over" not in self._seen or bool(left_out),
            "the loop takes its batches elsewhere than from a ShardSampler, so it was stopped, and what follows was not tried. "
            "Take them from one, which ends with the run's --epochs; or end the loop yourself, call load_final() after it, and "
            "start the server with --until-stopped"
            if stopped
            else f"load_final() was never called{f' for {len(left_out)} of the models' if self._ended else ''}, so the model "
            "at the end is not the run's: call it after the loop",
            "the model at the end is the run's final one",
        )
        yield (
            any(mean._version == version for mean, version in self._statistics),
            "BatchNorm's statistics are of this worker's own batches: call update_statistics after load_final()",
            "",
        )
        for seen, what in (("report", "reports evaluations during the run"), ("save", "calls torch.save")):
            yield seen in self._seen, f"every worker {what}: put it under `if session.is_first:`", ""


def _session(optimizer: Optimizer) -> Session:
    """The session that the optimizer's commits go through; that of rank 0, if ranks have it together."""
    session = optimizer.session
    return session.own if isinstance(session, RankSession) else session


def _noting(owner: type, name: str, note: Callable[[Any], object]) -> Any:
    """Has `note` called with the object before each call of a method, or each look at a property."""
    original: Any = vars(owner)[name]
    called: Any = original.fget if isinstance(original, property) else original

    @wraps(called)
    def noted(self: Any, *arguments: Any, **named: Any) -> Any:
        note(self)
        return called(self, *arguments, **named)

    return patch.object(owner, name, property(noted) if isinstance(original, property) else noted)


def run(script: str, commits: int, folder: Path) -> list[tuple[str, str]]:
    """Runs a script as `python SCRIPT` does, with the arguments of this process, and returns what was found."""
    observer, failure = Observer(commits, folder), ""
    with observer.noting():
        try:
            runpy.run_path(script, run_name="__main__")
        except _Enough:
            pass
        except SystemExit as end:
            failure = f"the script ended with status {end.code}" if end.code else ""
        except BaseException as error:
            failure = _failure(error, script)
        return observer.findings(failure)


def _failure(error: BaseException, script: str) -> str:
    """Why and where a script failed. Prints the part of the traceback that begins in the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)
    lines = [frame.lineno for frame in traceback.extract_tb(trace) if frame.filename == script]
    where = f"line {lines[-1]} of {Path(script).name}" if lines else Path(script).name
    if isinstance(error, KeyboardInterrupt):
        return f"the script did not end in time and was stopped in {where}: end it with the run, or give it more --seconds"
    hint = "; give the script's own arguments after it" if isinstance(error, IndexError) and len(sys.argv) == 1 else ""
    return f"{where} raises {type(error).__name__}: {error}{hint}"


def main(script: str, commits: str, seconds: str, folder: str, *arguments: str) -> None:
    """Runs a script for at most this number of seconds, and writes what was found to findings.json in the folder."""
    end_with_launcher()
    os.environ.pop(LAUNCHER, None)  # it is not that of the script's own processes
    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.default_int_handler)
    sys.argv[:], sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    signal.setitimer(signal.ITIMER_REAL, float(seconds))
    found = run(script, int(commits), Path(folder))
    signal.setitimer(signal.ITIMER_REAL, 0)
    (Path(folder) / "findings.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
