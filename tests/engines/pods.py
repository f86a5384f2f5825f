"""Runs the pods of a rendered chart as containers of the Docker engine, by the rules of the kubelet that matter to them.

The same image, command, environment, user and groups, read-only root, capabilities, memory limit and mounts;
secrets as files with their owner and mode behind the symbolic links that the kubelet makes; empty volumes that hide what the
image has there; a disk with a `lost+found`. A field of a pod that is neither translated nor listed in IGNORED fails the test,
so that nothing is left out unseen. Resource requests, placement and network policies have no counterpart.
"""

from __future__ import annotations

import base64
import io
import json
import re
import secrets
import subprocess
import tarfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

from engines.chart import Object

HELPER = "gem-server:chart-test"  # makes volumes as root, which owns what the kubelet makes
POD = {"containers", "initContainers", "volumes", "securityContext", "restartPolicy", "terminationGracePeriodSeconds"}
CONTAINER = {"name", "image", "command", "args", "env", "volumeMounts", "securityContext", "resources"}
IGNORED = {"serviceAccountName", "automountServiceAccountToken", "enableServiceLinks", "imagePullPolicy", "ports",
           "terminationMessagePolicy", "startupProbe", "readinessProbe", "livenessProbe", "affinity"}  # fmt: skip
# Of Docker's own, the default profile is what Kubernetes calls RuntimeDefault.
POD_CONTEXT = {"runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "seccompProfile"}
CONTAINER_CONTEXT = {"allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"}


def docker(*arguments: str, stdin: bytes | None = None, check: bool = True, timeout: float = 120) -> str:
    """`docker ARGUMENTS`; returns standard output, or fails with both outputs."""
    done = subprocess.run(["docker", *arguments], input=stdin or b"", capture_output=True, timeout=timeout)
    out, errors = done.stdout.decode(), done.stderr.decode()
    assert not check or not done.returncode, f"docker {' '.join(arguments)} ended with {done.returncode}:\n{out}\n{errors}"
    return out


class Container:
    """A container that was started."""

    def __init__(self, name: str, spec: Object) -> None:
        self.name, self.spec = name, spec

    def _inspect(self) -> Any:
        return json.loads(docker("inspect", self.name))[0]

    @property
    def running(self) -> bool:
        return bool(self._inspect()["State"]["Running"])

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        state = self._inspect()["State"]
        return None if state["Running"] else int(state["ExitCode"])

    @property
    def addresses(self) -> tuple[str, str]:
        """The addresses of IPv4 and, in brackets, IPv6."""
        (network,) = self._inspect()["NetworkSettings"]["Networks"].values()
        return network["IPAddress"], f"[{network['GlobalIPv6Address']}]"

    def lose_ipv4(self) -> None:
        """Leaves it its IPv6 address alone, as in a cluster without IPv4. Needs root."""
        process = str(self._inspect()["State"]["Pid"])
        command = ["nsenter", "--target", process, "--net", "ip", "-4", "address", "flush", "dev", "eth0"]
        subprocess.run(command, check=True, timeout=60)

    def logs(self) -> str:
        done = subprocess.run(["docker", "logs", self.name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
        return done.stdout.decode()

    def signal(self, name: str) -> None:
        docker("kill", "--signal", name, self.name)

    def run(self, *command: str, check: bool = True) -> str:
        """`kubectl exec`."""
        return docker("exec", self.name, *command, check=check)

    def probe(self, probe: str) -> bool:
        """Probes the container once, as the kubelet does, over IPv6."""
        wanted = self.spec[probe]
        ports = {port["name"]: port["containerPort"] for port in self.spec["ports"]}
        get = wanted["httpGet"]
        try:
            url = f"http://{self.addresses[1]}:{ports[get['port']]}{get['path']}"
            with urllib.request.urlopen(url, timeout=wanted["timeoutSeconds"]):
                return True
        except OSError:  # refused, too late, or answered with an error
            return False


class Cluster:
    """A network, and the pods, volumes and secrets on it. `close` removes all of them.

    Args:
        secrets_: The Secrets, by name: the content of each key.
        config_maps: The ConfigMaps, alike.
    """

    def __init__(self, secrets_: dict[str, dict[str, bytes]], config_maps: dict[str, dict[str, bytes]]) -> None:
        self.id = f"gemchart{secrets.token_hex(4)}"
        self._secrets, self._config_maps = secrets_, config_maps
        self._containers: list[str] = []
        self._volumes: list[str] = []
        subnet = f"fd00:{':'.join(secrets.token_hex(2) for _ in range(3))}::/64"
        docker("network", "create", "--ipv6", "--subnet", subnet, self.id)

    def close(self) -> None:
        for container in self._containers:
            docker("rm", "--force", "--volumes", container, check=False)
        for volume in self._volumes:
            docker("volume", "rm", volume, check=False)
        docker("network", "rm", self.id, check=False)

    def pod(
        self,
        name: str,
        spec: Object,
        *,
        claims: dict[str, str] | None = None,
        aliases: Sequence[str] = (),
        index: int | None = None,
        labels: dict[str, str] | None = None,
    ) -> Pod:
        """Makes a pod's volumes; `claims` are existing volumes by their names in the pod, `labels` what its environment may
        refer to."""
        _only(spec, POD | IGNORED, f"the pod {name}")
        _only(spec["securityContext"], POD_CONTEXT, f"the pod {name}'s security context")
        assert spec["securityContext"]["runAsNonRoot"] <= bool(spec["securityContext"]["runAsUser"])
        volumes = dict(claims or {})
        group = spec["securityContext"]["fsGroup"]
        for volume in spec["volumes"]:
            _only(volume, {"name", "emptyDir", "secret", "configMap"}, f"the volume {volume['name']} of {name}")
            volumes[volume["name"]] = self.volume(self._files(volume, group))
        return Pod(self, name, spec, volumes, aliases, index, labels or {})

    def volume(self, files: bytes) -> str:
        """A new volume with the files of an archive, with their owners and modes."""
        name = f"{self.id}-{len(self._volumes)}"
        docker("volume", "create", name)
        self._volumes.append(name)
        mount = f"type=volume,source={name},target=/made,volume-nocopy"
        tar = ["tar", "--extract", "--same-owner", "--same-permissions", "--directory", "/made"]
        docker(
            "run",
            "--rm",
            "--interactive",
            "--user",
            "0",
            "--mount",
            mount,
            "--entrypoint",
            tar[0],
            HELPER,
            *tar[1:],
            stdin=files,
        )
        return name

    def disk(self, group: int) -> str:
        """The volume of a new claim: the group may write, and ext4 has left a folder that only root may read."""
        return self.volume(_archive(group, [(".", 0o2775, b"", ""), ("lost+found", 0o700, b"", "")], root=("lost+found",)))

    def _files(self, volume: Object, group: int) -> bytes:
        """As the kubelet lays a Secret or a ConfigMap out: a change replaces one link, and so all files at once."""
        if "emptyDir" in volume:
            return _empty_folder(group)
        source = volume.get("secret") or volume["configMap"]
        known, name = (self._secrets, source["secretName"]) if "secret" in volume else (self._config_maps, source["name"])
        assert name in known, f"there is no Secret or ConfigMap {name}"
        content = known[name]
        items = source.get("items") or [{"key": key, "path": key} for key in content]
        made: list[tuple[str, int, bytes, str]] = [
            (".", 0o3777, b"", ""),
            ("..1", 0o2755, b"", ""),
            ("..data", 0o777, b"", "..1"),
        ]
        for item in items:
            made.append((f"..1/{item['path']}", source.get("defaultMode", 0o644), content[item["key"]], ""))
            made.append((item["path"], 0o777, b"", f"..data/{item['path']}"))
        return _archive(group, made)

    def started(self, name: str) -> None:
        self._containers.append(name)


class Pod:
    """A pod: its containers share volumes and a name."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        spec: Object,
        volumes: dict[str, str],
        aliases: Sequence[str],
        index: int | None,
        labels: dict[str, str],
    ) -> None:
        self.cluster, self.name, self.spec = cluster, name, spec
        self._volumes, self._aliases, self._index, self._labels = volumes, aliases, index, labels
        self._starts = 0

    def start(self) -> Container:
        """Starts the only container, and before its first start runs the init containers. Fails if one of those does."""
        if not self._starts:
            for spec in self.spec.get("initContainers", []):
                container = self._create(spec)
                status = docker("wait", container.name).strip()
                assert status == "0", f"init container {spec['name']} ended with {status}: {container.logs()}"
        (spec,) = self.spec["containers"]
        return self._create(spec)

    def _create(self, spec: Object) -> Container:
        _only(spec, CONTAINER | IGNORED, f"the container {spec['name']}")
        context, of_pod = spec["securityContext"], self.spec["securityContext"]
        _only(context, CONTAINER_CONTEXT, f"the security context of {spec['name']}")
        variables = self._environment(spec)
        arguments = [re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], each) for each in spec.get("args", [])]
        name = f"{self.cluster.id}-{self.name}-{spec['name']}-{self._starts}"
        options = [
            "--name", name, "--hostname", self.name, "--network", self.cluster.id,
            "--user", f"{of_pod['runAsUser']}:{of_pod['runAsGroup']}", "--group-add", str(of_pod["fsGroup"]),
            "--memory", spec["resources"]["limits"]["memory"].removesuffix("i").lower(),
            "--entrypoint", spec["command"][0],
        ]  # fmt: skip
        options += [f"--network-alias={alias}" for alias in self._aliases]
        options += ["--read-only"] if context["readOnlyRootFilesystem"] else []
        options += [] if context["allowPrivilegeEscalation"] else ["--security-opt", "no-new-privileges"]
        options += [f"--cap-drop={each}" for each in context["capabilities"]["drop"]]
        options += [f"--env={key}={value}" for key, value in variables.items()]
        for mount in spec["volumeMounts"]:
            _only(mount, {"name", "mountPath", "readOnly"}, f"a mount of {spec['name']}")
            source, target = self._volumes[mount["name"]], mount["mountPath"]
            mode = ",readonly" * mount.get("readOnly", False)
            options += ["--mount", f"type=volume,source={source},target={target},volume-nocopy{mode}"]
        self.cluster.started(name)
        self._starts += 1
        docker("run", "--detach", *options, spec["image"], *spec["command"][1:], *arguments)
        return Container(name, spec)

    def _environment(self, spec: Object) -> dict[str, str]:
        fields = {"metadata.name": self.name} | {f"metadata.labels['{key}']": value for key, value in self._labels.items()}
        found: dict[str, str] = {}
        for each in spec.get("env", []):
            if "valueFrom" in each:
                assert each["valueFrom"].keys() == {"fieldRef"}, f"not translated: {each}"
                found[each["name"]] = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
            else:  # it may refer to variables that come before
                found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], each["value"])
        # Kubernetes adds it as the last one, so that no other variable can refer to it.
        return found | ({} if self._index is None else {"JOB_COMPLETION_INDEX": str(self._index)})


class Job:
    """Replaces pods as the controller of Kubernetes' Jobs does, by the rendered policy. `reconcile` does one round."""

    def __init__(self, cluster: Cluster, job: Object) -> None:
        self._cluster, self._job = cluster, job
        self.running: list[Container] = []
        self.ended: list[Container] = []
        self.state = "running"  # then complete or failed
        self.failures = 0
        self._made = 0

    def reconcile(self) -> str:
        """Looks at pods that have ended, starts pods that are missing, and returns the state."""
        for container in [each for each in self.running if not each.running]:
            self.running.remove(container)
            self.ended.append(container)
            self.failures += self._action(container.status or 0) == "Count"
            if self.failures > self._job["spec"]["backoffLimit"]:
                self.state = "failed"
        succeeded = any(each.status == 0 for each in self.ended)
        if succeeded and not self.running and self.state == "running":
            self.state = "complete"
        # A Job without `completions` starts no pod once one has succeeded.
        while self.state == "running" and not succeeded and len(self.running) < self._job["spec"]["parallelism"]:
            self._made += 1
            name = f"{self._job['metadata']['name']}-{self._made}"
            self.running.append(self._cluster.pod(name, self._job["spec"]["template"]["spec"]).start())
        return self.state

    def _action(self, status: int) -> str:
        if status == 0:
            return "Succeed"
        for rule in self._job["spec"]["podFailurePolicy"]["rules"]:
            if "onExitCodes" in rule and status in rule["onExitCodes"]["values"]:
                return str(rule["action"])
        return "Count"


def wait_until(condition: Any, what: str, seconds: float = 120.0, look: Any = str) -> Any:
    """Waits for a condition and returns its value. If it fails, the message names it and holds what `look` returns."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}\n{look()}"
        threading.Event().wait(0.25)
    return value


def secrets_of(objects: list[Object]) -> dict[str, dict[str, bytes]]:
    """The Secrets among rendered objects."""
    found = [each for each in objects if each["kind"] == "Secret"]
    return {each["metadata"]["name"]: {key: base64.b64decode(text) for key, text in each["data"].items()} for each in found}


def config_maps_of(objects: list[Object]) -> dict[str, dict[str, bytes]]:
    """The ConfigMaps among rendered objects."""
    found = [each for each in objects if each["kind"] == "ConfigMap"]
    return {each["metadata"]["name"]: {key: text.encode() for key, text in each["data"].items()} for each in found}


def _only(part: Object, known: set[str], where: str) -> None:
    assert part.keys() <= known, f"{where}: not translated: {sorted(part.keys() - known)}"


def _empty_folder(group: int) -> bytes:
    return _archive(group, [(".", 0o2777, b"", "")])


def _archive(group: int, made: list[tuple[str, int, bytes, str]], root: tuple[str, ...] = ()) -> bytes:
    """A tar archive of (path, mode, content, target of a link); a folder has neither content nor target. Root is the owner."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, mode, content, link in made:
            info = tarfile.TarInfo(path)
            info.mode, info.gid, info.size = mode, 0 if path in root else group, len(content)
            info.type = tarfile.SYMTYPE if link else tarfile.REGTYPE if content else tarfile.DIRTYPE
            info.linkname = link
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
