"""A real Prometheus with the project's own configuration, and what a test asks it."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from kit.ports import free_address
from kit.server import DEADLINE, wait_until

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "prometheus" / "prometheus.yml"
SCRAPE = 0.5  # seconds between two scrapes, and two evaluations of the rules


@dataclass(frozen=True)
class Series:
    """One time series.

    Attributes:
        labels: The labels that identify the series.
        times: float64, shape (n,): Unix seconds.
        values: float64, shape (n,); may hold NaN and infinities.
    """

    labels: dict[str, str]
    times: npt.NDArray[np.float64]
    values: npt.NDArray[np.float64]


class Prometheus:
    """A Prometheus server at a URL. A query that it rejects is an AssertionError with its own words."""

    def __init__(self, url: str) -> None:
        self.url = url

    def api(self, what: str, **arguments: str) -> Any:
        """The data of a response of its HTTP API."""
        try:
            with urllib.request.urlopen(
                f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(arguments)}", timeout=DEADLINE
            ) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error.read().decode()}: {arguments}") from None

    def range(self, query: str, start: float, end: float, step: float) -> list[Series]:
        """Evaluates a PromQL query every `step` seconds in [start, end], in Unix seconds."""
        data = self.api("query_range", query=query, start=f"{start:.3f}", end=f"{end:.3f}", step=f"{step:.3f}")
        return [_series(entry["metric"], entry["values"]) for entry in data["result"]]

    def value(self, query: str, at: float) -> float | None:
        """Evaluates a PromQL query at a time and returns the first number, or None."""
        series = self.values(query, at)
        return float(series[0].values[0]) if series else None

    def values(self, query: str, at: float) -> list[Series]:
        """Evaluates a PromQL query at a time and returns all series, with one value each."""
        data = self.api("query", query=query, time=f"{at:.3f}")
        return [_series(entry["metric"], [entry["value"]]) for entry in data["result"]]


def _series(labels: dict[str, str], samples: list[tuple[float, str]]) -> Series:
    times, values = zip(*samples, strict=True)
    return Series(labels, np.array(times, np.float64), np.array([float(value) for value in values], np.float64))


def fill_in(expr: str, instance: str, window: float) -> str:
    """A panel's query as Grafana fills it in for one server, with rates over `window` seconds."""
    matched = re.escape(instance).replace("\\", "\\\\").replace('"', '\\"')
    return expr.replace("$server", matched).replace("$__rate_interval", f"{max(1, round(window))}s")


@contextmanager
def watching(folder: Path, targets: dict[str, Any]) -> Iterator[Prometheus]:
    """Prometheus with the project's own configuration but for where its targets are and how often it asks them.

    `targets` has the static configurations of each job.
    """
    settings = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))
    settings["global"] = {"scrape_interval": f"{int(1000 * SCRAPE)}ms", "evaluation_interval": f"{int(1000 * SCRAPE)}ms"}
    settings["rule_files"] = [str(CONFIGURATION.with_name(name)) for name in settings.get("rule_files", [])]
    names = [job["job_name"] for job in settings["scrape_configs"]]
    settings["scrape_configs"] = [{"job_name": name, "static_configs": targets[name]} for name in names]
    with started(folder, settings) as server:
        yield server


@contextmanager
def started(folder: Path, settings: dict[str, Any]) -> Iterator[Prometheus]:
    """Prometheus with this configuration, once it is ready. Its files are in `folder`."""
    file, address = folder / "prometheus.yml", free_address()
    file.write_text(json.dumps(settings), encoding="utf-8")
    flags = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *flags], stdout=log, stderr=log)
    try:

        def ready() -> bool:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            with suppress(OSError), urllib.request.urlopen(f"http://{address}/-/ready", timeout=DEADLINE):
                return True
            return False

        wait_until(ready, "Prometheus to be ready")
        yield Prometheus(f"http://{address}")
    finally:
        process.kill()
        process.wait(DEADLINE)
