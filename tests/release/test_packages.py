"""The sdist and the chart's package: they hold what they should, and work without the repository."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import helm_python
import pytest
import yaml
from gem_api import __version__
from release.files import ROOT, git, released, tracked

pytestmark = pytest.mark.release
CHART = Path("deploy/helm/gem")


def members(archive: Path) -> dict[str, bytes]:
    """The files of an archive, without its top folder."""
    with tarfile.open(archive) as tar:
        files = {each.name.partition("/")[2]: tar.extractfile(each) for each in tar.getmembers() if each.isfile()}
        return {name: file.read() for name, file in files.items() if file}


def test_the_sdist_holds_the_sources_and_nothing_else() -> None:
    files = members(released("gem_ps-VERSION.tar.gz"))
    rooms = tracked("proto", "server", "client_sdk", "worker")
    sources = rooms | tracked("pyproject.toml", "README.md", "CHANGELOG.md", "MANIFEST.in", "LICENSE*", "NOTICE*")
    assert {name for name in files if "egg-info/" not in name} == sources | {"PKG-INFO", "setup.cfg"}
    assert {name: files[name] for name in sources} == {name: (ROOT / name).read_bytes() for name in sources}


def test_the_sdist_builds_the_same_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", git("log", "-1", "--format=%ct"))
    options = ["-qq", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(released("gem_ps-VERSION.tar.gz"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wheel = released("gem_ps-VERSION-*.whl")
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_the_chart_package_holds_the_chart_and_no_test_values() -> None:
    files = members(released("gem-VERSION.tgz"))
    chart = {str(Path(name).relative_to(CHART)) for name in tracked(str(CHART))}
    assert set(files) == {name for name in chart if not name.startswith("ci/")}
    assert yaml.safe_load(files.pop("Chart.yaml")) == yaml.safe_load((ROOT / CHART / "Chart.yaml").read_bytes())
    assert files == {name: (ROOT / CHART / name).read_bytes() for name in files}


def test_no_file_names_images_of_another_version() -> None:
    named = re.compile(r"\bgem-(?:server|worker|ray):(\d[\d.]*\d)")
    found = {
        name: set(named.findall((ROOT / name).read_text(encoding="utf-8", errors="ignore"))) for name in tracked(":!tests")
    }
    versions = {name: each for name, each in found.items() if each}
    assert "docker-compose.yml" in versions
    assert versions == {name: {__version__} for name in versions}


def test_the_unpacked_chart_starts_the_released_images(tmp_path: Path) -> None:
    helm_python.expand(tmp_path, released("gem-VERSION.tgz"))
    report = helm_python.lint(tmp_path / "gem", strict=True)
    assert report["errors"] == []
    with helm_python.Chart.load(tmp_path / "gem") as chart:
        texts = chart.render(values={}, name="demo", namespace="ml")
    objects = [each for path, text in texts.items() if path.endswith(".yaml") for each in yaml.safe_load_all(text) if each]
    pods = [each["spec"]["template"]["spec"] for each in objects if each["kind"] in ("StatefulSet", "Deployment", "Job")]
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert images == {f"gem-{image}:{__version__}" for image in ("server", "worker")}
