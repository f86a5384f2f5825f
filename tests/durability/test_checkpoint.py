"""A core restored from a checkpoint is the one that was written, bit by bit, and goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from durability.checkpoint_helpers import trained
from gem_api.hyperparameters import SHARD_MODES, SNAPSHOTS, Hyperparameters
from gem_api.layout import Layout
from gem_api.rules import OPTIMIZERS
from gem_server.core.values import Applied
from gem_server.durability import checkpoint
from gem_server.durability.checkpoint import newest, restore
from gem_server.durability.state import encoded
from gem_server.intake.messages import commit_result
from gem_server.rules import RULES
from gem_server.rules.proxies import PROXIES
from kit.core import SMALL, apply, bits, commit, header, make_core, recorded, replay_all, restored, save_core, start, uploaded
from simulation.truth import fingerprint

pytestmark = pytest.mark.usefixtures("quick_disk")


def plain(applied: Applied | None) -> dict[str, Any] | None:
    """An answer, with what a worker is told about π."""
    if applied is None:
        return None
    return {**vars(applied), "pi": commit_result(applied, 0).pi}


SETTINGS = [
    *(Hyperparameters(snapshot=snapshot, shards=mode) for snapshot in SNAPSHOTS for mode in SHARD_MODES),
    *(Hyperparameters(rule=rule) for rule in RULES if rule != "gem"),
    *(Hyperparameters(rule_options=f"proxy={proxy}") for proxy in PROXIES if proxy != "momentum"),
    Hyperparameters(rule="dcasgd", rule_options="mean_square=0.95"),
    Hyperparameters(rule="fedbuff", rule_options="buffer_size=4"),
    Hyperparameters(rule="diloco", rule_options="delay=3 eager=0.1"),
    *(Hyperparameters(rule="ringmaster", rule_options=f"threshold={threshold}") for threshold in (1, 2)),
    Hyperparameters(rule="fedasync", rule_options="staleness=hinge"),
    Hyperparameters(smallest_share=0.25),
    Hyperparameters(optimizer="adamw", smallest_share=0.25, schedule="cosine", decay_versions=9),
    *(Hyperparameters(rule=rule, optimizer=each) for rule in ("gem", "downpour") for each in OPTIMIZERS if each != "sgd"),
]
SHARES = (0.5, 0.0, 0.3, 1.0, 0.25)  # of a batch; they count only in a run with `smallest_share`


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda h: f"{h.rule} {h.rule_options}{h.optimizer}-{h.snapshot}-{h.shards}-{h.smallest_share:g}"
)
def test_a_restored_core_is_the_one_that_was_written_and_goes_on_bit_by_bit(settings: Hyperparameters, tmp_path: Path) -> None:
    """With the same commits, and with what the log tells of them."""
    core = trained(settings)
    save_core(core, tmp_path)
    records = recorded(core)
    again, after_a_crash = restored(tmp_path, settings), restored(tmp_path, settings)
    assert fingerprint(again) == fingerprint(core)
    for name in ("layout", "initialized", "initializer"):
        assert getattr(again.central, name) == getattr(core.central, name)
    for name in ("next_ticket", "outcomes"):
        assert getattr(again, name) == getattr(core, name)
    assert again.memory.held == core.memory.held
    assert again.leases.ended == core.leases.ended
    assert list(again.leases.live) == list(core.leases.live)
    for lease_id, lease in core.leases.live.items():
        other = again.leases.get(lease_id)
        assert other.queued == lease.queued
        assert plain(other.last_applied) == plain(lease.last_applied)
        assert bits(again.reply(other)) == bits(core.reply(lease))
    random = np.random.default_rng(2)
    for number in range(30):
        gradient, lease_id = random.normal(size=SMALL.size), f"lease-{number % 7 % 2 + 1}"
        sequence = core.leases.get(lease_id).sequence + 1
        one, other_one = (commit(run, lease_id, sequence, gradient, share=SHARES[number % 5]) for run in (core, again))
        assert plain(one) == plain(other_one)
    replay_all(after_a_crash, records)
    assert fingerprint(again) == fingerprint(core)
    assert fingerprint(after_a_crash) == fingerprint(core)


def test_steps_are_counted_for_the_names_that_committed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that never ends meets new names without end; a restart must forget the same ones as the run would have."""
    monkeypatch.setattr("gem_server.core.state_machine.MAX_COUNTED_NAMES", 3)
    core = make_core()
    start(core, ["ann"])
    for worker in ("ann", "bob", "cy", "ann", "dora", "cy"):
        commit(core, core.register(worker, SMALL, 0.0).lease_id, 1, 1.0)
    assert core.steps_done == {"ann": 2, "dora": 1, "cy": 2}
    save_core(core, tmp_path)
    for each in (core, restored(tmp_path)):
        commit(each, each.register("eve", SMALL, 0.0).lease_id, 1, 1.0)
        assert list(each.steps_done) == ["dora", "cy", "eve"]


def test_restored_leases_live_for_a_full_duration_from_the_restart(tmp_path: Path) -> None:
    save_core(trained(), tmp_path)
    latest = newest(tmp_path, lambda path, why: None)
    assert latest is not None
    core = make_core()
    restore(*latest, core, now=1000.0)
    assert core.expire(1059.9) == []
    assert len(core.expire(1060.0)) == 2


def test_a_run_without_workers_is_kept_too(tmp_path: Path) -> None:
    core = trained()
    for lease_id in list(core.leases.live):
        core.leave(lease_id)
    save_core(core, tmp_path)
    again = restored(tmp_path)
    assert bits(again.central.theta) == bits(core.central.theta)
    assert again.register("ann", SMALL, 0.0).steps_done == 3


@pytest.mark.parametrize("name", ["ключ", 'quo"te', "a/b", "lease-1/moment", " "])
def test_any_tensor_name_that_a_layout_takes_can_be_kept(name: str, tmp_path: Path) -> None:
    core = trained(layout=Layout.of({name: (2, 3), "bias": (3,), "empty": (0,), "scalar": ()}))
    save_core(core, tmp_path)
    assert bits(restored(tmp_path).central.theta) == bits(core.central.theta)


def test_answers_become_json_while_commits_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 1,000 workers would hold the event loop for a second."""
    converted: list[Any] = []

    def noted(part: Any) -> dict[str, Any]:
        converted.append(part)
        return encoded(part)

    monkeypatch.setattr(checkpoint, "encoded", noted)
    core = trained(Hyperparameters())
    captured = checkpoint.capture(core)
    assert not converted
    captured.copy_theta()
    checkpoint.write(tmp_path, captured, 1)
    assert converted


def test_a_norm_that_waits_during_a_checkpoint_counts_once_after_a_replay() -> None:
    core, copied = make_core(logged=True), make_core(logged=True)
    for each in (core, copied):
        start(each, ["ann", "bob"])
    head = header(core, "lease-1", 1)
    _, lease = core.admit(head, 0.0)
    ticketed = core.ticket(lease, head, 0.0, uploaded(core, 1.0), norm=3.0)
    copied.norms.resume(checkpoint.capture(core).state.norms)
    records = recorded(core)
    apply(core, ticketed)
    replay_all(copied, records)
    assert core.norms.norms == copied.norms.norms == [3.0]
