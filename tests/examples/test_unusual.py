"""examples/unusual: with one worker each program prints what it prints in plain PyTorch; two end with the same model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import gem_client
import gem_client.torch
import pytest
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_client.torch import Optimizer
from kit.model import in_background
from kit.pages import ROOT
from kit.server import DEADLINE, config, serving
from torch import nn
from torch.utils.data import DataLoader

FOLDER = ROOT / "examples/unusual"
MAX_LINES = 60
NUMBER = re.compile(r"-?\d+\.\d+")
ENDLESS = Hyperparameters(epochs=0, steps=1_000_000)  # --until-stopped


@dataclass(frozen=True)
class Program:
    """How an example is run. Each of its servers is replaced by one of the test's.

    Attributes:
        runs: The settings of its servers, in the order in which it names them.
        better: The last line's loss is at most this share of the first line's; 1 if the loss says nothing.
        lines: The first lines, of which all figures are compared; later ones differ by rounding that has grown.
        apart: The largest difference.
        plain: Whether it can run without a server.
    """

    runs: list[Hyperparameters] = field(default_factory=lambda: [ENDLESS])
    better: float = 1.0
    lines: int | None = None
    apart: float = 1e-5
    plain: bool = True


PROGRAMS = {
    "gan": Program([Hyperparameters(epochs=6, batch_size=64), ENDLESS]),
    "two_optimizers": Program(better=0.5, lines=2, apart=1e-3),  # Muon computes in bfloat16
    "sam": Program(better=0.5),
    "lbfgs": Program(better=0.05, lines=2),
    "recurrent_state": Program(better=0.2),
    "reinforcement": Program(),
    "sparse_embedding": Program([Hyperparameters(epochs=10, batch_size=64)], better=0.5),
    "best_so_far": Program([Hyperparameters(epochs=6, batch_size=64)], plain=False),
    "stream": Program([Hyperparameters(epochs=1, batch_size=1, shard_size=1)], better=0.8),
}
ADDRESSES = ["127.0.0.1:50051", "127.0.0.1:50061"]  # that the examples name


class Recorder(gem_client.torch.ShardSampler):
    """A sampler that notes what the server deals to the only worker."""

    dealt: list[list[int]]

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            Recorder.dealt.append(batch)
            yield batch

    def items(self) -> Iterator[Any]:
        for item in super().items():
            Recorder.dealt.append([self._dataset.index(item)])  # type: ignore[attr-defined]
            yield item


class Replay:
    """A sampler without a server: deals what a worker got before, in as many epochs."""

    def __init__(self, epochs: int, session: Any, dataset: Any) -> None:
        self._dataset, self._batches = dataset, list(Recorder.dealt)
        self._each = len(self._batches) // epochs
        self.complete = False

    def epochs(self) -> Iterator[Any]:
        for number in range(len(self._batches) // self._each):
            batches = self._batches[number * self._each : (number + 1) * self._each]
            yield SimpleNamespace(number=number, loader=partial(DataLoader, self._dataset, batch_sampler=batches))

    def items(self) -> Iterator[Any]:
        yield from (self._dataset[index] for (index,) in self._batches)
        self.complete = True


class Plain:
    """An Optimizer without a server: the steps are those of the optimizer that is given."""

    def __init__(self, inner: Any, session: Any) -> None:
        self._inner, self.zero_grad = inner, inner.zero_grad

    def step(self, closure: Any = None, *, loss: Any = None) -> Any:
        return self._inner.step() if closure is None else self._inner.step(closure)

    def finish(self) -> None: ...
    def load_final(self) -> None: ...


def run(name: str, addresses: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The lines that an example prints, and its names."""
    path, printed = FOLDER / f"{name}.py", list[str]()
    text = path.read_text(encoding="utf-8")
    for there, here in zip(ADDRESSES, addresses, strict=False):
        text = text.replace(there, here)
    names: dict[str, Any] = {"__name__": "__main__", "print": lambda line, flush: printed.append(line)}
    exec(compile(text, str(path), "exec", dont_inherit=True), names)
    return printed, names


def servers(name: str) -> tuple[AbstractContextManager[Any], list[Any]]:
    """The servers of an example: what stops them, and themselves."""
    running = ExitStack()
    return running, [running.enter_context(serving(config(settings))) for settings in PROGRAMS[name].runs]


def figures(name: str, addresses: list[str]) -> list[list[float]]:
    """All figures with a point of each line that an example prints."""
    printed, _ = run(name, addresses)
    return [[float(figure) for figure in NUMBER.findall(line)] for line in printed]


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.plain])
def test_one_worker_prints_what_the_program_prints_in_plain_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS[name]
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(gem_client.torch, "ShardSampler", Recorder)
    Recorder.dealt = []
    running, live = servers(name)
    with running:
        ours = figures(name, [each.address for each in live])
        assert all(each.on_loop(lambda each=each: each.core.complete) for each in live if each.config.hyperparameters.epochs)
    monkeypatch.setattr(gem_client, "connect", lambda address: nullcontext())
    monkeypatch.setattr(gem_client.torch, "ShardSampler", partial(Replay, program.runs[0].epochs))
    monkeypatch.setattr(gem_client.torch, "Optimizer", Plain)
    plain = figures(name, [])
    assert len(ours) == len(plain) >= 4
    assert ours[-1][0] <= program.better * ours[0][0]
    for mine, other in zip(ours[: program.lines], plain[: program.lines], strict=True):
        assert mine == pytest.approx(other, rel=program.apart, abs=program.apart)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "best_so_far"])
def test_two_workers_end_with_the_same_models(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Barrier(2)

    class Together(Optimizer):
        """Has nobody begin, and so nobody end, before both have joined."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            both.wait(DEADLINE)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(gem_client.torch, "Optimizer", Together)
    running, live = servers(name)
    with running:
        addresses = [each.address for each in live]
        workers = [in_background(partial(run, name, addresses)) for _ in range(2)]
        (one, models), (other, same) = [models_of(worker.result(DEADLINE)) for worker in workers]
    assert len(models) >= len(live)
    for model, its in zip(models, same, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), its.parameters(), strict=True))
    assert len(one) + len(other) >= 5


def test_the_best_model_so_far_is_the_best_that_was_seen_and_the_one_that_the_worker_ends_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    running, live = servers("best_so_far")
    with running:
        printed, names = run("best_so_far", [each.address for each in live])
    seen = [float(line.split()[-1]) for line in printed]
    assert len(seen) == 7  # after each epoch, and of the final θ
    assert min(seen) < seen[-1], "the best is the last one: any file would do"
    (file,) = tmp_path.iterdir()
    assert torch.load(file)["loss"] == pytest.approx(min(seen), abs=1e-6)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(names["model"](names["inputs"][:360]), names["targets"][:360])
    assert float(loss) == pytest.approx(min(seen), abs=1e-6)


def models_of(ended: tuple[list[str], dict[str, Any]]) -> tuple[list[str], list[nn.Module]]:
    """The lines that an example printed, and its models."""
    printed, names = ended
    return printed, [value for value in names.values() if isinstance(value, nn.Module)]


def test_each_is_short() -> None:
    lengths = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDER.glob("*.py")}
    assert lengths.keys() == PROGRAMS.keys()
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are small, and the order of sums must not differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
