"""Polls a run's version and the median π of each tensor from the server's /metrics."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import numpy as np

from benchmarks.paper.results import Columns

_ADDRESS = re.compile(r"metrics (http://\S+?),")
_VERSION = re.compile(r"^gem_central_version (\S+)", re.MULTILINE)
_MEDIAN = re.compile(r'^gem_pi_tensor_median{tensor="(.+)"} (\S+)', re.MULTILINE)


class MetricsPoller:
    """Polls the metrics of one run; the address is found in what gem-train printed."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._address = ""
        self._rows: list[tuple[int, dict[str, float]]] = []

    def poll(self) -> None:
        """Polls once. Ignores a server that does not respond because it is starting or has ended."""
        if not self._address:
            found = _ADDRESS.search(self._output.read_text(errors="replace"))
            self._address = found[1] if found else ""
        if not self._address:
            return
        try:
            with urllib.request.urlopen(self._address, timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return
        version, tensors = read_metrics(text)
        if tensors and not (self._rows and self._rows[-1][0] == version):
            self._rows.append((version, tensors))

    @property
    def tensors(self) -> Columns:
        """Columns: version, and the median π of each tensor by its name. Empty where the rule has no π."""
        if not self._rows:
            return {}
        names = list(self._rows[-1][1])
        columns = {name: np.array([row.get(name, np.nan) for _, row in self._rows]) for name in names}
        return {"version": np.array([version for version, _ in self._rows], float), **columns}


def read_metrics(text: str) -> tuple[int, dict[str, float]]:
    """The version and the tensors' medians in Prometheus' text format."""
    version = _VERSION.search(text)
    return int(float(version[1])) if version else 0, {tensor: float(median) for tensor, median in _MEDIAN.findall(text)}
