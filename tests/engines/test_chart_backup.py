"""The chart's backups: a CronJob that asks the servers for their checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from engines.chart import ROOT, Object, environment, found, objects, pod_of, values_of
from gem_client import connect
from gem_ctl.backups import backup
from gem_ctl.backups.command import restore
from gem_ctl.cli import main
from kit.model import PLAIN, model
from kit.server import config, serving


def release(**changes: Any) -> list[Object]:
    return objects({"backup": {"to": "s3://bucket/demo", **changes}})


def spec_of(of: list[Object]) -> Object:
    spec: Object = pod_of(found(of, "CronJob"))["spec"]
    return spec


def test_the_pod_makes_a_backup_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's own command and environment, against a real server; only addresses and files are this machine's."""
    of = release(to="/backup", existingClaim="nfs", keep=1)
    (container,) = spec_of(of)["containers"]
    (mount,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "backup"]
    assert {"name": "backup", "persistentVolumeClaim": {"claimName": "nfs"}} in spec_of(of)["volumes"]
    variables = environment(container)
    assert (variables["GEM_SERVER"], variables["GEM_TOKEN_FILE"]) == ("demo-gem:50051", "/etc/gem/auth/admin")
    with serving(config(PLAIN, checkpoint_dir=tmp_path / "c")) as live, connect(live.address) as session:
        session.join(model())
        there = {"GEM_SERVER": live.address, "GEM_TOKEN_FILE": None, "GEM_TLS_CA": None}
        there["GEM_CHECKPOINT_TO"] = str(tmp_path / variables["GEM_CHECKPOINT_TO"].removeprefix(mount).strip("/") / "b")
        for seconds in range(2):
            monkeypatch.setattr("gem_ctl.backups.command.time", lambda now=seconds: now)
            *start, command = container["command"][:3]
            arguments = container["command"][3:]
            done = CliRunner().invoke(main, arguments, env=variables | there)
            assert (start, command, done.exit_code) == (["tini", "--"], "gem-ctl", 0), done.output
    assert [path.name for path in (tmp_path / "b").iterdir()] == [backup.name_of(live.core.run_id, 1)]


PAGE = ROOT / "docs" / "guides" / "backups.md"
POD = ROOT / "deploy" / "kubernetes" / "restore.yaml"


def test_the_pod_and_the_values_of_the_page_are_valid_and_fit_the_chart() -> None:
    of, pod, page = objects(values_of("backup")), yaml.safe_load(POD.read_text()), PAGE.read_text(encoding="utf-8")
    (values,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    back = found(objects(yaml.safe_load(values)), "StatefulSet")
    for each in (pod, back):
        kubernetes_validate.validate(each, "1.37", strict=True)
    assert back["spec"]["volumeClaimTemplates"][0]["spec"]["dataSource"]["kind"] == "VolumeSnapshot"
    stateful, spec, client = found(of, "StatefulSet"), pod["spec"], spec_of(of)
    checkpoints = f"{stateful['spec']['volumeClaimTemplates'][0]['metadata']['name']}-{stateful['metadata']['name']}-0"
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == checkpoints
    assert f"VolumeSnapshot of the claim `{checkpoints}`" in page
    assert spec["serviceAccountName"] == client["serviceAccountName"]
    assert spec["containers"][0]["envFrom"] == client["containers"][0]["envFrom"]
    assert spec["containers"][0]["image"].endswith(client["containers"][0]["image"])
    command, subcommand, *arguments = spec["containers"][0]["command"]
    assert (command, arguments[0]) == ("gem-ctl", environment(client["containers"][0])["GEM_CHECKPOINT_TO"])
    assert len(restore.make_context(subcommand, arguments).params) == 3
