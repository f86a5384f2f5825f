"""What a commit costs with each shared optimizer, beside the memory that it must move, and beside PyTorch's own optimizers:
`python -m benchmarks.server.optimizer_pass`."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import click
import numpy as np
import torch
from gem_api.layout import Layout
from gem_server.rules import RuleInput, Shared, make_rule

from benchmarks.lib.measuring import measurement
from benchmarks.server.fused_pass import times_of

# Arrays of P floats that a commit reads and writes at least: the gradient, θ and s, and the optimizer's state.
ARRAYS = {"sgd": (4, 3), "adam": (5, 4), "adamw": (5, 4), "lion": (4, 3)}


@measurement(parameters=(156_450, 1_000_000, 25_000_000), seconds=3.0)
def main(parameters: tuple[int, ...], seconds: float) -> None:
    """Interleaves, in one thread: gem around each optimizer, the optimizer alone (downpour), and PyTorch's AdamW and SGD with
    momentum. "÷ floor" compares the least time with that of copying as many bytes as the commit must read and write."""
    torch.set_num_threads(1)
    click.echo("        P  pass              median ms    least ms   ÷ gem sgd   ÷ floor")
    for size in parameters:
        passes = {**_rules(size), **_rivals(size)}
        floor = times_of({"copy": _copy(size)}, seconds / 4)["copy"]
        times = times_of(passes, seconds)
        for name, taken in times.items():
            arrays = ARRAYS.get(name.split()[-1].lower(), ARRAYS["adamw"])
            least = min(taken)
            click.echo(
                f"{size:9d}  {name:16s} {1e3 * statistics.median(taken):10.4f} {1e3 * least:11.4f} "
                f"{least / min(times['gem sgd']):11.2f} {least / (min(floor) * sum(arrays) / 2):9.2f}"
            )


def _rules(size: int) -> dict[str, Callable[[], object]]:
    """One commit under each rule and optimizer, by name; each on arrays of its own."""
    return {f"{rule} {optimizer}": _commit(size, rule, optimizer) for rule in ("gem", "downpour") for optimizer in ARRAYS}


def _commit(size: int, name: str, optimizer: str) -> Callable[[], object]:
    random, layout = np.random.default_rng(0), Layout.of({"first": (size // 2,), "second": (size - size // 2,)})
    rule = make_rule(name, optimizer=optimizer, learning_rate=1e-3, weight_decay=0.01)
    theta, gradient = (random.normal(size=size).astype(np.float32) for _ in range(2))
    buffers = {each: np.zeros(size, np.float32) for each in rule.buffers}
    shared = Shared({each: np.zeros(size, np.float32) for each in rule.shared}, dict(rule.numbers))
    rule.first_pull(theta, buffers)
    return lambda: rule.apply(layout, theta, gradient, buffers, RuleInput(0, 10, shared=shared))


def _rivals(size: int) -> dict[str, Callable[[], object]]:
    """A step of PyTorch's optimizers on one tensor, by name."""
    return {
        "PyTorch SGD": _step(size, lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)),
        "PyTorch AdamW": _step(size, lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01)),
        "PyTorch AdamW fused": _step(size, lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01, fused=True)),
    }


def _step(size: int, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> Callable[[], object]:
    parameter = torch.randn(size, requires_grad=True)
    parameter.grad = torch.randn(size)
    return make([parameter]).step


def _copy(size: int) -> Callable[[], object]:
    """Reads one array and writes one."""
    source, into = np.ones(size, np.float32), np.zeros(size, np.float32)
    return lambda: np.copyto(into, source)


if __name__ == "__main__":
    main()
