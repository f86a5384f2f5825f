"""gem-ctl with several servers: a line for each range, and what is said if one is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from client.range_helpers import GRADIENT, SHAPES, SIZE, Ranges, large_model, ranges
from ctl.test_ctl import as_json, ctl, names_of, on
from gem_api.hyperparameters import Hyperparameters
from gem_api.v1 import training_pb2 as pb
from gem_client import Admin, connect
from gem_client.range_checkpoint import ranges_apart
from gem_ctl.ranges import Peers, _Server, lines
from gem_server.durability import reshard
from kit.server import config, serving
from kit.settings import configured


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def several(folder: Path) -> Iterator[Ranges]:
    """Three servers and a worker, which has made one commit. No test changes the run, but for the last one."""
    with ranges(folder, 3) as run, connect(run.address, name="alice") as one:
        one.join(large_model())
        one.commit(GRADIENT, loss=1.25)
        yield run


def ranges_of(text: str) -> list[list[str]]:
    """The words of each line of the table of ranges."""
    after = text[text.index("\nrange  server") :].splitlines()[2:]
    return [line.split() for line in after if re.match(r"\d+ +\S+:", line)]


# -- status


def test_status_of_the_leader_has_a_line_for_each_range_and_their_sum(several: Ranges) -> None:
    text = ctl("--server", several.address, "status").stdout
    assert "\nrange       0 of 3: this server leads\n" in text
    table = ranges_of(text)
    assert [row[:3] for row in table] == [[str(index), live.address, "1"] for index, live in enumerate(several.lives)]
    assert sum(int(row[3]) for row in table) == SIZE
    assert [row[-1] for row in table] == ["training"] * 3
    assert f"\nall    {SIZE} parameters, memory " in text
    assert re.search(r"^alice +1 ", text, re.MULTILINE)


def test_every_range_shows_the_end_of_the_run_which_only_the_leader_knows(tmp_path: Path) -> None:
    settings = Hyperparameters(rule="downpour", epochs=1, batch_size=4, shard_size=4)
    with ranges(tmp_path, 2, settings) as run, connect(run.address) as session:
        table = ranges_of(ctl("--server", run.address, "status").stdout)
        assert [(row[2], row[-1]) for row in table] == [("0", "waiting")] * 2, "before the first worker"
        session.join(large_model())
        for _ in session.shards(4):
            session.commit(GRADIENT)
        states = [row[-1] for row in ranges_of(ctl("--server", run.address, "status").stdout)]
        assert states == ["complete", "complete"]
        (other,) = as_json(ctl("--server", run.address, "status", "--json"))["ranges"]
        assert other["status"]["state"] == "RUN_STATE_COMPLETE"
        alone = on(run.lives[1], "status").stdout
        assert ", following, up " in alone
        assert "\nrange       1 of 2: ask the server of range 0 for the whole run\n" in alone
        assert "range  server" not in alone


def test_what_a_range_says_of_itself_alone_stays_its_own() -> None:
    """A leader that shuts down says nothing of the others, nor does one of another run."""
    own = pb.GetStatusResponse(run_id="r", state=pb.RUN_STATE_FOLLOWING, range_index=1, range_count=2)
    draining = pb.GetStatusResponse(run_id="r", state=pb.RUN_STATE_DRAINING, range_count=2)
    complete = pb.GetStatusResponse(run_id="r", state=pb.RUN_STATE_COMPLETE, range_count=2)
    assert shown_state(own, draining) == pb.RUN_STATE_FOLLOWING
    assert shown_state(own, complete) == pb.RUN_STATE_COMPLETE
    assert own.state == pb.RUN_STATE_FOLLOWING
    own.state = pb.RUN_STATE_DRAINING
    assert shown_state(own, complete) == pb.RUN_STATE_DRAINING


def shown_state(own: pb.GetStatusResponse, leader: pb.GetStatusResponse) -> pb.RunState:
    server = _Server("h:1", _admin)
    server._status = own
    status = server.state(1, leader).status
    assert status is not None
    return status.state


def test_a_server_of_another_range_or_run_is_not_taken_for_a_peer(several: Ranges) -> None:
    leader = pb.GetStatusResponse(run_id="other", range_count=3, peers=[several.lives[2].address, several.lives[2].address])
    with serving(config()) as alone, Peers(_admin) as peers:
        leader.peers.append(alone.address)
        first, second, third = peers.look(leader, 10.0)
    assert first.trouble == "holds range 2/3, not 1/3"
    assert second.trouble.startswith("serves another run: ")
    assert third.trouble == "holds range 0/1, not 3/3"


def test_a_peer_that_does_not_respond_in_time_keeps_its_last_state() -> None:
    leader = pb.GetStatusResponse(run_id="r", range_count=2, peers=["127.0.0.1:1"])
    with Peers(_admin) as peers:
        (state,) = peers.look(leader, 0.0)
        assert (state.status, state.trouble) in [(None, "no response yet"), (None, state.trouble)]
        (state,) = peers.look(leader, 10.0)
    assert state.trouble.startswith("unreachable: ")


def _admin(address: str) -> Admin:
    return Admin(address, 5.0)


# -- checkpoint


def test_checkpoints_of_all_ranges_are_named_and_copied(several: Ranges, folder: Path, tmp_path: Path) -> None:
    result = ctl("--server", several.address, "checkpoint", "--to", str(tmp_path / "copies"))
    assert result.exit_code == 0, result.output
    written = [path for index in range(3) for path in (folder / str(index)).glob("checkpoint-*1-0001")]
    (copy,) = (tmp_path / "copies").iterdir()
    assert result.stdout.splitlines() == [
        *(f"checkpoint of version 1 in {path} (on the server of range {index})" for index, path in enumerate(written)),
        f"copied to {copy}",
    ]
    assert ctl("restore", str(tmp_path / "copies"), str(tmp_path / "back")).exit_code == 0
    assert reshard.load(tmp_path / "back", 2).versions == [1, 1, 1]


def test_a_range_that_is_older_than_workers_can_cause_is_named(several: Ranges) -> None:
    leader = _admin(several.address).status()
    with Peers(_admin) as peers:
        assert [state.trouble for state in peers.look(leader, 10.0)] == ["", ""]
        leader.version += ranges_apart(leader, leader)
        assert [state.trouble for state in peers.look(leader, 10.0)] == ["", ""]
        leader.version += 1
        troubles = [state.trouble for state in peers.look(leader, 10.0)]
    assert all(trouble.startswith(f"older than range 0, at version {leader.version}: ") for trouble in troubles)


@pytest.mark.parametrize("command", ["checkpoint", "drain"])
def test_a_server_that_does_not_lead_does_nothing_for_all(several: Ranges, command: str) -> None:
    result = on(several.lives[1], command)
    assert result.exit_code == 1
    assert "holds range 1 of 3 and does not lead: ask the server of range 0" in result.stderr
    assert [on(live, "health").stdout for live in several.lives] == ["serving\n"] * 3


# -- pull


def test_pull_saves_the_whole_model(several: Ranges, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    result = ctl("--server", several.address, "pull", str(out))
    assert result.exit_code == 0, result.output
    tensors = safetensors.numpy.load_file(out)
    assert {name: tensor.shape for name, tensor in tensors.items()} == SHAPES
    packed = np.concatenate([tensors[name].ravel() for name in SHAPES])
    assert f"{SIZE} parameters" in result.stdout
    np.testing.assert_array_equal(packed, several.theta)


# -- one server


def test_a_server_that_holds_everything_has_no_table_of_ranges() -> None:
    assert lines("h:1", pb.GetStatusResponse(range_count=1), []) == []


# -- a server that has gone


def test_status_says_which_range_is_out_of_reach_and_shows_the_others(several: Ranges) -> None:
    several.lives[2].stop()
    result = ctl("--server", several.address, configured(timeout=2), "status")
    assert result.exit_code == 0
    assert [row[2] for row in ranges_of(result.stdout)] == ["1", "1", "–"]
    assert re.search(r"^2 .* unreachable: no server at ", result.stdout, re.MULTILINE)
    assert "without 1 that did not respond" in result.stdout
    run = as_json(ctl("--server", several.address, configured(timeout=2), "status", "--json"))
    assert run.keys() == names_of(pb.GetStatusResponse) | {"ranges"}
    one, two = run["ranges"]
    assert (one["index"], one["address"], one["trouble"]) == (1, several.lives[1].address, "")
    assert one["status"].keys() == names_of(pb.GetStatusResponse)
    assert (one["status"]["range_index"], one["status"]["version"]) == (1, 1)
    assert (two["index"], two["status"]) == (2, None)
    assert two["trouble"].startswith("unreachable: ")
