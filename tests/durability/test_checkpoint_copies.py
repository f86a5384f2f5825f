"""A checkpoint is of one moment: what commits change while it is written is copied first, within the memory limit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from durability.checkpoint_helpers import FILES, trained
from gem_api.hyperparameters import Hyperparameters
from gem_server.durability.capture import copies_at_most
from gem_server.durability.checkpoint import capture, write
from gem_server.durability.scratch import Scratch
from kit.core import SMALL, commit, save_core
from kit.server import DEADLINE

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.mark.parametrize(
    "settings", [{}, {"rule_options": "proxy=global"}, {"rule_options": "proxy=yellowfin"}, {"average": 0.9}], ids=str
)
@pytest.mark.parametrize("ready", [0, 1, 2, 9])
def test_a_checkpoint_is_of_one_moment_however_the_run_goes_on(ready: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """Registering, leaving, commits and pulls while it is written change nothing, whether memory was made ready or not."""
    core = trained(Hyperparameters(**settings))
    save_core(core, tmp_path / "before")
    captured = capture(core, scratch=Scratch(SMALL.size).prepare(ready))
    captured.copy_theta()
    commit(core, "lease-2", 3, 1.0)
    core.pull(core.leases.get("lease-1"))
    core.leave("lease-1")
    core.register("dan", SMALL, 0.0)
    core.lease_shard("lease-2", 1000, 0.0)
    write(tmp_path / "after", captured, 3)
    before, after = (next((tmp_path / when).iterdir()) for when in ("before", "after"))
    assert {name: (before / name).read_bytes() for name in FILES} == {name: (after / name).read_bytes() for name in FILES}


def test_copies_that_commits_wait_for_go_to_memory_that_was_made_ready() -> None:
    core = trained()
    scratch = Scratch(SMALL.size).prepare(copies_at_most(core))
    ready = scratch.nbytes
    captured = capture(core, scratch=scratch)
    captured.copy_theta()
    for lease_id, sequence in (("lease-1", 4), ("lease-2", 3)):
        commit(core, lease_id, sequence, 1.0)
    assert ready == scratch.nbytes == 5 * core.central.theta.nbytes  # θ and two workers' m and s


def test_what_is_written_makes_room_for_what_is_copied_next(tmp_path: Path) -> None:
    core = trained()
    scratch = Scratch(SMALL.size)
    captured = capture(core, scratch=scratch)
    captured.copy_theta()
    write(tmp_path, captured, 3)  # nobody commits: one worker's buffers are copied and written after the other's
    assert scratch.nbytes == 3 * core.central.theta.nbytes


def test_an_average_is_one_more_copy_to_make_ready() -> None:
    assert copies_at_most(trained(Hyperparameters(average=0.9))) == copies_at_most(trained()) + 1


@pytest.mark.parametrize(("room", "copies"), [(0, 1), (1, 1), (3, 3), (4, 4), (5, 5), (6, 5)])
def test_memory_is_made_ready_within_the_limit_but_for_theta(room: int, copies: int) -> None:
    core = trained()
    core.memory.limit = core.memory.held + room * core.central.theta.nbytes
    assert copies_at_most(core) == copies


def test_without_memory_for_a_copy_a_commit_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = trained()
    core.memory.limit = core.memory.held
    captured = capture(core)
    captured.copy_theta()
    asked, has_room = threading.Event(), captured._has_room
    monkeypatch.setattr(captured, "_has_room", lambda lease: asked.set() or has_room(lease))
    committing = threading.Thread(target=commit, args=(core, "lease-2", 3, 1.0))
    committing.start()
    assert asked.wait(DEADLINE)
    assert core.central.version == 5
    write(tmp_path, captured, 3)
    committing.join(DEADLINE)
    assert core.central.version == 6
