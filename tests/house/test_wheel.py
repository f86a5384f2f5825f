"""The wheel in dist/ works in an environment with only the server's dependencies: no source tree, no PyTorch."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.wheel
ROOT = Path(__file__).parents[2]
ROOMS = ("proto", "server", "worker", "client_sdk")
with (ROOT / "pyproject.toml").open("rb") as file:
    PROJECT: dict[str, Any] = tomllib.load(file)["project"]


@pytest.fixture(scope="module")
def wheel() -> Path:
    wheels = list((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        pytest.fail(f"dist/ holds {len(wheels)} wheels, not one: run `make test-wheel`, which builds it", pytrace=False)
    return wheels[0]


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def with_dependencies(requirements: list[str]) -> set[str]:
    """Distributions that the requirements name, and all that those need, without extras."""
    found: set[str] = set()
    while requirements:
        requirement = requirements.pop()
        name = re.sub(r"[-_.]+", "-", re.split(r"[ ;<>=!~\[(]", requirement)[0]).lower()
        if name not in found and "extra ==" not in requirement:
            try:
                requirements += importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                assert ";" in requirement, f"{requirement} is not installed"  # it is for another Python or platform
                continue
            found.add(name)
    return found


def installed(wheel: Path, folder: Path, requirements: list[str]) -> Path:
    """The `bin` of a new environment: the requirements linked from this one, where they are pinned, and the wheel."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for name in with_dependencies(requirements):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    options = ["--python", str(folder / "bin" / "python"), "install", "-qq", "--no-deps", "--no-index"]
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *options, str(wheel))
    return folder / "bin"


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After `pip install gem-ps`."""
    return installed(wheel, tmp_path_factory.mktemp("plain"), list(PROJECT["dependencies"]))


@pytest.fixture(scope="module")
def demo_commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After `pip install ".[demo]"`."""
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["torch"], *extras["demo"]]
    return installed(wheel, tmp_path_factory.mktemp("demo"), [one for one in wanted if not one.startswith("gem-ps")])


def test_it_holds_the_types_the_contract_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{package}/py.typed" for package in ("gem_api", "gem_server", "gem_worker", "gem_client")} <= names
    protos = {str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto" / "gem_api").rglob("*.proto")}
    assert protos
    assert protos <= names
    assert "gem_api/run_page.html" in names
    sources = {str(path.relative_to(ROOT / room)) for room in ROOMS for path in (ROOT / room).glob("gem_*/**/*.py")}
    assert {name for name in names if ".dist-info/" not in name and name.endswith(".py")} == sources


def test_what_users_import_comes_from_the_wheel(commands: Path) -> None:
    code = "import gem_client, gem_server, gem_api, importlib.util as u; print(gem_client.__file__, u.find_spec('torch'))"
    path, torch = run(str(commands / "python"), "-I", "-c", code).split()
    assert Path(path).is_relative_to(commands.parent)
    assert torch == "None"


@pytest.mark.parametrize("command", PROJECT["scripts"])
def test_a_command_tells_its_version_and_its_options(command: str, demo_commands: Path) -> None:
    assert run(str(demo_commands / command), "--version").split()[-1] == importlib.metadata.version("gem-ps")
    assert "Usage" in run(str(demo_commands / command), "--help")


@pytest.mark.parametrize("command", ["gem-server", "gem-ctl"])
def test_the_server_and_the_operator_need_no_extra(command: str, commands: Path) -> None:
    assert "Usage" in run(str(commands / command), "--help")


def test_the_log_command_is_found(commands: Path) -> None:
    assert "Usage" in run(str(commands / "gem-ctl"), "log", "--help")
