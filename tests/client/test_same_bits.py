"""Any number of servers, transport and format gives the bits of the oracle; one that rounds, of one server by gRPC."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from client.range_helpers import Ranges, ranges
from client.torch_helpers import flat
from gem_api.hyperparameters import Hyperparameters
from gem_client import Session, connect
from gem_client.torch import Optimizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.model import Array, transports, version
from kit.regions import RULES
from kit.server import wait_until
from rules.oracle import Oracle
from torch import nn

TRANSPORTS = ["grpc", "tcp", *(["memory"] if sys.platform == "linux" else [])]
GRADIENTS, THETAS = ["float32", "bfloat16", "int8"], ["float32", "bfloat16"]
SIZES = [5, 1025, 13_908, 300_007]  # below a page, across two, three ranges, several chunks
OTHER_RULES = {
    "gem with a shared adamw": Hyperparameters(optimizer="adamw", weight_decay=0.01, learning_rate=0.01),
    "downpour with weight decay": Hyperparameters(rule="downpour", weight_decay=0.01),
}
LOOPS = {
    **RULES,
    "weight decay": Hyperparameters(weight_decay=0.01),
    "local steps": Hyperparameters(rule="downpour", local_steps=3, local_momentum=0.5, weight_decay=0.01),
    "local steps of gem": Hyperparameters(local_steps=2),
}
WITNESSES = 8  # elements that the oracle computes, one after the other
quick = settings(max_examples=7, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
many = settings(quick, max_examples=150, derandomize=False)


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        servers: How many hold θ.
        ways: How each worker reaches them.
        rule: A key of `RULES` or `OTHER_RULES`.
        formats: Of gradients, and of θ.
        overlap: Whether each gradient is computed on the θ before the last.
        size: Elements of the model.
        turns: Which worker does what: commits, or pulls.
    """

    servers: int
    ways: tuple[str, ...]
    rule: str
    formats: tuple[str, str]
    overlap: bool
    size: int
    turns: tuple[tuple[int, bool], ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    servers, transport = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from(TRANSPORTS))
    workers = draw(st.integers(1, 3))
    others = ["memory", "tcp"] if transport == "memory" else [transport]
    ways = (transport, *(draw(st.sampled_from(others)) for _ in range(workers - 1)))
    formats = draw(st.sampled_from(GRADIENTS)), draw(st.sampled_from(THETAS))
    if len({*ways}) > 1:
        formats = ("float32", "float32")  # what goes through memory is never rounded
    size = draw(st.sampled_from([size for size in SIZES if servers == 1 or size > 4096 * servers]))
    overlap = draw(st.booleans())
    commits = overlap or (transport == "memory" and formats[1] != "float32")  # a pull goes by gRPC, and is rounded
    turn = st.tuples(st.integers(0, workers - 1), st.just(True) if commits else st.booleans())
    turns = draw(st.lists(turn, min_size=4, max_size=10))
    return Case(servers, ways, draw(st.sampled_from([*RULES, *OTHER_RULES])), formats, overlap, size, tuple(turns))


@contextlib.contextmanager
def servers_of(count: int, transport: str, rule: Hyperparameters) -> Iterator[Ranges]:
    lane: dict[str, Any] = {"lane_listen": ""} if transport == "grpc" else {}
    with TemporaryDirectory() as folder, ranges(Path(folder), count, rule, memory=transport == "memory", **lane) as run:
        yield run


def noise(case: Case) -> Array:
    """What is added to each turn's gradient."""
    return np.random.default_rng(len(case.turns)).standard_normal((len(case.turns), case.size), np.float32)


def first_theta(size: int) -> Array:
    """Values that bfloat16 has too: what the first pull brings is the same in all formats."""
    values = np.random.default_rng(5).standard_normal(size, np.float32).view(np.uint32)
    return (values & 0xFFFF0000).view(np.float32)


def played(case: Case) -> tuple[list[tuple[int, int, bytes]], Array]:
    """For every turn the version, the staleness and the bits of the θ that it brought; and θ on the servers at the end."""
    gradients, thetas = case.formats
    first = first_theta(case.size)
    brought = []
    rule = {**RULES, **OTHER_RULES}[case.rule]
    with servers_of(case.servers, case.ways[0], rule) as run, contextlib.ExitStack() as stack:
        crew: list[Session] = []
        for number, way in enumerate(case.ways):
            formats: dict[str, Any] = {"gradient_dtype": gradients, "theta_dtype": thetas}
            crew.append(connect(run.address, name=f"w{number}", shared_memory=way == "memory", **formats))
            stack.enter_context(crew[-1]).join({"b": first[:3], "w": first[3:]}, overlap=case.overlap)
        older = [session.base for session in crew]
        for (number, commits), added in zip(case.turns, noise(case), strict=True):
            session, base = crew[number], crew[number].base
            if not commits:
                brought.append((session.version, 0, session.pull().tobytes()))
                continue
            gradient = gradient_of(session.theta, added)
            if case.overlap:
                session.begin_commit(gradient, base=older[number])
            answer = session.finish_commit() if case.overlap else session.commit(gradient)
            assert answer is not None
            older[number] = base
            brought.append((answer.version, answer.staleness, answer.theta.tobytes()))
        committed = {f"w{number}": case.ways[number] for number, commits in case.turns if commits}
        for live in run.lives:
            assert transports(live).items() >= committed.items()
        return brought, run.theta


