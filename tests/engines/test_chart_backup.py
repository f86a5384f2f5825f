"""The chart's backups: a CronJob that asks the servers for their checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from engines.chart import ROOT, Object, environment, found, objects, rendered, values_of
from gem_client import connect
from gem_ctl.backups import backup
from gem_ctl.backups.command import restore
from gem_ctl.cli import main
from kit.model import PLAIN, model
from kit.server import config, serving


def release(**changes: Any) -> list[Object]:
    return objects({"backup": {"to": "s3://bucket/demo", **changes}})


def pod_of(of: list[Object]) -> Object:
    spec: Object = found(of, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return spec


def test_there_is_none_unless_it_is_asked_for() -> None:
    assert "backup" not in "".join(text for path, text in rendered({}).items() if path.endswith(".yaml"))


def test_the_pod_makes_a_backup_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's own command and environment, against a real server; only addresses and files are this machine's."""
    of = release(to="/backup", existingClaim="nfs", keep=1)
    (container,) = pod_of(of)["containers"]
    (mount,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "backup"]
    assert {"name": "backup", "persistentVolumeClaim": {"claimName": "nfs"}} in pod_of(of)["volumes"]
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


@pytest.mark.parametrize("ranges", [1, 3])
def test_the_pod_reaches_the_servers_and_nobody_reaches_it(ranges: int) -> None:
    of = objects({"backup": {"to": "s3://bucket/demo"}, "server": {"ranges": ranges}})
    labels = found(of, "CronJob")["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
    server = found(of, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    policies = [each["spec"] for each in of if each["kind"] == "NetworkPolicy"]

    def ports(of_pod: Object, peer: Object) -> list[int] | None:
        """The ports of a pod that a peer reaches; None if no policy restricts the pod."""
        mine = [each for each in policies if "Ingress" in each["policyTypes"] and selects(each["podSelector"], of_pod)]
        rules = [rule for each in mine for rule in each.get("ingress", [])]
        reached = [
            rule
            for rule in rules
            if any(selects(each.get("podSelector", {"matchLabels": {"": ""}}), peer) for each in rule["from"])
        ]
        return sorted(each["port"] for rule in reached for each in rule["ports"]) if mine else None

    assert ports(server, labels) == [50051]
    assert ports(labels, server) == []
    assert ports(labels, {}) == []


def selects(selector: Object, labels: Object) -> bool:
    """Whether a label selector of Kubernetes selects these labels."""
    wanted, among = selector.get("matchLabels", {}), selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in among)
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        labels.get(each["key"]) in each["values"] for each in among
    )


def test_the_pod_has_no_rights_and_a_role_of_the_cloud_is_its_own() -> None:
    of = release(serviceAccount={"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/backup"}})
    spec = pod_of(of)
    (account,) = [each for each in of if each["kind"] == "ServiceAccount" and each["metadata"]["name"] == "demo-gem-backup"]
    assert spec["serviceAccountName"] == "demo-gem-backup"
    assert list(account["metadata"]["annotations"]) == ["eks.amazonaws.com/role-arn"]
    assert spec["automountServiceAccountToken"] is False
    assert (spec["securityContext"]["runAsNonRoot"], spec["securityContext"]["fsGroup"]) == (True, 10001)
    (container,) = spec["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert "memory" in container["resources"]["limits"]
    assert not [
        each
        for each in release(serviceAccount={"name": "mine"})
        if each["metadata"]["name"] == "demo-gem-backup" and each["kind"] == "ServiceAccount"
    ]


def test_all_of_the_values_reach_the_pod() -> None:
    spec = pod_of(objects(values_of("backup")))
    (container,) = spec["containers"]
    variables = environment(container)
    assert (variables["GEM_CHECKPOINT_TO"], variables["GEM_BACKUP_KEEP"]) == ("s3://bucket/demo", "28")
    assert variables["AWS_ENDPOINT_URL"] == "https://s3.example.com"
    assert container["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
    assert spec["tolerations"] == [{"key": "dedicated", "operator": "Exists"}]
    assert "GEM_BACKUP_KEEP" not in environment(pod_of(release(keep=0))["containers"][0])


def test_a_long_name_leaves_room_for_what_kubernetes_adds() -> None:
    name = found(objects({"backup": {"to": "s3://b"}}, "a" * 53), "CronJob")["metadata"]["name"]
    assert len(name) <= 52  # of a CronJob: its Jobs' names are longer


@pytest.mark.parametrize(
    ("backup", "named"),
    [
        ({"to": "backup"}, "/backup/to"),
        ({"to": "/backup"}, "backup.to is a folder: set backup.existingClaim"),
        ({"to": "s3://bucket", "existingClaim": "nfs"}, "set backup.to to /backup or a folder in it"),
        ({"to": "/backups", "existingClaim": "nfs"}, "set backup.to to /backup or a folder in it"),
        ({"to": "s3://bucket", "schedule": "daily"}, "/backup/schedule"),
        ({"to": "s3://bucket", "keep": -1}, "/backup/keep"),
        ({"too": "s3://bucket"}, "too"),
        ({"to": "s3://bucket", "pod": {"hostNetwork": True}}, "hostNetwork"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_its_name(backup: Object, named: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        rendered({"backup": backup})
    assert named in str(refused.value)


PAGE = ROOT / "docs" / "guides" / "backups.md"


def manifests() -> dict[str, Object]:
    """The page's objects, by kind."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return {each["kind"]: each for each in map(yaml.safe_load, blocks)}


def test_the_pages_objects_are_valid_and_fit_the_chart() -> None:
    of = objects(values_of("backup"))
    pod, claim, snapshot = (manifests()[kind] for kind in ("Pod", "PersistentVolumeClaim", "VolumeSnapshot"))
    for each in (pod, claim):
        kubernetes_validate.validate(each, "1.37", strict=True)
    stateful, spec, client = found(of, "StatefulSet"), pod["spec"], pod_of(of)
    checkpoints = f"{stateful['spec']['volumeClaimTemplates'][0]['metadata']['name']}-{stateful['metadata']['name']}-0"
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == checkpoints
    assert snapshot["spec"]["source"]["persistentVolumeClaimName"] == checkpoints
    assert claim["spec"]["dataSource"]["name"] == snapshot["metadata"]["name"]
    assert spec["serviceAccountName"] == client["serviceAccountName"]
    assert spec["containers"][0]["envFrom"] == client["containers"][0]["envFrom"]
    assert spec["containers"][0]["image"].endswith(client["containers"][0]["image"])
    command, subcommand, *arguments = spec["containers"][0]["command"]
    assert (command, arguments[0]) == ("gem-ctl", environment(client["containers"][0])["GEM_CHECKPOINT_TO"])
    assert len(restore.make_context(subcommand, arguments).params) == 3
