"""With --durability log, the state of rules survives a kill -9, bit by bit."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gem_api.hyperparameters import Hyperparameters
from gem_api.rules import RULES
from gem_api.v1 import admin_pb2
from kit.raw_client import SMALL, Theta, Worker, chunks, theta_bits, wired
from kit.server import Live, config, serving
from simulation.truth import fingerprint

SHARES = (0.5, 0.0, 0.3, 1.0, 0.25)  # of a batch; they count only in a run with `smallest_share`
# Those whose state is more than a snapshot that θ is copied into, with the options that keep most.
OPTIONS = {
    "gem": ("proxy=nesterov", "proxy=global", "proxy=yellowfin", "proxy=adam"), "dcasgd": ("mean_square=0.95",),
    "fedasync": ("staleness=hinge",), "fedbuff": ("buffer_size=5",), "ringmaster": ("threshold=2",),
    "diloco": ("delay=5 eager=0.1",),
}  # fmt: skip
RULES_AND_OPTIONS = [
    (rule, options)
    for rule, row in RULES.items()
    if rule in OPTIONS or not row.reads_once
    for options in OPTIONS.get(rule, ("",))
]


def commit(worker: Worker, update: Theta, share: float) -> None:
    header = worker.header(update_kind=worker.registration.update_kind, batch_share=share)
    worker.took(worker.wire.whole("Commit", header, *chunks(update)).answer(worker.size))


def state(live: Live) -> bytes:
    return live.on_loop(lambda: fingerprint(live.core))


CASES = {
    **{f"{rule}-{options or '-'}": Hyperparameters(rule=rule, rule_options=options) for rule, options in RULES_AND_OPTIONS},
    "shares": Hyperparameters(smallest_share=0.25),
    "shares-adamw": Hyperparameters(optimizer="adamw", smallest_share=0.25, schedule="cosine", decay_versions=9),
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_run_goes_on_to_the_bit_as_it_would_have(settings: Hyperparameters, tmp_path: Path) -> None:
    """The crash is a copy of the folder, taken in the middle of a rule's window, with a checkpoint on the way. Both servers
    then get the same commits."""
    logged = config(settings, checkpoint_dir=tmp_path / "run", durability="log")
    updates = np.random.default_rng(1).normal(size=(18, SMALL.size)).astype(np.float32)
    with ExitStack() as open_:
        live = open_.enter_context(serving(logged))
        wire = open_.enter_context(wired(live))
        workers = wire.crew(3)
        for turn, update in enumerate(updates[:12]):
            commit(workers[turn % 3 if turn != 9 else 1], update, SHARES[turn % 5])
            if turn == 5:
                wire.call("CreateCheckpoint", admin_pb2.CreateCheckpointRequest())
        shutil.copytree(tmp_path / "run", tmp_path / "crashed")
        resumed = replace(logged, checkpoint_dir=tmp_path / "crashed", resume=True)
        back = open_.enter_context(serving(resumed))
        assert state(back) == state(live)
        after = open_.enter_context(wired(back))
        for turn, update in enumerate(updates[12:]):
            worker = workers[turn % 2]
            twin = Worker(after, worker.registration)
            twin.sequence, twin.base_version = worker.sequence, worker.base_version
            commit(twin, update, SHARES[turn % 5])
            commit(worker, update, SHARES[turn % 5])
        assert theta_bits(back) == theta_bits(live)
        assert state(back) == state(live)
