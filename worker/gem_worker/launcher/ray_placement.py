"""The nodes on which Ray may run a process of workers, and what it reserves there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from gem_worker.launcher.cluster import MAX_RESTARTS, ClusterError
from gem_worker.launcher.ray_worker import CONTROL, Worker

_OWN_ARGUMENTS = ("CPU", "GPU", "memory")  # of Ray's resources, those that it takes apart from the others
_NAMESPACE = "gem"  # of the actors' names


@dataclass(frozen=True)
class Placement:
    """The request to Ray for each process of workers.

    Attributes:
        resources: What it reserves, by name; some node must have that much.
        labels: What the node's labels must be, by name: a value, "!value", "in(a,b)" or "!in(a,b)".
        spread: Whether to use as many nodes as possible, instead of Ray's own order.
    """

    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    labels: Mapping[str, str] = field(default_factory=dict)
    spread: bool = False

    @classmethod
    def parsed(cls, resources: str, labels: str = "", spread: bool = False) -> Placement:
        """From "CPU=1,GPU=0.5" and "NAME=VALUE,...". Raises ClusterError."""
        try:
            amounts = {name: float(amount) for name, amount in _pairs(resources)}
            cls(amounts).actor_class()  # Ray checks the amounts
        except (ValueError, OverflowError) as error:
            raise ClusterError(f"--resources {resources!r}: write NAME=AMOUNT,..., such as CPU=1,GPU=0.5 ({error})") from None
        try:
            placement = cls(amounts, dict(_pairs(labels)) if labels else {}, spread)
            placement.actor_class()
        except ValueError as error:
            raise ClusterError(f"ray_labels {labels!r}: write NAME=VALUE,..., such as zone=a,disk=!hdd ({error})") from None
        return placement

    def __str__(self) -> str:
        """As the settings are written."""
        return ",".join([_amounts(self.resources), *(f"{name}={value}" for name, value in self.labels.items())])

    def actor_class(self, name: str | None = None) -> Any:
        """The class of an actor with this name. If it dies, Ray restarts it with the work that it was doing, until it has died
        too often: then the launcher makes another, or gives up. Raises ValueError."""
        known = {key: self.resources.get(key) for key in _OWN_ARGUMENTS}
        return ray.remote(
            num_cpus=known["CPU"] or 0,
            num_gpus=known["GPU"] or 0,
            memory=known["memory"],
            resources={key: amount for key, amount in self.resources.items() if key not in known},
            label_selector=dict(self.labels) or None,
            scheduling_strategy="SPREAD" if self.spread else None,  # without one, a trial of Ray Tune keeps its own room
            name=name,
            namespace=_NAMESPACE if name else None,
            max_restarts=MAX_RESTARTS,
            max_task_retries=-1,
            concurrency_groups={CONTROL: 1},
        )(Worker)

    def why_waiting(self, nodes: list[dict[str, Any]]) -> str | None:
        """The reason why workers would wait for ever on these nodes of `ray.nodes`; None if one has what they need."""
        alive = [node for node in nodes if node["Alive"]]
        if any(self._fits(node["Resources"], node["Labels"]) for node in alive):
            return None
        have = "; ".join(_amounts({name: node["Resources"].get(name, 0) for name in self.resources}) for node in alive)
        return f"no node of the Ray cluster has what a worker needs: {self}; the nodes have {have}"

    def _fits(self, resources: Mapping[str, float], labels: Mapping[str, str]) -> bool:
        enough = all(resources.get(name, 0) >= amount for name, amount in self.resources.items())
        return enough and all(_matches(labels.get(name), wanted) for name, wanted in self.labels.items())


def _pairs(text: str) -> list[tuple[str, str]]:
    """The names and values of "NAME=VALUE,..."; a value may be "in(a,b)". Raises ValueError."""
    pairs = []
    for pair in re.split(r",(?![^(]*\))", text):
        name, separator, value = (part.strip() for part in pair.partition("="))
        if not separator:
            raise ValueError(f"{pair!r} has no value")
        pairs.append((name, value))
    return pairs


def _matches(label: str | None, wanted: str) -> bool:
    """Whether a node's label is as wanted; None is that of a node without it."""
    value = wanted.removeprefix("!")
    values = value.removeprefix("in(").removesuffix(")").split(",") if value.startswith("in(") else [value]
    return (label in values) != wanted.startswith("!")


def _amounts(resources: Mapping[str, float]) -> str:
    """Resources as --resources takes them."""
    return ",".join(f"{name}={amount:g}" for name, amount in resources.items())
