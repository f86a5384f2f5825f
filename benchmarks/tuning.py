"""How settings change a run under AdamW: the measurements behind docs/tuning.md.

Each run has a real server and real workers, which talk over gRPC; all of them are threads of this process, because starting
processes would take longer than the runs. A result is kept in docs/results/tuning/runs.json and is not measured again. The page
and the picture there are drawn from that file.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gem_client
import numpy as np
import structlog
import torch
from gem_api.hyperparameters import Hyperparameters
from gem_client.torch import Optimizer
from gem_server.config import ServerConfig
from gem_server.event_loop import DecidingLoop
from gem_server.server import Server
from gem_worker.launcher.run_folder import RunFolder
from gem_worker.tasks.mnist import read_idx
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.lib.launch import RunFailed
from benchmarks.lib.page import row
from benchmarks.lib.results import Store, plain
from benchmarks.lib.runs import study
from benchmarks.lib.style import BLUE, panels, save, styled

RESULTS = Path(__file__).parents[1] / "docs/results/tuning"
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
EPOCHS = 2
BATCH, SAMPLES = 64, 60_000
HIDDEN = 128
CURVE_POINTS = 100
FINAL = 0.1  # share of a run, at its end, that the final loss is the mean of
START_SECONDS = 120.0
Run = dict[str, Any]
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Choice:
    """The settings of a run; what is not named has the server's default."""

    workers: int
    optimizer: str = "adamw"
    learning_rate: float | None = None  # with optimizer "worker": of each worker's own AdamW
    rule: str = "gem"
    kappa: float | None = None
    local_steps: int = 1
    epochs: int = EPOCHS

    def hyperparameters(self) -> Hyperparameters:
        """The run's settings."""
        given = {name: value for name, value in vars(self).items() if name != "workers" and value is not None}
        if self.optimizer == "worker":
            del given["learning_rate"]
        given |= {"smallest_share": 1.0, "reply_wait": 0.0, "rule_options": ""}  # not in step: as it was measured
        return Hyperparameters(batch_size=BATCH, **given).with_defaults(given)


def plan() -> Iterator[Choice]:
    """Every run, those that the page needs most first."""
    yield from (Choice(16, learning_rate=rate) for rate in RATES)
    yield from (Choice(16, learning_rate=1e-3, kappa=kappa) for kappa in (0.1, 12, 0.75, 3))
    yield from (Choice(1, learning_rate=rate) for rate in RATES)
    yield from (Choice(16, learning_rate=rate, rule="downpour") for rate in RATES[:4])
    yield from (Choice(30, learning_rate=rate) for rate in RATES[:4])
    yield from (Choice(workers, learning_rate=1e-3, epochs=8) for workers in (30, 100))
    yield from (Choice(16, "worker", rate, local_steps=steps) for steps in (1, 4) for rate in RATES[1:3])
    yield from (Choice(4, learning_rate=rate) for rate in RATES[1:3])
    yield from (Choice(16, "sgd", rate) for rate in (0.05, 0.5))


