"""Section g: a transformer of 10 million parameters is trained to the end, in simulated time: this server with eight equal and
eight unequal workers, beside DDP in as long, and one worker that computes as many gradients."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn

from benchmarks.finals import plan
from benchmarks.finals.clock import SIZES
from benchmarks.finals.runs import Run, train
from benchmarks.gpu.checks import Checks, Found
from benchmarks.gpu.on_device import DeviceRounds, DeviceRule, DeviceTrainee
from benchmarks.gpu.timing import milliseconds
from benchmarks.versus.models import Batch, Transformer
from examples.character_transformer.model import CharacterTransformer

_SEED, _WORKERS = 0, 8
_METHODS = {  # method, settings (the server's are its defaults), kinds of clusters, rates; mixed: four are three times slower
    "one worker, as many gradients": ("rounds", "team=alone", ("equal",), (0.001,)),
    "gem": ("ours", plan.BOTH, ("equal", "mixed"), (0.001, 0.002)),
    "DDP": ("rounds", "", ("equal", "mixed"), (0.001, 0.002, 0.004)),
}
_GRADIENTS = 1 + 2 * 2 + 1.5 * 3  # of each worker in a round, in all trainings together: DDP on mixed has half
_MAX_ROUNDS, _ROUNDS_QUICK = 400, 6  # more would show all of the text more than three times
_SHARE = 0.85  # of the time left, which the trainings are planned for


def run(checks: Checks) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    prepared: list[tuple[DeviceTrainee, int]] = []
    checks.check("g.setting", _prepare, checks, prepared)
    for trainee, rounds in prepared:
        for name, (method, settings, profiles, rates) in _METHODS.items():
            for profile, rate in product(profiles, rates):
                made = Run("", profile, _WORKERS, _SEED, rounds, method, f"rate={rate} {settings}")
                checks.check(f"g.{name}, {profile}, rate {rate:g}", _train, made, trainee)


def _train(made: Run, trainee: DeviceTrainee) -> Found:
    """The held-out loss at the end."""
    found = train(made, trainee, DeviceRule, DeviceRounds)
    return {"ok": found.loss is not None, "held_out_loss": found.loss, "gradients": found.gradients, "units": found.time}


def _prepare(checks: Checks, into: list[tuple[DeviceTrainee, int]]) -> Found:
    """Makes the model, and plans rounds for as long as time allows."""
    trainee, rule = DeviceTrainee(_Text(checks), _SEED, checks.device), DeviceRule(0.001)
    begin, vectors, numbers = trainee.theta, rule.begin(trainee.theta), (0.5,) * 13

    def commit() -> None:
        rule.commit(vectors[0], begin, trainee.gradient(begin, 0, 0, SIZES), *vectors[1:], *numbers)

    taken = milliseconds(commit, 5, 3)
    fitting = int(_SHARE * 1e3 * checks.left() / (_WORKERS * _GRADIENTS * taken))
    rounds = min(_ROUNDS_QUICK if checks.quick else _MAX_ROUNDS, fitting)
    if rounds < 1:
        return {"ok": False, "error": f"no time for a training: a gradient takes {taken:.0f} ms"}
    into.append((trainee, rounds))
    return {"parameters": len(begin), "gradient_ms": taken, "rounds": rounds, "initial_loss": trainee.score(begin)}


class _Text(Transformer):
    """The study's problem on a device, with a larger model."""

    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self._checks, self.batch_size = checks, 16 if checks.quick else 128
        self._training, self._held_out = (
            (inputs.to(checks.device), targets.to(checks.device)) for inputs, targets in (self._training, self._held_out)
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(self._checks.device, torch.bfloat16, enabled=self._checks.on_gpu):
            return super().loss(model, batch)

    def _make(self) -> nn.Module:
        return CharacterTransformer(32, 1, 2) if self._checks.quick else CharacterTransformer(320, 8, 5)
