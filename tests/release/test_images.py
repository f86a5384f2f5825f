"""The images, loaded from the release's archives: what they say of themselves, what they hold, and that they train."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from engines.pods import docker, wait_until
from gem_api import __version__
from packageurl import PackageURL
from packaging.utils import canonicalize_name
from release.files import git, released

pytestmark = [pytest.mark.release, pytest.mark.timeout(600)]
IMAGES = ("server", "worker")
# As compose and the chart run them.
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")

# As a wheel lists its files, but from what is on the disk.
LISTING = """
import base64, hashlib, importlib.metadata
for file in importlib.metadata.distribution("gem-ps").files:
    data = file.read_binary()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    print(f"{file},sha256={digest},{len(data)}")
"""


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """The images' tags name what the archives hold."""
    for image in IMAGES:
        docker("image", "rm", "--force", f"gem-{image}:{__version__}")
        docker("load", "--input", str(released(f"gem-{image}-VERSION-*.tar.gz")), timeout=300)


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> str:
    """The tag of an image."""
    return f"gem-{request.param}:{__version__}"


def inside(image: str, *command: str) -> str:
    """What a command prints in a container of the image."""
    return docker("run", "--rm", *HARDENED, "--network", "none", "--entrypoint", command[0], image, *command[1:])


def bill(image: str) -> dict[str, Any]:
    """The bill of materials, once it fits CycloneDX's schema."""
    text = released(f"{image.partition(':')[0]}-VERSION.cdx.json").read_text(encoding="utf-8")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    materials: dict[str, Any] = json.loads(text)
    return materials


def test_an_image_says_what_it_is_and_runs_without_rights(image: str) -> None:
    config = json.loads(docker("image", "inspect", image))[0]["Config"]
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
    assert (labels["title"], labels["version"]) == tuple(image.split(":"))
    assert labels["revision"] == git("rev-parse", "HEAD")
    assert labels["description"]
    assert config["User"] == inside(image, "id", "-u").strip() == "10001"


def test_an_image_holds_the_released_code(image: str) -> None:
    """Path, hash and size of each file, as the wheel lists them."""
    wheel = zipfile.ZipFile(released("gem_ps-VERSION-*.whl"))
    listed = wheel.read(f"gem_ps-{__version__}.dist-info/RECORD").decode().splitlines()
    files = {line for line in listed if ".dist-info/" not in line}
    assert len(files) > 100
    assert files - set(inside(image, "python3", "-c", LISTING).splitlines()) == set()


def test_a_bill_of_materials_names_what_its_image_holds(image: str) -> None:
    materials = bill(image)
    whole = materials["metadata"]["component"]
    assert f"{whole['name']}:{whole['version']}" == image
    purls = [PackageURL.from_string(each["purl"]) for each in materials["components"]]
    packages = json.loads(inside(image, "python3", "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"))
    assert {(each.name, each.version) for each in purls if each.type == "pypi"} == {
        (canonicalize_name(each["name"]), each["version"]) for each in packages
    }
    database = inside(image, "cat", "/var/lib/dpkg/status").split("\n\n")
    names = {re.findall(r"^Package: (.+)", each)[0] for each in database if "\nStatus: install ok installed" in each}
    assert {each.name for each in purls if each.type == "deb"} == names
    python = inside(image, "python3", "--version").split()[1]
    assert [each.version for each in purls if (each.type, each.name) == ("generic", "python")] == [python]


def test_a_bill_of_materials_says_who_needs_what_and_under_which_licence(image: str) -> None:
    materials = bill(image)
    needs = {each["ref"].partition("@")[0]: each.get("dependsOn", []) for each in materials["dependencies"]}
    assert any(one.startswith("pkg:pypi/numpy@") for one in needs["pkg:pypi/gem-ps"])
    assert set(needs[image]) == {each["bom-ref"] for each in materials["components"]}
    licence = {each["name"]: each["licenses"] for each in materials["components"] if each.get("licenses")}
    assert licence["grpcio"] == [{"license": {"id": "Apache-2.0"}}]


@pytest.fixture
def server() -> Iterator[str]:
    """A container of the server's image, without a network. With a terminal, because Docker then puts errors among the logs."""
    options = ("--detach", "--tty", *HARDENED, "--network", "none", "--volume", "/var/cache/gem", "--env", "GEM_EPOCHS=1")
    name = docker("run", *options, f"gem-server:{__version__}").strip()
    yield name
    docker("rm", "--force", "--volumes", name)


def test_the_images_train_together(server: str) -> None:
    """A worker ends with status 0 when the run is complete."""

    def status() -> str:
        return docker("exec", server, "gem-ctl", "status", "--json", check=False)

    wait_until(status, "the server answers", seconds=60, look=lambda: docker("logs", server))
    options = ("--rm", *HARDENED, "--network", f"container:{server}", "--env", "GEM_SERVER=localhost:50051")
    docker("run", *options, f"gem-worker:{__version__}")
    assert json.loads(status())["version"] > 10
