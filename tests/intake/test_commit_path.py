"""What the server's log says of a commit that it rejects."""

from __future__ import annotations

from pathlib import Path

from kit.logs import captured
from kit.raw_client import wired
from kit.server import config, serving
from kit.ways import through_sockets
from kit.ways import wired as wired_by


@through_sockets
def test_a_rejected_commit_is_logged_with_its_workers_name_also_once_its_lease_has_ended(way: str) -> None:
    with captured() as lines, serving(config(memory_socket="")) as live, wired_by(live, way) as wire:
        worker, gone = wire.started("ann"), wire.join("bob")
        streams = [worker.stream(), gone.stream()]
        gone.leave()
        for stream, client in zip(streams, (worker, gone), strict=True):
            stream.send(client.header(sequence=7), *client.body())
            stream.refusal()
        worker.whole(worker.header(lease_id="made up"), *worker.body()).refusal()
    said = [(line["worker"], line["error"]) for line in lines if line["event"] == "commit rejected"]
    assert said[0] == ("ann", "SequenceGap")
    if way == "grpc":  # a lane ends with its lease
        assert said[1:] == [("bob", "LeaseEnded"), ("unknown", "LeaseEnded")]


def test_a_rejected_commit_is_logged_with_its_workers_name_after_a_restart(tmp_path: Path) -> None:
    with serving(config(checkpoint_dir=tmp_path)) as live, wired(live) as wire:
        worker = wire.started("ann")
        worker.commit()
    with captured() as lines, serving(config(checkpoint_dir=tmp_path, resume=True)) as live, wired(live) as wire:
        worker.wire = wire
        worker.whole(worker.header(sequence=7), *worker.body()).refusal()
    assert [line["worker"] for line in lines if line["event"] == "commit rejected"] == ["ann"]
