"""Builds a release in dist/: wheel, sdist, chart, both images and the bill of materials of each. `make release` calls this.

Everything comes from a copy of the last commit, so that nothing else on this machine gets into it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
SOURCE = ROOT / "build" / "release"
IMAGES = ("server", "worker")


def output(*command: str) -> str:
    """What a command prints. Raises CalledProcessError if it fails."""
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def succeeds(*command: str) -> bool:
    return bool(shutil.which(command[0])) and not subprocess.run(command, cwd=ROOT, capture_output=True).returncode


def version() -> str:
    text = (ROOT / "proto" / "gem_api" / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"', text, re.MULTILINE)[0]


def obstacles() -> list[str]:
    """What stands in the way of a release, and what to do about each."""
    found = []
    if not succeeds("docker", "info"):
        found.append("No Docker engine answers. Install it (https://docs.docker.com/engine/install) and start it.")
    elif not succeeds("docker", "buildx", "version"):
        found.append("Docker lacks buildx. Install its package: docker-buildx-plugin or docker-buildx.")
    for module in ("helm_python", "cyclonedx"):
        if not importlib.util.find_spec(module):
            found.append(
                f"Python has no module {module}. Start with `make release`, or install requirements-integrations.lock."
            )
    if changed := output("git", "status", "--porcelain"):
        found.append(f"A release is made from the last commit. Commit or remove these first:\n{changed}")
    tags = output("git", "tag", "--points-at", "HEAD", "v*").split()
    if tags and tags != [f"v{version()}"]:
        found.append(f"The tag {' '.join(tags)} differs from v{version()}. Set __version__ in proto/gem_api, or move the tag.")
    if tags and f"\n## {version()}" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        found.append(f"CHANGELOG.md has no section for {version()}. Name the one that says Unreleased so.")
    return found


def build_packages() -> None:
    """The wheel and the sdist. The wheel's bytes depend on the commit and on the versions in requirements.lock alone."""
    options = ["-qq", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--wheel-dir", str(DIST)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "."], cwd=SOURCE, check=True)
    hook = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", hook, DIST], cwd=SOURCE, check=True, stdout=subprocess.DEVNULL)


def labels(image: str) -> dict[str, str]:
    """The OCI's labels of an image. https://github.com/opencontainers/image-spec/blob/main/annotations.md"""
    with (SOURCE / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    values = {
        "title": f"gem-{image}",
        "description": project["description"],
        "version": version(),
        "revision": output("git", "rev-parse", "HEAD"),
        "created": created().isoformat(),
        "licenses": project.get("license", ""),
        "source": project.get("urls", {}).get("Source", ""),
    }
    return {f"org.opencontainers.image.{name}": value for name, value in values.items() if value}


def created() -> datetime:
    """The time of the last commit."""
    return datetime.fromtimestamp(int(output("git", "log", "-1", "--format=%ct")), UTC)


def build_image(image: str) -> None:
    """An image in the engine and as an archive for `docker load`, and its bill of materials."""
    from sbom import bill_of_materials  # needs packages whose absence obstacles() explains

    tag, name = f"gem-{image}:{version()}", f"gem-{image}-{version()}"
    options = [f"--label={key}={value}" for key, value in labels(image).items()]
    subprocess.run(
        ["docker", "build", "-q", "-f", "deploy/Dockerfile", "--target", image, "--tag", tag, *options, "."],
        cwd=SOURCE,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (DIST / f"{name}.cdx.json").write_text(bill_of_materials(tag, created()), encoding="utf-8")
    platform = output("docker", "image", "inspect", "--format", "{{.Os}}-{{.Architecture}}", tag)
    archive = DIST / f"{name}-{platform}.tar.gz"
    with archive.open("wb") as file, subprocess.Popen(["docker", "save", tag], stdout=subprocess.PIPE) as saved:
        subprocess.run(["gzip", "-1"], stdin=saved.stdout, stdout=file, check=True)
    if saved.returncode:
        sys.exit(f"docker save {tag} ended with {saved.returncode}")


def main() -> None:
    if found := obstacles():
        sys.exit("\n".join(["No release yet:", *(f"- {one}" for one in found)]))
    import helm_python

    os.umask(0o022)  # the modes of files get into wheel and sdist
    os.environ["SOURCE_DATE_EPOCH"] = str(int(created().timestamp()))
    for folder in (DIST, SOURCE):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    output("git", "checkout-index", "--all", f"--prefix={SOURCE}/")
    print("building wheel, sdist and chart", flush=True)
    build_packages()
    helm_python.package(SOURCE / "deploy" / "helm" / "gem", destination=DIST)
    print("building the images, their archives and their bills of materials", flush=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(build_image, IMAGES))


if __name__ == "__main__":
    main()