def make_model() -> nn.Sequential:
    """A perceptron of one hidden layer, 102 thousand parameters: a gradient takes a millisecond."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def read_mnist(folder: Path, prefix: str) -> Data:
    """Normalised images, float32, shape (n, 784), and labels, int64, shape (n,). Raises TaskError."""
    images = torch.from_numpy(read_idx(folder, f"{prefix}-images-idx3-ubyte", 3).astype(np.float32)).flatten(1)
    labels = torch.from_numpy(read_idx(folder, f"{prefix}-labels-idx1-ubyte", 1).astype(np.int64))
    return (images / 255 - 0.1307) / 0.3081, labels


@contextmanager
def serving(settings: Hyperparameters, workers: int, history: Path) -> Iterator[str]:
    """Runs a server in a thread; yields its address. It waits for all workers, and writes a line for each commit."""
    config = ServerConfig(
        hyperparameters=settings, listen="127.0.0.1:0", metrics_listen="", lease_seconds=600, min_workers=workers,
        history=history,
    )  # fmt: skip
    started: Future[tuple[asyncio.AbstractEventLoop, Server]] = Future()

    async def serve() -> None:
        server = Server(config, time.monotonic, time.time, structlog.get_logger())
        await server.start()
        started.set_result((asyncio.get_running_loop(), server))
        await server.stopped()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=DecidingLoop) as runner:
                runner.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    loop, server = started.result(START_SECONDS)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        loop.call_soon_threadsafe(server.stop, "the run is complete")
        thread.join()


def train(address: str, choice: Choice, data: Data, number: int, ends: list[nn.Sequential]) -> None:
    """One worker: the loop of the guide "Your own loop"."""
    inputs, labels = data
    model = make_model()
    with gem_client.connect(address, name=f"worker-{number}") as session:
        own = choice.optimizer == "worker"
        inner = torch.optim.AdamW(model.named_parameters(), lr=choice.learning_rate or 0) if own else None
        optimizer = Optimizer(inner or model.named_parameters(), session)
        shards = session.shards(len(labels))
        while not shards.complete:
            for batch in shards:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
                loss.backward()
                optimizer.step(loss=loss)
            optimizer.finish()
        optimizer.load_final()
    ends.append(model)


def measure(choice: Choice, training: Data, test: Data) -> Run:
    """Makes a run. Raises RunFailed if a worker did not reach its end."""
    ends: list[nn.Sequential] = []
    with tempfile.TemporaryDirectory(prefix="gem-tuning-") as name:
        folder = RunFolder(Path(name))
        with serving(choice.hyperparameters(), choice.workers, folder.commits) as address:
            threads = [
                threading.Thread(target=train, args=(address, choice, training, number, ends))
                for number in range(choice.workers)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if len(ends) < choice.workers:
            raise RunFailed(f"{choice.workers - len(ends)} workers failed")
        history = folder.history()
    with torch.no_grad():
        accuracy = float((ends[0](test[0]).argmax(1) == test[1]).float().mean())
    return result(history, accuracy)


def result(history: dict[str, Any], accuracy: float) -> Run:
    """What is kept of a run: its final figures, and curves of at most CURVE_POINTS points."""
    last = max(1, int(FINAL * len(history["loss"])))
    chunks = np.array_split(np.arange(len(history["loss"])), min(CURVE_POINTS, len(history["loss"])))
    curves = {name: [plain(history[name][chunk].mean(), 4) for chunk in chunks] for name in ("version", "loss", "pi_median")}
    return {
        "commits": len(history["loss"]),
        "test_accuracy": plain(accuracy, 4),
        "final_loss": plain(history["loss"][-last:].mean(), 4),
        "staleness": plain(history["staleness"].mean(), 4),
        "pi_median": plain(history["pi_median"].mean(), 4),
        "pi_zero": plain(history["pi_zero_ratio"].mean(), 4),
        "curves": curves,
    }


def stored() -> Store[Choice, Run]:
    """The stored results, with four digits."""
    return Store(RESULTS / "runs.json", "choice", Choice, lambda run: run, lambda choice, run: run)


SHOWN = {
    "healthy: rate 0.001, κ 1.5": Choice(16, learning_rate=1e-3),
    "too hot: rate 0.03, κ 1.5": Choice(16, learning_rate=3e-2),
    "starved: rate 0.001, κ 0.1": Choice(16, learning_rate=1e-3, kappa=0.1),
}  # the columns of the picture


@styled
def draw(runs: dict[Choice, Run]) -> Figure:
    """Draws the loss and the median of π of a healthy run, of one that is too hot and of one that starves."""
    title = "AdamW on the server, 16 workers, MNIST: one epoch is 938 commits"
    figure, places = panels(2, len(SHOWN), title, 2.4, sharex=True, sharey="row")
    for number, (name, choice) in enumerate(SHOWN.items()):
        curves, loss, pi = runs[choice]["curves"], places[number], places[number + len(SHOWN)]
        loss.plot(curves["version"], curves["loss"], color=BLUE)
        pi.plot(curves["version"], curves["pi_median"], color=BLUE)
        loss.set(title=name, ylim=(0, 2.5))
        pi.set(xlabel="commits", ylim=(0, 0.6))
    places[0].set_ylabel("training loss")
    places[len(SHOWN)].set_ylabel("median π of a commit")
    return figure


def table_row(choice: Choice, run: Run) -> str:
    """A line of the page's table."""
    matched = choice.rule == "gem"
    method = f"{choice.rule} {choice.optimizer}" + (f", λ {choice.local_steps}" if choice.local_steps > 1 else "")
    workers = str(choice.workers) + (f", {choice.epochs} epochs" if choice.epochs != EPOCHS else "")
    kappa = f"{choice.hyperparameters().kappa:g}" if matched else "–"
    pi = f"{run['pi_median']:.3f}" if matched and run["pi_median"] is not None else "–"
    loss = "–" if run["final_loss"] is None else f"{run['final_loss']:.3f}"
    return row([method, workers, f"{choice.learning_rate:g}", kappa, f"{100 * run['test_accuracy']:.2f}", loss, pi])


def write_page(runs: dict[Choice, Run], folder: Path) -> Path:
    """Writes README.md and, if its runs are there, curves.png. Returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    order = sorted(
        runs, key=lambda c: (c.rule, c.optimizer, c.workers, c.epochs, c.local_steps, c.kappa or 1.5, c.learning_rate or 0)
    )
    order.sort(key=lambda choice: (choice.rule != "gem", choice.optimizer))
    page = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").format(
        rows="\n".join(table_row(choice, runs[choice]) for choice in order), batch=BATCH,
        parameters=sum(parameter.numel() for parameter in make_model().parameters()),
    )  # fmt: skip
    (folder / "README.md").write_text(page, encoding="utf-8")
    if all(choice in runs for choice in SHOWN.values()):
        save(draw(runs), folder / "curves.png")
    return folder / "README.md"


def missing(parts: Sequence[str], data: Path | None) -> Iterator[tuple[str, Callable[[], str]]]:
    if data is None:
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    runs, training, test = stored(), read_mnist(data, "train"), read_mnist(data, "t10k")

    def make(choice: Choice) -> str:
        runs.add(choice, measure(choice, training, test))
        return table_row(choice, runs[choice])

    for choice in plan():
        if choice not in runs:
            yield str(choice), partial(make, choice)


about = "Makes the runs that have no result yet, if --data names MNIST, then draws the page and the picture."
main = study(about, (), missing, lambda: write_page(stored(), RESULTS))

if __name__ == "__main__":
    main()
