"""The compose file, .env.example, deploy/run.toml and the commands' settings agree. The tests only read them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from gem_api.hyperparameters import DECLARATIONS, Hyperparameters
from gem_api.process.settings import ALL_SETTINGS, Command, settings_of
from gem_api.ranges import Range
from gem_server.cli import main as server
from gem_server.config import ServerConfig
from gem_worker.device import devices
from gem_worker.evaluation.evaluator import main as evaluator
from gem_worker.process.cli import main as worker
from kit.server import config, serving

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SETTINGS = (ROOT / "deploy/run.toml").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
COMMANDS: dict[Command, click.Command] = {"server": server, "worker": worker, "evaluator": evaluator}
SECRETS = {"GEM_TOKENS", "GEM_TLS_CLIENT_CA", "GEM_TOKEN_FILE", "GEM_TLS_CA", "GEM_TLS_CERT", "GEM_TLS_KEY"}
# Not a user's to choose here: where the container listens, what it is called, where its volumes are, and its secrets.
OURS = {f"GEM_{row.key.upper()}" for row in ALL_SETTINGS if row.by_deployment}


def variables(command: Command) -> set[str]:
    """The environment variables that a command reads."""
    return {"GEM_CONFIG", *(f"GEM_{key.upper()}" for key in settings_of(command))}


def passed_on(service: str) -> dict[str, Any]:
    environment = COMPOSE["services"][service]["environment"]
    return {name: value for name, value in environment.items() if name.startswith("GEM_")}


@pytest.mark.parametrize("service", COMMANDS)
def test_a_service_is_given_only_what_its_command_reads(service: Command) -> None:
    ours = {"GEM_METRICS_LISTEN"} if service == "worker" else set()
    assert passed_on(service).keys() <= variables(service) | ours
    (mounted,) = [volume for volume in COMPOSE["services"][service]["volumes"] if "GEM_CONFIG" in volume]
    assert mounted == f"${{GEM_CONFIG:-./deploy/run.toml}}:{passed_on(service)['GEM_CONFIG']}:ro"


@pytest.mark.parametrize("service", COMMANDS)
def test_the_file_of_settings_is_accepted_as_it_is_and_with_all_its_lines(service: Command, tmp_path: Path) -> None:
    whole = re.sub(r"^#(?=\w+ = )", "", SETTINGS, flags=re.MULTILINE)
    assert len(tomllib.loads(whole)) > 10
    for number, text in enumerate((SETTINGS, whole)):
        file = tmp_path / f"{number}.toml"
        file.write_text(text, encoding="utf-8")
        params = COMMANDS[service].make_context(service, ["--config", str(file)]).params
        if service == "server":
            assert params["epochs"] == 200
            assert params["rule"] == ({"rule": "gem", "kappa": 2.0} if number else {"rule": "gem"})


def test_the_containers_train_as_make_train_does() -> None:
    (optimizer,) = re.findall(r"gem-train --optimizer (\w+) ", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert optimizer == tomllib.loads(SETTINGS)["optimizer"] == "adamw"


def test_the_file_names_the_hyperparameters_that_a_resumed_run_keeps() -> None:
    sentence = SETTINGS.partition("A resumed run keeps ")[2].partition(";")[0]
    named = set(re.findall(r"[a-z_]+", sentence)) & DECLARATIONS.keys()
    kept = {each.option or name for name, each in DECLARATIONS.items() if each.fixed}
    assert named == kept


def test_every_variable_is_documented_with_its_default_and_every_documented_variable_is_read() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^#(GEM_\w+)=(.*)$", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE))
    read = {name for service in COMMANDS for name in passed_on(service)} | set(re.findall(r"\$\{(GEM_\w+)", text))
    assert read - OURS <= documented.keys() <= read
    run = tomllib.loads(SETTINGS)
    given = Hyperparameters(optimizer=run["optimizer"], epochs=run["epochs"]).with_defaults(set(run))
    real: dict[str, Any] = {f"GEM_{key.upper()}": row.default for each in COMMANDS for key, row in settings_of(each).items()}
    real |= {"GEM_EPOCHS": given.epochs, "GEM_LEARNING_RATE": given.learning_rate}
    real |= re.findall(r"\$\{(GEM_\w+):?-([^}]*)\}", text)
    for name, default in documented.items():
        if default and name != "GEM_DATA_FOLDER":  # chosen by the machine, or by the user alone
            assert default == str(real[name]).lower() or float(default) == float(real[name]), name


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_containers_have_no_more_rights_than_they_need_a_pinned_image_and_ports_on_loopback(service: str) -> None:
    settings = COMPOSE["services"][service]
    assert (settings["read_only"], settings["cap_drop"]) == (True, ["ALL"])
    assert settings["security_opt"] == ["no-new-privileges:true"]
    assert re.search(r":v?\d+\.\d+\.\d+\}?$", settings["image"]), settings["image"]
    assert all(port.startswith("${GEM_PUBLISH:-127.0.0.1}:") for port in settings.get("ports", []))


def test_the_lane_has_the_same_port_inside_and_outside() -> None:
    """The server tells workers the port that it listens on; those on other machines reach only a published one."""
    server = COMPOSE["services"]["server"]
    assert server["environment"]["GEM_LANE_LISTEN"] == "0.0.0.0:${GEM_LANE_PORT:-50052}"
    assert "${GEM_PUBLISH:-127.0.0.1}:${GEM_LANE_PORT-50052}:${GEM_LANE_PORT:-50052}" in server["ports"]
    assert ServerConfig(listen="0.0.0.0:50051").lane_address == "0.0.0.0:50052"  # of the image alone
    assert re.search(r"^EXPOSE 50051 50052 9464$", DOCKERFILE, re.MULTILINE)


def test_the_images_run_as_a_user_without_rights() -> None:
    """The last USER of each image that is shipped: a number, because Kubernetes knows no names."""
    for target in ("server", "worker"):
        stage = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
        (text,) = [part for part in stage if re.match(rf"\S+ AS {target}\n", part)]
        assert re.findall(r"^USER (\w+)$", text, re.MULTILINE) == ["10001"]


@pytest.mark.parametrize("build", ["cpu", "cu126"])
def test_the_workers_image_has_that_build_of_pytorch_and_with_cuda_a_compiler(tmp_path: Path, build: str) -> None:
    """Runs the steps of the image's stage with stand-ins for what they call. pip would take another build for a version without
    its local part."""
    (stage,) = re.findall(r"^FROM packages AS torch-packages\n(.*?)^FROM ", DOCKERFILE, re.MULTILINE | re.DOTALL)
    steps = re.findall(r"^RUN ((?:.*\\\n)*.*)", stage, re.MULTILINE)
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("pip", "apt-get", "rm"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >>called\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "TORCH": build}
    for step in steps:
        command = re.sub(r"^--mount=\S+ ", "", step)
        subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=True, timeout=30)
    called = (tmp_path / "called").read_text().splitlines()
    version = metadata.version("torch").partition("+")[0]
    assert called[-1] == f"pip install torch=={version}+{build} --extra-index-url https://download.pytorch.org/whl/{build}"
    assert any("g++" in line for line in called) == (build != "cpu")


def test_a_worker_can_load_what_it_has_compiled() -> None:
    """Docker mounts a tmpfs as noexec by default: no program there can run."""
    assert COMPOSE["services"]["worker"]["tmpfs"] == COMPOSE["services"]["evaluator"]["tmpfs"] == ["/tmp:exec"]
    assert COMPOSE["services"]["server"]["tmpfs"] == ["/tmp"]
    assert re.search(r"^ENV .*TRITON_CACHE_DIR=/tmp/", DOCKERFILE, re.MULTILINE)


# -- the files that close what is open


def override(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / name).read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("name", ["compose.tokens.yml", "compose.tls.yml"])
def test_a_secret_reaches_only_a_container_that_reads_it_and_only_as_a_file(name: str) -> None:
    content = override(name)
    assert content["services"].keys() == COMMANDS.keys()
    for service in COMMANDS:
        settings = content["services"][service]
        read = {value.removeprefix("/run/secrets/") for value in settings["environment"].values()}
        assert read == set(settings["secrets"])
        known = variables(service) | ({"GEM_TOKEN_FILE", "GEM_TLS_CA"} if service == "server" else set())  # gem-ctl's
        assert settings["environment"].keys() <= known & SECRETS
        if service != "server":  # which alone gets what others could be impersonated with
            assert set(settings["secrets"]) <= {f"{service}-token", "ca.pem"}
    mounted = {secret for settings in content["services"].values() for secret in settings["secrets"]}
    assert content["secrets"] == {secret: {"file": f"./secrets/{secret}"} for secret in mounted}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_pages_commands_make_secrets_that_the_containers_can_read(tmp_path: Path) -> None:
    """The containers' user is neither the files' owner nor in their group."""
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(openssl .*?|mkdir .*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    (tmp_path / "docker").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "docker").chmod(0o755)
    for block in blocks:
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-ec", "umask 077\n" + block], cwd=tmp_path, env=environment, check=True, capture_output=True)
    secrets = tmp_path / "secrets"
    assert secrets.stat().st_mode & 0o777 == 0o700
    for name in ("compose.tokens.yml", "compose.tls.yml"):
        for secret in override(name)["secrets"]:
            assert (secrets / secret).stat().st_mode & 0o777 == 0o644, secret


def test_secrets_are_kept_out_of_git_and_of_the_images() -> None:
    assert "secrets/" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert allowed[0] == "*"
    assert "!secrets" not in allowed


def test_workers_and_the_evaluator_get_the_gpus_and_the_server_does_not() -> None:
    services = override("compose.gpu.yml")["services"]
    assert services.keys() == {"worker", "evaluator"}
    for settings in services.values():
        assert settings["environment"]["GEM_DEVICE"].startswith("${GEM_DEVICE:-")
        assert devices(settings["environment"]["GEM_DEVICE"].removeprefix("${GEM_DEVICE:-").rstrip("}")), "a value of --device"


# -- two servers


class _Loader(yaml.SafeLoader):
    """Reads compose's `!reset`, which removes what another file says."""


