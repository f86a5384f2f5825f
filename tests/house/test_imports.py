"""Which packages may import which. The test reads the syntax trees and runs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {
    "gem_api": "proto",
    "gem_server": "server",
    "gem_worker": "worker",
    "gem_client": "client_sdk",
    "gem_ctl": "client_sdk",
}
# gem_worker -> gem_ctl -> gem_client -> gem_api <- gem_server
MAY_IMPORT = {
    "gem_api": set(),
    "gem_server": {"gem_api"},
    "gem_client": {"gem_api"},
    "gem_ctl": {"gem_client", "gem_api"},
    "gem_worker": {"gem_ctl", "gem_client", "gem_api"},
}
# Which of a package's other rooms and modules each of its rooms may import. `core/` and `rules/` are pure.
WITHIN_THE_SERVER = {
    "rules": set(),
    "core": {"rules"},
    "security": set(),
    "telemetry": {"core", "rules", "commit_times"},
    "durability": {"core", "rules", "apply_loop", "background", "event_loop", "config", "telemetry"},
    "intake": {
        "core",
        "rules",
        "apply_loop",
        "commit_times",
        "held_replies",
        "event_loop",
        "security",
        "telemetry",
        "durability",
    },
    "rpc": {"core", "rules", "apply_loop", "event_loop", "intake", "security", "telemetry", "durability"},
    "lane": {"core", "background", "event_loop", "config", "intake", "security", "telemetry"},
}
WITHIN_THE_WORKER = {
    "tasks": set(),
    "process": {"tasks", "command", "compute_gate", "device"},
    "evaluation": {"tasks", "command", "device"},
    "launcher": {"tasks", "process", "evaluation", "command", "device"},
    "ray": {"launcher", "process", "command"},
}
TORCH = {"torch", "torchvision", "gem_client.torch"}
# Each works with a library that most users don't have, and is imported by its users alone.
TRAINERS = {"lightning": {"lightning", "pytorch_lightning"}, "transformers": {"transformers"}}
EDGE = {"grpc", "google", "prometheus_client", "time", "datetime", "asyncio", "threading", "random", "secrets", "os", "pathlib"}
CALLS = ("__import__", "import_module", "importlib.import_module")
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def sources(package: str) -> list[Path]:
    """The package's hand-written modules and the stubs' modules alike."""
    return sorted((ROOT / ROOMS[package] / package).rglob("*.py"))


@cache
def imported(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of everything that a module imports, wherever in it; relative imports made absolute."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    package = path.parent.relative_to(next(parent for parent in path.parents if parent.name in ROOMS.values())).parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (start, node.module)))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS:
            yield from ((node.lineno, str(arg.value)) for arg in node.args if isinstance(arg, ast.Constant))


def offences(paths: list[Path], forbidden: set[str]) -> list[str]:
    """Where any of the modules imports a forbidden top-level package or dotted prefix."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in paths
        for line, name in imported(path)
        if any(name == banned or name.startswith(banned + ".") for banned in forbidden)
    ]


@pytest.mark.parametrize("package", ROOMS)
def test_imports_point_one_way_and_nothing_is_pickled(package: str) -> None:
    forbidden = set(ROOMS) - MAY_IMPORT[package] - {package}
    assert sources(package)
    assert offences(sources(package), forbidden | UNSAFE) == []


@pytest.mark.parametrize("package", ["gem_api", "gem_server", "gem_client", "gem_ctl"])
def test_torch_is_imported_where_it_is_meant_to_be_only(package: str) -> None:
    """The server's image is small and starts at once; the SDK works with numpy alone but for gem_client.torch, and
    what builds on it."""
    trainers = [ROOT / "client_sdk" / "gem_client" / f"{name}.py" for name in TRAINERS]
    assert offences([path for path in sources(package) if path.parent.name != "torch" and path not in trainers], TORCH) == []


@pytest.mark.parametrize("package", ROOMS)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainers_library_is_imported_by_one_module_alone(package: str, name: str) -> None:
    paths = [path for path in sources(package) if path != ROOT / "client_sdk" / "gem_client" / f"{name}.py"]
    assert offences(paths, TRAINERS[name] | {f"gem_client.{name}"}) == []


def room(*folders: str) -> list[Path]:
    """The modules in some of the server's rooms."""
    paths = [path for folder in folders for path in (ROOT / "server" / "gem_server" / folder).glob("*.py")]
    assert len(paths) >= 3
    return paths


def test_the_core_and_the_rules_know_no_grpc_no_protobuf_no_prometheus_and_no_clock() -> None:
    pure = room("core", "rules")
    assert offences([path for path in pure if path.stem != "threads"], EDGE) == []
    assert [name for path in pure for _, name in imported(path) if "_pb2" in name or name.startswith("gem_api.v1")] == []


def test_what_decides_the_order_of_the_logs_writes_knows_no_files_no_threads_and_no_clock() -> None:
    deciding = [path for path in room("durability") if path.stem in ("journal", "write_order")]
    files = {f"gem_server.durability.{name}" for name in ("segment", "storage", "log_file")}
    assert len(deciding) == 2
    assert offences(deciding, EDGE | files) == []


@pytest.mark.parametrize(
    ("package", "folder", "rooms"),
    [
        *(("gem_server", folder, rooms) for folder, rooms in WITHIN_THE_SERVER.items()),
        *(("gem_worker", folder, rooms) for folder, rooms in WITHIN_THE_WORKER.items()),
    ],
)
def test_a_room_imports_only_the_rooms_below_it(package: str, folder: str, rooms: set[str]) -> None:
    below = {f"{package}.{name}" for name in (folder, *rooms)}
    paths = [path for path in sources(package) if path.parent.name == folder]
    assert len(paths) >= 2
    for path in paths:
        names = {name for _, name in imported(path) if name.startswith(f"{package}.")}
        assert {name for name in names if not any(name == one or name.startswith(one + ".") for one in below)} == set(), path


def test_a_room_holds_its_packages_and_is_none_itself() -> None:
    """`import proto` would shadow another library."""
    for room in ROOMS.values():
        assert not (ROOT / room / "__init__.py").exists()
        packages = {package for package, its_room in ROOMS.items() if its_room == room}
        assert {path.parent.name for path in (ROOT / room).glob("*/__init__.py")} == packages


def test_an_import_that_is_forbidden_is_found_wherever_it_hides(tmp_path: Path) -> None:
    """The walk itself can fail: it sees imports in functions, relative ones, and those made by a call."""
    module = tmp_path / "server" / "gem_server" / "sneaky.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "def later():\n import torch.nn\n from . import metrics\n __import__('pickle')\n from grpc import aio as a\n"
    )
    names = [name for _, name in imported(module)]
    assert sorted(names) == ["gem_server.metrics", "grpc.aio", "pickle", "torch.nn"]


def test_the_generated_code_is_what_the_contract_says() -> None:
    pytest.importorskip("grpc_tools")
    command = [sys.executable, str(ROOT / "proto" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_digits_are_read_without_importing_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn" or name == "gem_worker.tasks.digits"]:
        monkeypatch.delitem(sys.modules, name)
    import_module("gem_worker.tasks.digits").Digits(None)
    assert "sklearn" not in sys.modules
