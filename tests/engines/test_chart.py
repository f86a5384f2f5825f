"""The Helm chart, rendered by Helm itself: valid for Kubernetes, closed, and safe to upgrade and scale.

test_chart_golden.py shows what is rendered; here are the decisions that one can't see there.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from engines.chart import (
    CHART,
    CI,
    METRICS,
    ROOT,
    Object,
    environment,
    found,
    objects,
    pod_specs,
    rendered,
    schema_of,
    values_of,
)
from gem_api import __version__

NEWEST, *OLDER = "1.37", "1.33", "1.29"  # the oldest of Chart.yaml
OPERATORS = {
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
    "cert-manager.io/v1": "cloudcoil.models.cert_manager.v1",
}


# -- valid


@pytest.mark.parametrize("name", ["", *CI])
def test_helm_finds_nothing_to_complain_about(name: str) -> None:
    report = helm_python.lint(CHART, values=values_of(name), strict=True)
    serious = [message for message in report["messages"] if message["severity"] > 1]
    assert (serious, report["errors"]) == ([], [])


@pytest.mark.parametrize("name", ["", *CI])
def test_every_object_fits_the_schema_of_its_kind(name: str) -> None:
    for each in objects(values_of(name)):
        if module := OPERATORS.get(each["apiVersion"]):
            getattr(pytest.importorskip(module), each["kind"]).model_validate(each, extra="forbid")
        else:
            for version in (NEWEST, *OLDER):
                kubernetes_validate.validate(each, version, strict=True)


def test_the_version_is_the_projects() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


# -- what an operator would look for


@pytest.mark.parametrize("name", ["", *CI])
def test_pods_have_no_rights(name: str) -> None:
    of = objects(values_of(name))
    for owner, spec in pod_specs(of).items():
        assert "shareProcessNamespace" not in spec, owner
        assert spec["automountServiceAccountToken"] is False, owner
        context = spec["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (True, 10001, 10001), owner
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, owner
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), owner
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, owner
            assert "memory" in container["resources"]["limits"], owner
            if "/gem-" in f"/{container['image']}":
                assert container["command"][:2] == ["tini", "--"], (
                    f"{owner}: as PID 1 a program ignores SIGTERM until it has a handler"
                )
        assert all("sizeLimit" in volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume), owner
    assert not [each for each in of if each["kind"] in ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")]


def test_without_tokens_nothing_of_them_is_left() -> None:
    texts = rendered({"auth": {"enabled": False}})
    assert not [path for path, text in texts.items() if "GEM_TOKEN" in text or ("tokens" in text and path.endswith(".yaml"))]
    assert "OPEN:" in texts["NOTES.txt"]
    assert "NOT ENCRYPTED:" in rendered({"tls": {"enabled": False}})["NOTES.txt"]


def job(**worker: Any) -> Object:
    config = worker.pop("config", {})
    return found(objects({"worker": worker, "config": config}), "Job")


def test_scaling_changes_the_job_in_place_and_nothing_but_the_number() -> None:
    before, after = job(parallelism=4), job(parallelism=9)
    assert after["spec"].pop("parallelism") == 9
    assert before["spec"].pop("parallelism") == 4
    assert before == after
    indexed = job(parallelism=9, indexed=True)
    assert (indexed["spec"]["backoffLimitPerIndex"], "backoffLimit" in indexed["spec"]) == (100, False), (
        "no pod waits for others"
    )
    assert (indexed["spec"]["completions"], indexed["spec"]["parallelism"]) == (9, 9)
    assert job(parallelism=4, indexed=True)["metadata"]["name"] == indexed["metadata"]["name"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"task": "mnist"}, False),
        ({"indexed": True}, False),
        ({"config": {"threads": 2}}, False),
        ({"image": {"tag": "2"}}, False),
        ({"resources": {"limits": {"memory": "3Gi"}}}, False),
        ({"config": {"epochs": 500}}, False),  # a Job that is done does not start again
        ({"backoffLimit": 7}, True),
        ({"ttlSecondsAfterFinished": 0}, True),
        ({"config": {"learning_rate": 0.2}}, True),
    ],
    ids=str,
)
def test_what_a_job_cannot_change_makes_another_job(change: Object, same: bool) -> None:
    changed = job(**change)
    assert (changed["metadata"]["name"] == job()["metadata"]["name"]) == same
    assert changed["spec"].get("ttlSecondsAfterFinished") == change.get("ttlSecondsAfterFinished"), "0 is a time, too"


def test_long_names_leave_room_for_what_kubernetes_adds() -> None:
    name = "a-release-with-a-name-that-is-as-long-as-helm-allows1"
    assert len(name) == 53
    values: Object = {"worker": {"indexed": True}, "backup": {"to": "s3://bucket"}}
    names = {each["kind"]: each["metadata"]["name"] for each in objects(values, name)}
    assert len(names["Job"]) <= 63 - len("-99999")  # the pods' host name
    assert len(names["StatefulSet"]) <= 63 - len("-0") - len("-0123456789")  # the label with the revision
    assert len(names["CronJob"]) <= 52  # Kubernetes' own limit
    assert all(len(each) <= 63 for each in names.values())


@pytest.mark.parametrize("release", ["true", "on", "my.run", "r.2", "a-release-with-a-name-that-has-its-dot-here.x-and-more"])
def test_a_release_may_have_any_name_that_begins_with_a_letter(release: str) -> None:
    of = objects({"nameOverride": release.partition(".")[0]}, release)
    for each in of:
        kubernetes_validate.validate(each, NEWEST, strict=True)
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", each["metadata"]["name"]), each["metadata"]["name"]
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == release
    assert (
        environment(pod_specs(of)[f"Deployment {found(of, 'Deployment')['metadata']['name']}"]["containers"][0])["GEM_SERVER"]
        == f"{found(of, 'Service', 'server')['metadata']['name']}:50051"
    )


def test_a_release_whose_name_begins_with_a_digit_is_told_what_to_do() -> None:
    with pytest.raises(helm_python.HelmError, match="named 2026-run-gem: name the release so that it begins with a letter"):
        rendered({}, "2026-run")
    assert found(objects({"fullnameOverride": "run-2026"}, "2026-run"), "Service", "server")["metadata"]["name"] == "run-2026"


def test_names_that_look_like_numbers_stay_names() -> None:
    values: Object = {
        "image": {"pullSecrets": ["7"]},
        "server": {
            "image": {"repository": "12", "tag": "30"},
            "persistence": {"storageClass": "1e3"},
            "pod": {"priorityClassName": "10"},
            "serviceAccount": {"name": "8"},
        },
        "worker": {"queue": "1", "data": {"existingClaim": "2"}, "pod": {"priorityClassName": "3", "runtimeClassName": "4"}},
        "auth": {"existingSecret": "5"},
        "tls": {"existingSecret": "6"},
        "commonLabels": {"year": "2026"},
    }
    for each in objects(values):
        kubernetes_validate.validate(each, NEWEST, strict=True)


def test_large_numbers_stay_whole_numbers() -> None:
    limit = job(backoffLimit=2**31 - 1)["spec"]["backoffLimit"]
    assert (limit, type(limit)) == (2**31 - 1, int)
    user = pod_specs(objects({"podSecurityContext": {"runAsUser": 1_000_690_000}}))["StatefulSet demo-gem-server"][
        "securityContext"
    ]
    assert (user["runAsUser"], type(user["runAsUser"])) == (1_000_690_000, int)


# The pages that tell of a release named demo.
PAGES = [CHART / "README.md", ROOT / "docs/guides/kubernetes.md", ROOT / "docs/troubleshooting.md"]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pages
def test_a_page_names_objects_that_exist(page: Path) -> None:
    of = objects(METRICS)
    names = {each["metadata"]["name"] for each in of}
    stateful = found(of, "StatefulSet")
    (claim,) = (each["metadata"]["name"] for each in stateful["spec"]["volumeClaimTemplates"])
    pods = [f"{stateful['metadata']['name']}-{index}" for index in range(2)]  # the second with `server.ranges`
    quoted = set(re.findall(r"[\w-]*demo-gem[\w-]*", page.read_text(encoding="utf-8")))
    workers = {name for name in quoted if re.fullmatch(r"\w+-gem-worker-(HASH|[0-9a-f]{8}-\d)", name)}
    assert quoted
    assert quoted - workers <= names | {*pods, f"{claim}-{pods[0]}"}


@pages
def test_a_page_names_values_that_exist(page: Path) -> None:
    known = schema_of("")["properties"]
    paths = re.findall(r"(?:--set |`)([a-z]\w*(?:\.\w+)+)(?=[=:`])", page.read_text(encoding="utf-8"))
    files = {"tls.crt", "tls.key"}  # of a Secret
    paths = [path for path in paths if path.partition(".")[0] in known and path not in files]
    assert len(paths) >= 3
    for path in paths:
        assert schema_of(path), f"{page.name}: there is no value {path}"


BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", PAGES[1].read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_values_that_the_page_shows_are_accepted_and_valid() -> None:
    (block,) = BLOCKS
    for each in objects(yaml.safe_load(block)):
        kubernetes_validate.validate(each, NEWEST, strict=True)


def test_the_pages_pod_that_moves_checkpoints_is_valid_and_mounts_the_servers_volume() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"kubectl apply -n ml -f - <<'END'\n(.*?)^    END$", page, re.DOTALL | re.MULTILINE)
    pod, stateful = yaml.safe_load(textwrap.dedent(text)), found(objects(), "StatefulSet")
    kubernetes_validate.validate(pod, NEWEST, strict=True)
    (volume,), (claim,) = pod["spec"]["volumes"], stateful["spec"]["volumeClaimTemplates"]
    assert volume["persistentVolumeClaim"]["claimName"] == f"{claim['metadata']['name']}-{stateful['metadata']['name']}-0"
    server, (container,) = stateful["spec"]["template"]["spec"], pod["spec"]["containers"]
    assert container["image"] == server["containers"][0]["image"]
    assert pod["spec"]["securityContext"].items() <= server["securityContext"].items()
    (mount,) = container["volumeMounts"]
    assert mount in server["containers"][0]["volumeMounts"]