_Loader.add_constructor("!reset", lambda loader, node: None)
RANGES: dict[str, Any] = yaml.load((ROOT / "deploy/compose.ranges.yml").read_text(encoding="utf-8"), _Loader)
SERVERS = ("server", "server-1")


def merged(service: str) -> dict[str, str]:
    """The environment of a server with both files."""
    own: dict[str, str] = RANGES["services"][service]["environment"]
    return passed_on("server") | own


def test_each_server_has_a_range_of_its_own_and_all_commits_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    for index, service in enumerate(SERVERS):
        with monkeypatch.context() as patch:
            for name in ("GEM_RANGE", "GEM_PEERS", "GEM_DURABILITY"):
                patch.setenv(name, merged(service).get(name) or "")
            options = server.make_context("gem-server", []).params
        assert options["range"] == Range(index, len(SERVERS))
        assert options["peers"] == (tuple(f"{other}:50051" for other in SERVERS[1:]) if index == 0 else ())
        assert options["durability"] == "log"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_health_check_is_that_of_a_server_that_is_ready() -> None:
    command, *arguments = COMPOSE["services"]["server"]["healthcheck"]["test"]
    assert command == "CMD"
    with serving(config(metrics_listen="127.0.0.1:0")) as live:
        address = live.server.wiring.endpoint.http_address
        (host, port), script = address.split(":"), arguments[-1].replace("$$", "$")
        assert "GEM_METRICS_LISTEN=0.0.0.0:9464" in DOCKERFILE
        check = [*arguments[:-1], script.replace("/127.0.0.1/9464", f"/{host}/{port}")]
        done = subprocess.run(check, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "ready")
        live.server.wiring.endpoint.health.ending()
        done = subprocess.run(check, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout.splitlines()[-1][:13]) == (1, "shutting down")
    assert subprocess.run([*check], capture_output=True, timeout=60).returncode == 1, "nobody serves there"