def gradient_of(theta: Array, added: Array) -> Array:
    return np.float32(0.1) * theta + added


def requires_the_same_bits(case: Case) -> None:
    brought, theta = played(case)
    exact = case.formats == ("float32", "float32") or {*case.ways} == {"memory"}
    formats = ("float32", "float32") if exact else case.formats
    expected = played(replace(case, servers=1, ways=("grpc",) * len(case.ways), formats=formats))
    assert brought == expected[0]
    np.testing.assert_array_equal(theta, expected[1])
    if exact and not case.overlap and case.rule in RULES:
        witnesses = np.linspace(0, case.size - 1, min(WITNESSES, case.size)).astype(int)
        np.testing.assert_array_equal(theta[witnesses], by_the_oracle(case, witnesses))


def by_the_oracle(case: Case, elements: Any) -> Array:
    """The last θ at these elements, by a second implementation of the rule."""
    rule = RULES[case.rule]
    names = [str(number) for number in range(len(case.ways))]
    oracle = Oracle(
        rule.rule, first_theta(case.size)[elements], names, eta=rule.learning_rate, mu=rule.momentum, kappa=rule.kappa,
        epsilon=rule.epsilon, pi_max=rule.pi_max, snapshot=rule.snapshot,
    )  # fmt: skip
    for name in names:
        oracle.pull(name)
    for (number, commits), added in zip(case.turns, noise(case), strict=True):
        if not commits:
            oracle.pull(names[number])
        else:
            seen = np.array(oracle.workers[names[number]].answer, np.float32)
            oracle.commit(names[number], gradient_of(seen, added[elements]))
    return np.array(oracle.theta, np.float32)


@quick
@given(cases())
def test_every_run_gives_the_same_bits(case: Case) -> None:
    requires_the_same_bits(case)


@pytest.mark.slow
@many
@given(cases())
def test_many_runs_give_the_same_bits(case: Case) -> None:
    requires_the_same_bits(case)


# -- PyTorch


def optimized(servers: int, way: str, loop: str, overlap: bool) -> tuple[list[bytes], Array]:
    """The parameters of two workers after each of their steps, taken in turns, and θ at the end."""
    inputs = torch.linspace(-1, 1, 480).view(8, 60)
    seen: list[bytes] = []
    with servers_of(servers, way, LOOPS[loop]) as run, contextlib.ExitStack() as stack:
        pairs = []
        for seed in range(2):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(60, 150), nn.Tanh(), nn.Linear(150, 30))
            session = stack.enter_context(connect(run.address, shared_memory=way == "memory"))
            pairs.append((model, Optimizer(model.named_parameters(), session, overlap=overlap)))
            assert session.shares_memory == (way == "memory")
        for _ in range(4):
            for model, optimizer in pairs:
                optimizer.zero_grad()
                (model(inputs) ** 2).mean().backward()
                optimizer.step()
                if overlap:  # the answer is there while the parameters are in use
                    wait_until(lambda: run.each(version) == [len(seen) + 1] * servers, "the commit to be applied")
                seen.append(flat(model).tobytes())
        for model, optimizer in pairs:
            optimizer.finish()
            seen.append(flat(model).tobytes())
        return seen, run.theta


loops = given(st.sampled_from([1, 2, 3]), st.sampled_from(TRANSPORTS), st.sampled_from(list(LOOPS)), st.booleans())


def requires_the_same_parameters(servers: int, way: str, loop: str, overlap: bool) -> None:
    overlap &= not loop.startswith("local steps")
    seen, theta = optimized(servers, way, loop, overlap)
    expected = optimized(1, "grpc", loop, overlap)
    assert seen == expected[0]
    np.testing.assert_array_equal(theta, expected[1])


@quick
@loops
def test_an_optimizer_trains_the_same(servers: int, way: str, loop: str, overlap: bool) -> None:
    requires_the_same_parameters(servers, way, loop, overlap)


@pytest.mark.slow
@many
@loops
def test_an_optimizer_trains_the_same_in_many_runs(servers: int, way: str, loop: str, overlap: bool) -> None:
    requires_the_same_parameters(servers, way, loop, overlap)
