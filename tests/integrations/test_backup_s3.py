"""Backups in an object store: fsspec and s3fs against a server that speaks S3."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gem_client import connect
from gem_ctl.backups import backup
from gem_ctl.backups.stores import BackupFailed, ObjectStore
from gem_ctl.cli import main
from kit.model import GRADIENT, PLAIN, model, theta, version
from kit.raw_ranges import commit_all, serving_ranges
from kit.server import Live, config, serving

s3fs = pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")
URL = "s3://bucket/runs/a"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the store, which is empty but for a bucket."""
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in (keys | {"AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"}).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    client.delete_bucket_policy(Bucket="bucket")
    for each in client.list_objects_v2(Bucket="bucket").get("Contents", []):
        client.delete_object(Bucket="bucket", Key=each["Key"])


def keys(s3: Any) -> list[str]:
    return [each["Key"] for each in s3.list_objects_v2(Bucket="bucket").get("Contents", [])]


def deny(s3: Any, action: str) -> None:
    on = ["arn:aws:s3:::bucket", "arn:aws:s3:::bucket/*"]
    statement = {"Effect": "Deny", "Principal": "*", "Action": action, "Resource": on}
    s3.put_bucket_policy(Bucket="bucket", Policy=json.dumps({"Version": "2012-10-17", "Statement": [statement]}))


def ctl(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments], env=environment)


def backed_up(live: Live, to: str = URL, **environment: str) -> Result:
    return ctl("--server", live.address, "checkpoint", "--to", to, **environment)


def test_a_run_goes_on_from_its_backup(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(config(PLAIN, checkpoint_dir=tmp_path / "c")) as live, connect(live.address) as session:
        session.join(model())
        for seconds in range(3):
            session.commit(GRADIENT)
            monkeypatch.setattr("gem_ctl.backups.command.time", lambda now=seconds: now)
            done = backed_up(live, GEM_BACKUP_KEEP="2")
            assert done.exit_code == 0, done.output
        good = theta(live)
        session.commit(GRADIENT)
        names = [backup.name_of(live.core.run_id, seconds) for seconds in range(3)]
    assert done.stdout.splitlines()[1:] == [f"copied to {URL}/{names[2]}", f"removed {URL}/{names[0]}"]
    files = ("model.safetensors", "state.json", "workers.safetensors")
    assert keys(s3) == [
        f"runs/a/{name}/{path}"
        for commits, name in ((2, names[1]), (3, names[2]))
        for path in ("backup-format.json", *(f"checkpoint-{commits:012d}-0001/{file}" for file in files))
    ]
    assert ctl("restore", URL, tmp_path / "restored").exit_code == 0
    with serving(config(PLAIN, checkpoint_dir=tmp_path / "restored", resume=True)) as live:
        assert version(live) == 3
        assert (theta(live) == good).all()


def test_several_servers_go_on_from_their_backup(s3: Any, tmp_path: Path) -> None:
    with serving_ranges(tmp_path / "first") as ranges:
        commit_all(ranges.started("ann"))
        assert backed_up(ranges.lives[0]).exit_code == 0
    for index in range(2):
        restored = ctl("restore", URL, tmp_path / "restored" / f"range-{index}", str(index))
        assert restored.exit_code == 0, restored.output
    with serving_ranges(tmp_path / "restored", resume=True) as ranges:
        assert [version(live) for live in ranges.lives] == [1, 1]


def test_a_large_file_is_written_in_parts_and_read_back(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted one leaves no parts, for which the store would ask money."""
    monkeypatch.setattr(s3fs.S3FileSystem, "default_block_size", 5 << 20)
    content = bytes(range(256)) * (1 << 10) * 48  # 12 MiB
    pieces = [content[at : at + (1 << 20)] for at in range(0, len(content), 1 << 20)]
    store = ObjectStore(URL)
    store.write("large", pieces)
    digest = hashlib.sha256()
    for piece in store.read("large"):
        digest.update(piece)
    assert digest.digest() == hashlib.sha256(content).digest()
    assert s3.head_object(Bucket="bucket", Key="runs/a/large")["ETag"].endswith('-3"'), "it was not written in parts"

    def interrupted() -> Iterator[bytes]:
        yield from pieces[:11]
        raise BackupFailed("the server is gone")

    with pytest.raises(BackupFailed, match="the server is gone"):
        store.write("other", interrupted())
    assert "Uploads" not in s3.list_multipart_uploads(Bucket="bucket")


def test_what_else_is_in_the_bucket_is_left_alone(s3: Any) -> None:
    for key in ("backup-1/a", "backup-12/b", "other/backup-3/c", "notes"):
        s3.put_object(Bucket="bucket", Key=key, Body=b"")
    store = ObjectStore("s3://bucket")
    assert store.files() == ["backup-1/a", "backup-12/b"]
    store.remove("backup-1")
    assert keys(s3) == ["backup-12/b", "notes", "other/backup-3/c"]


@pytest.mark.parametrize(
    ("action", "why"),
    [("s3:PutObject", f"can't write to {URL}: "), ("s3:GetObject", f"can't read {URL}/backup-")],
)
def test_a_right_that_is_missing_is_said_and_leaves_no_backup(action: str, why: str, s3: Any, tmp_path: Path) -> None:
    deny(s3, action)
    with serving(config(PLAIN, checkpoint_dir=tmp_path)) as live, connect(live.address) as session:
        session.join(model())
        failed = backed_up(live)
        session.commit(GRADIENT)
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("gem-ctl: ")]
    assert line.startswith(f"gem-ctl: {why}")
    assert line.endswith("Forbidden. Check the credentials, and that they may list, read, write and delete there")
    assert (failed.exit_code, keys(s3)) == (1, [])


def test_a_backup_that_can_not_be_removed_is_said_and_does_not_count(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backup itself is written. s3fs ignores that the store refuses to delete."""
    with serving(config(PLAIN, checkpoint_dir=tmp_path)) as live, connect(live.address) as session:
        session.join(model())
        for seconds in range(2):
            monkeypatch.setattr("gem_ctl.backups.command.time", lambda now=seconds: now)
            done = backed_up(live, GEM_BACKUP_KEEP="1")
            deny(s3, "s3:DeleteObject")
    assert done.exit_code == 1
    assert "can't remove s3://bucket/runs/a/backup-1970" in done.stderr
    assert [each.complete for each in backup.find(ObjectStore(URL)).values()] == [True, True]


def test_what_is_wrong_with_the_store_is_said_before_the_server_writes(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(config(PLAIN, checkpoint_dir=tmp_path)) as live, connect(live.address) as session:
        session.join(model())
        said = {
            "s3://missing/a": "can't list s3://missing/a: The specified bucket does not exist",
            "s3://": "s3:// names no bucket: write s3://BUCKET/PREFIX",
        }
        for url, why in said.items():
            failed = backed_up(live, url)
            assert (failed.exit_code, failed.stdout, failed.stderr) == (1, "", f"gem-ctl: {why}\n")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        s3fs.S3FileSystem.clear_instance_cache()
        assert "Unable to locate credentials" in backed_up(live).stderr