def test_prometheus_scrapes_both_servers_and_all_else_is_the_same() -> None:
    (volume,) = RANGES["services"]["prometheus"]["volumes"]
    source, target, _ = volume.split(":")
    assert target in [part for part in COMPOSE["services"]["prometheus"]["command"][0].split("=") if part.endswith(".yml")]
    both = (ROOT / source).read_text(encoding="utf-8")
    one = (ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8")
    assert both == one.replace('["server:9464"]', str([f"{service}:9464" for service in SERVERS]).replace("'", '"'))


def composed(*files: str) -> Any:
    """What compose makes of docker-compose.yml and these files of deploy/. Fails if its schema refuses them."""
    # Without the compose plug-in, `docker` reads compose's options as its own.
    if shutil.which("docker") is None or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("Docker's compose plug-in is not installed")
    named = [word for name in ("docker-compose.yml", *(f"deploy/{file}" for file in files)) for word in ("-f", name)]
    command = ["docker", "compose", "--env-file", os.devnull, *named, "config", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["services"]


def test_compose_accepts_the_files_and_the_servers_of_two_ranges_are_alike() -> None:
    for path in (ROOT / "deploy").glob("compose.*.yml"):
        assert composed(path.name).keys() >= COMPOSE["services"].keys()
    services = composed("compose.ranges.yml")
    first, second = (services[service] for service in SERVERS)
    assert "build" not in second
    assert not second.get("ports")
    own = {"GEM_RANGE", "GEM_PEERS", "GEM_MEMORY_SOCKET"}
    assert {name for name in first["environment"] if first["environment"][name] != second["environment"].get(name)} == own
    for setting in ("image", "healthcheck", "restart", "read_only", "cap_drop", "security_opt", "stop_grace_period"):
        assert first[setting] == second[setting], setting
    disks = [[mount["source"] for mount in each["volumes"] if mount["target"] == "/checkpoints"] for each in (first, second)]
    assert disks == [["checkpoints"], ["checkpoints-1"]]
