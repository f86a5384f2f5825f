"""A second implementation of GEM and of the server's state for its workers, in NumPy: replays a log. With AdamW it is GEM
around an AdamW that all workers share, which looks ahead (docs/method.md).

Each operation of the equations is one operation on float32 arrays, rounded as IEEE 754 has it, so equal means equal to the
bit. Nothing here calls the server. Numbers in brackets are equations of Hermans & Louppe 2018; the snapshot is that of the
convention "after".
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from chaos.log_reader import Entry
from safetensors.numpy import load_file

F = np.float32
Floats = npt.NDArray[np.float32]
_FLOAT32, _BFLOAT16, _INT8 = 1, 2, 3  # WireDtype
_BLOCK = 256


class Contradiction(Exception):
    """A record contradicts the run before it."""


@dataclass
class Worker:
    """The state of one lease. `spare` is the older of the two snapshots of a worker that overlaps. `moment` is empty if all
    workers share an optimizer. `progress` is the run's when the worker's last commit was applied, or when it pulled;
    `reply_progress` is the run's when the worker got its θ, which may have been held."""

    name: str
    moment: Floats
    snapshot: Floats
    spare: Floats | None = None
    sequence: int = 0
    base: int = 0
    progress: float = 0.0
    reply_progress: float = 0.0
    spare_base: int = 0
    spare_progress: float = 0.0


