"""Queries a Prometheus server over its HTTP API."""

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
    """Prometheus can't be reached or rejects the query; the message says which and why."""


@dataclass(frozen=True)
class Series:
    """One time series.

    Attributes:
        labels: The labels that identify the series.
        times: float64, shape (n,): Unix seconds.
        values: float64, shape (n,); may hold NaN and infinities.
    """

    labels: dict[str, str]
    times: Column
    values: Column


class Prometheus:
    """A Prometheus server.

    Args:
        url: Its address, for example http://127.0.0.1:9090.
        timeout: Seconds to wait for each response.
    """

    def __init__(self, url: str, timeout: float = 30.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise PrometheusError(f"{url!r} is not an address of Prometheus: write http://HOST:9090")
        self._url = url.rstrip("/")
        self._timeout = timeout

    def range(self, query: str, start: float, end: float, step: float) -> list[Series]:
        """Evaluates a PromQL query every `step` seconds in [start, end], in Unix seconds. Raises PrometheusError."""
        span = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
        return self._get(_all_series, "query_range", query=query, **span)

    def value(self, query: str, at: float) -> float | None:
        """Evaluates a PromQL query at a time and returns the first number, or None. Raises PrometheusError."""
        return self._get(_first_value, "query", query=query, time=f"{at:.3f}")

    def values(self, query: str, at: float) -> list[Series]:
        """Evaluates a PromQL query at a time and returns all series, with one value each. Raises PrometheusError."""
        return self._get(_one_value_each, "query", query=query, time=f"{at:.3f}")

    def scrape_interval(self, instance: str, run: str = "") -> float:
        """Seconds between two scrapes of the server or of its run's workers, whichever is longer; 15 if unknown.

        Args:
            instance: The server's `instance` label.
            run: The label `run` of its workers; empty if they have none.

        Raises:
            PrometheusError: Prometheus does not respond.
        """
        return self._get(partial(_interval, instance, run), "targets", state="active")

    def _get(self, read: Callable[[Any], T], what: str, **arguments: str) -> T:
        """Requests an API endpoint, and returns what `read` makes of the response's data."""
        body = urllib.parse.urlencode(arguments)
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{what}?{body}", timeout=self._timeout) as response:
                return read(json.load(response)["data"])
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"Prometheus rejected a query: {_refusal(error)}; the query was {arguments}") from None
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            raise PrometheusError(
                f"no response from a Prometheus at {self._url}: {type(error).__name__}: {error}; is its address right "
                "(--prometheus)?"
            ) from None


def _all_series(data: Any) -> list[Series]:
    return [_series(entry["metric"], entry["values"]) for entry in data["result"]]


def _one_value_each(data: Any) -> list[Series]:
    return [_series(entry["metric"], [entry["value"]]) for entry in data["result"]]


def _first_value(data: Any) -> float | None:
    return float(data["result"][0]["value"][1]) if data["result"] else None


def _interval(instance: str, run: str, data: Any) -> float:
    ours = [target for target in data["activeTargets"] if _is_ours(target["labels"], instance, run)]
    return max((_seconds(target["scrapeInterval"]) for target in ours), default=15.0)


def _is_ours(labels: dict[str, str], instance: str, run: str) -> bool:
    return labels.get("instance") == instance or (labels.get("job") == "gem-worker" and labels.get("run", "") == run)


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
