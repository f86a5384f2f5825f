"""Asks a Prometheus server, over its HTTP API."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
Column = npt.NDArray[np.float64]
T = TypeVar("T")


class PrometheusError(Exception):
    """Prometheus can't be reached or refuses the question; the message says which and why."""


@dataclass(frozen=True)
class Series:
    """One time series.

    Attributes:
        labels: What tells it from the others.
        times: float64, shape (n,): Unix seconds.
        values: float64, shape (n,); may hold NaN and infinities.
    """

    labels: dict[str, str]
    times: Column
    values: Column


class Prometheus:
    """A Prometheus server.

    Args:
        url: Where it is, for example http://127.0.0.1:9090.
        timeout: Seconds to wait for each answer.
    """

    def __init__(self, url: str, timeout: float = 30.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise PrometheusError(f"{url!r} is no address of Prometheus: give http://HOST:9090")
        self._url = url.rstrip("/")
        self._timeout = timeout

    def range(self, query: str, start: float, end: float, step: float) -> list[Series]:
        """What PromQL gives at every `step` seconds of [start, end], in Unix seconds. Raises PrometheusError."""
        span = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
        return self._get(_all_series, "query_range", query=query, **span)

    def value(self, query: str, at: float) -> float | None:
        """The one number that PromQL gives at a time; None where there is none. Raises PrometheusError."""
        return self._get(_first_value, "query", query=query, time=f"{at:.3f}")

    def values(self, query: str, at: float) -> list[Series]:
        """All series that PromQL gives at a time, with one value each. Raises PrometheusError."""
        return self._get(_one_value_each, "query", query=query, time=f"{at:.3f}")

    def scrape_interval(self, instance: str) -> float:
        """Seconds between two scrapes of a server and of workers, whichever are rarer; 15 where nothing is known.

        Raises:
            PrometheusError: Prometheus gives no answer.
        """
        return self._get(partial(_interval, instance), "targets", state="active")

    def _get(self, read: Callable[[Any], T], what: str, **arguments: str) -> T:
        """What `read` makes of an answer's data."""
        body = urllib.parse.urlencode(arguments)
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{what}?{body}", timeout=self._timeout) as answer:
                return read(json.load(answer)["data"])
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"Prometheus refuses a query: {_refusal(error)}; it was {arguments}") from None
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            raise PrometheusError(f"no answer of a Prometheus at {self._url}: {type(error).__name__}: {error}") from None


def _all_series(data: Any) -> list[Series]:
    return [_series(entry["metric"], entry["values"]) for entry in data["result"]]


def _one_value_each(data: Any) -> list[Series]:
    return [_series(entry["metric"], [entry["value"]]) for entry in data["result"]]


def _first_value(data: Any) -> float | None:
    return float(data["result"][0]["value"][1]) if data["result"] else None


def _interval(instance: str, data: Any) -> float:
    ours = [target for target in data["activeTargets"] if _is_ours(target["labels"], instance)]
    return max((_seconds(target["scrapeInterval"]) for target in ours), default=15.0)


def _is_ours(labels: dict[str, str], instance: str) -> bool:
    return labels.get("instance") == instance or labels.get("job") == "gem-worker"


def _series(labels: dict[str, str], samples: list[tuple[float, str]]) -> Series:
    times, values = zip(*samples, strict=True)
    return Series(labels, np.array(times, np.float64), np.array([float(value) for value in values], np.float64))


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return str(error)


def _seconds(span: str) -> float:
    """A duration as Prometheus writes it: 1m30s, 5s, 500ms."""
    parts = re.findall(r"(\d+)(ms|[smhd])", span)
    return sum(int(count) * _UNITS[unit] for count, unit in parts) or 15.0