class Checkpoint:
    """A checkpoint that the server wrote.

    Attributes:
        state: Its state.json.
        theta: float32, shape (P,); P is the number of elements that the server holds.
        shared: The moments that all workers share, float32, shape (P,), by name.
        workers: By lease.
        number: The log's last record before it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
        model, kept = load_file(path / "model.safetensors"), load_file(path / "workers.safetensors")
        self.theta = np.concatenate([model[name].ravel() for name in _in_order(model, self.state["layout"])])
        self.number = self.state["log"][1]
        self.shared = {name[1:]: array for name, array in kept.items() if name.startswith("/")}
        self.workers = {
            lease["lease_id"]: Worker(
                lease["worker"],
                kept.get(f"{lease['lease_id']}/moment", np.empty(0, F)),
                kept[f"{lease['lease_id']}/snapshot"],
                kept.get(f"{lease['lease_id']}/spare_snapshot"),
                lease["sequence"],
                lease["base_version"],
                lease["progress"],
                lease["reply_progress"],
                lease["spare_version"] or 0,
                lease["spare_progress"],
            )
            for lease in self.state["leases"]
        }


def _in_order(names: Iterable[str], layout: list[list[Any]]) -> list[str]:
    """The tensors of a model in the layout's order. A server that holds a range has some of them; of one that is cut it has the
    piece "NAME[first:last]"."""
    order = {name: (number, 0) for number, (name, _) in enumerate(layout)}
    for name in set(names) - order.keys():
        whole, _, piece = name.rpartition("[")
        order[name] = (order[whole][0], int(piece.partition(":")[0]))
    return sorted(names, key=order.__getitem__)


class Replay:
    """The run after one record of its log.

    Args:
        start: The run's first checkpoint.

    Attributes:
        theta: float32, shape (P,).
        version: Its version.
        progress: The same, each commit counted by its share of a batch.
        rounds: Rounds of the workers so far.
        workers: Live ones, by lease.
        steps: Commits applied, by worker's name.
    """

    def __init__(self, start: Checkpoint) -> None:
        settings = start.state["hyperparameters"]
        if (settings["rule"], settings["snapshot"]) != ("gem", "after") or settings["optimizer"] not in ("sgd", "adamw"):
            raise ValueError("only the rule gem with SGD, or around AdamW, and snapshots after a commit are replayed here")
        self._kappa, self._epsilon, self._pi_max = (F(settings[name]) for name in ("kappa", "epsilon", "pi_max"))
        self._settings, self.shared, self._age = settings, start.shared, 0.0
        self.theta, self.version, self.workers = start.theta.copy(), start.state["version"], start.workers
        self.progress: float = start.state["progress"]
        self.rounds: float = start.state["rounds"]
        self.steps: Counter[str] = Counter(start.state["steps_done"])

    def happens(self, entry: Entry) -> None:
        """Applies a record. Raises Contradiction."""
        fields = entry.fields
        if entry.kind == "began":
            return  # a life of the server: this run's settings never change
        if entry.kind == "opened":
            moment = np.zeros_like(self.theta if self._settings["optimizer"] == "sgd" else self.theta[:0])
            answer = np.zeros_like(self.theta) if fields["overlap"] else None
            self.workers[fields["lease"]] = Worker(fields["worker"], moment, np.zeros_like(self.theta), answer)
        elif entry.kind == "released":
            self._release(fields)
        elif fields["lease"] not in self.workers:
            raise Contradiction(f"record {entry.number} ({entry.kind}) is of a lease that is not live")
        elif entry.kind == "ended":
            del self.workers[fields["lease"]]
        elif entry.kind == "pulled":
            self._pull(self.workers[fields["lease"]])
        elif entry.kind == "committed":
            self._commit(self.workers[fields["lease"]], entry)

    def _release(self, fields: dict[str, Any]) -> None:
        """Replies that were held are made: r times as far ahead of θ as that of the last commit."""
        source = self.workers[fields["source"]].snapshot if fields["source"] else self.theta
        for lease, ratio in fields["leases"]:
            worker = self.workers[lease]
            worker.snapshot = self.theta + F(ratio) * (source - self.theta) if ratio else self.theta.copy()
            worker.base = worker.spare_base = self.version
            worker.reply_progress = self.progress

    def _pull(self, worker: Worker) -> None:
        worker.snapshot = self.theta.copy()
        worker.spare = self.theta.copy() if worker.spare is not None else None
        worker.base = worker.spare_base = self.version
        worker.progress = worker.reply_progress = worker.spare_progress = self.progress

    def _commit(self, worker: Worker, entry: Entry) -> None:
        fields = entry.fields
        if fields["version"] != self.version + 1:
            raise Contradiction(f"record {entry.number} is version {fields['version']} after version {self.version}")
        weight, passed = fields["weight"], self._passed(worker, fields["base_version"])
        held = worker.spare is None and fields["base_version"] == worker.base
        meanwhile = self.progress - worker.reply_progress if held else passed
        if worker.spare is not None:
            older = worker.spare
            worker.spare, worker.spare_base, worker.spare_progress = worker.snapshot, worker.base, worker.progress
            worker.snapshot = worker.spare if fields["base_version"] == worker.base else older
        gradient = decoded(fields["dtype"], entry.payload, self.theta.size)
        most = 4 * len(self.workers)
        count = min(max(1.0, passed + weight), most)
        if self._settings["optimizer"] == "sgd":
            self._gem(worker, gradient, weight)
        else:
            self._gem_around_adamw(worker, gradient, weight, count, min(meanwhile, most - 1))
        self.version += 1
        self.progress += weight
        self.rounds += weight / count
        worker.sequence, worker.base = fields["sequence"], self.version
        worker.progress = worker.reply_progress = self.progress
        self.steps[worker.name] += 1

    def _passed(self, worker: Worker, base: int) -> float:
        """What was committed since the worker's last commit, or since it pulled, each commit counted by its share."""
        if base == worker.base:
            return self.progress - worker.progress
        if worker.spare is not None and base == worker.spare_base:
            return self.progress - worker.spare_progress
        return float(self.version - base)

    def _gem(self, worker: Worker, gradient: Floats, weight: float) -> None:
        with np.errstate(all="ignore"):
            delta = -F(self._settings["learning_rate"] * weight) * gradient
            worker.moment = F(self._settings["momentum"] ** weight) * worker.moment + delta  # (24)
            wanted = self._kappa * abs(worker.moment) - abs(self.theta - worker.snapshot)  # (27)
            pi = wanted / (abs(delta) + self._epsilon)  # (19)
            pi = np.where(pi > 0, np.minimum(pi, self._pi_max), F(0))
            self.theta = self.theta + pi * delta
        worker.snapshot = self.theta.copy()

    def _gem_around_adamw(self, worker: Worker, gradient: Floats, weight: float, count: float, delay: float) -> None:
        """The equations of docs/method.md: `count` is n, `delay` what was committed while the worker computed."""
        part = weight / ((count + 1) / 2)
        self._age += part
        beta1, beta2 = 0.9**part, 0.999**part
        shared = self.shared
        shared["first_moment"] = F(beta1) * shared["first_moment"] + F(1 - beta1) * gradient
        shared["second_moment"] = F(beta2) * shared["second_moment"] + F((1 - beta2) * weight) * gradient * gradient
        mean = shared["first_moment"] * F(1 / (1 - 0.9**self._age))
        square = shared["second_moment"] * F(1 / (1 - 0.999**self._age)) + F(count - 1) * (mean * mean)
        step = mean / (np.sqrt(square) + F(1e-8)) + F(self._settings["weight_decay"]) * self.theta
        delta = np.asarray(-F(self._settings["learning_rate"]) * step, F)
        options = dict(option.split("=") for option in self._settings["rule_options"].split())
        growth, full = float(options.get("growth", 0)), self._settings["kappa"] * math.sqrt(count)
        kappa = F(1 + (full - 1) * self._age / (self._age + growth) if growth else full)
        ahead = F(1.5 * delay * self._age / (self._age + 1))
        with np.errstate(all="ignore"):
            pi = (kappa * abs(delta) - abs(self.theta - worker.snapshot)) / (abs(delta) + self._epsilon)
        move = np.where(pi > 0, np.minimum(pi, self._pi_max), F(0)) * delta
        self.theta = self.theta + F(weight) * move
        worker.snapshot = self.theta + ahead * move


def decoded(dtype: int, payload: memoryview, size: int) -> Floats:
    """A gradient as float32, shape (P,), from the bytes of its wire format (`v1/tensors.proto`)."""
    if dtype == _FLOAT32:
        values = np.frombuffer(payload, "<f4")
    elif dtype == _BFLOAT16:
        values = (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(F)
    elif dtype == _INT8:
        blocks = [payload[at : at + 4 + _BLOCK] for at in range(0, len(payload), 4 + _BLOCK)]
        values = np.concatenate(
            [np.frombuffer(block[:4], "<f4")[0] * np.frombuffer(block[4:], "i1").astype(F) for block in blocks]
        )
    else:
        raise Contradiction(f"there is no wire dtype {dtype}")
    if values.shape != (size,):
        raise Contradiction(f"a gradient of {values.size} elements for a model of {size}")
    return values


def as_bfloat16(values: Floats) -> Floats:
    """The values that arrive if these are sent as bfloat16: finite, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) & np.uint32(0xFFFF0000)).view(F)
