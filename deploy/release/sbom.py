"""The bill of materials of an image in CycloneDX's format: its packages of Debian and of Python, and Python itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DPKG = ("dpkg-query", "--show", "--showformat", "${db:Status-Abbrev} ${Package} ${Version} ${Architecture}\n")
# Not `pip inspect`: the pip of many images drops the licence that a package declares as an expression.
PYTHON = """
import importlib.metadata, json, platform
print(json.dumps([platform.python_version(), [each.metadata.json for each in importlib.metadata.distributions()]]))
"""


def inside(image: str, *command: str) -> str:
    """What a command prints in a container of the image."""
    run = ["docker", "run", "--rm", "--network", "none", "--entrypoint", command[0], image, *command[1:]]
    return subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout


def licenses(metadata: dict[str, Any]) -> list[License]:
    """The licence that a package of Python declares: as an expression, in one line of text, or in a classifier."""
    classifiers = [one.split(" :: ")[-1] for one in metadata.get("classifier", []) if one.startswith("License ::")]
    declared = [metadata.get("license_expression", ""), metadata.get("license", ""), *classifiers]
    return [LicenseFactory().make_from_string(one) for one in declared if one and "\n" not in one][:1]


def component(purl: PackageURL, **more: Any) -> Component:
    return Component(name=purl.name, version=purl.version, purl=purl, bom_ref=str(purl), **more)


def debian_components(packages: str, release: dict[str, str]) -> Iterator[Component]:
    """From what DPKG prints. `release` is /etc/os-release."""
    for status, name, version, architecture in (line.split() for line in packages.splitlines()):
        if status == "ii":
            where = {"arch": architecture, "distro": f"{release['ID']}-{release['VERSION_ID']}"}
            yield component(PackageURL("deb", release["ID"], name, version, where))


def bill_of_materials(image: str, created: datetime) -> str:
    """The bill of an image `name:version` as JSON."""
    number, distributions = json.loads(inside(image, "python3", "-c", PYTHON))
    # Python imports the first of two distributions of one name.
    metadata = {canonicalize_name(each["name"]): each for each in reversed(distributions)}
    python = {
        name: component(PackageURL("pypi", None, name, each["version"]), licenses=licenses(each))
        for name, each in metadata.items()
    }
    interpreter = component(
        PackageURL("generic", None, "python", number), cpe=f"cpe:2.3:a:python:python:{number}:*:*:*:*:*:*:*"
    )
    lines = inside(image, "cat", "/etc/os-release").replace('"', "").splitlines()
    debian = debian_components(inside(image, *DPKG), dict(line.split("=", 1) for line in lines if "=" in line))
    bom = Bom(components=[interpreter, *python.values(), *debian])
    name, _, version = image.rpartition(":")
    bom.metadata.component = Component(type=ComponentType.CONTAINER, name=name, version=version, bom_ref=image)
    bom.metadata.timestamp = created
    bom.register_dependency(bom.metadata.component, bom.components)
    for name, each in metadata.items():
        needed = {canonicalize_name(Requirement(text).name) for text in each.get("requires_dist", []) if "extra ==" not in text}
        bom.register_dependency(python[name], [python[other] for other in sorted(needed & python.keys())])
    return JsonV1Dot6(bom).output_as_string(indent=1)
