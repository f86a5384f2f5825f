"""The arguments of `Optimizer`: parameters alone, or an optimizer of PyTorch with its settings."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from gem_api.errors import InvalidRequest
from gem_api.hyperparameters import Hyperparameters, flag
from gem_api.layout import PLAIN, Group
from gem_api.optimizer_choice import OptimizerChoice
from gem_api.schedule import Schedule
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from gem_client.torch.arguments import is_optimizer, require_names, require_own_parameters
from gem_client.torch.parameters import Parameters, require_apart, trained_and_frozen
from gem_client.torch.schedules import EACH_ITS_OWN, name_of_rate, schedule_of

log = logging.getLogger("gem_client")
On = Literal["worker", "server"]

STATE_IS_SERVERS = (
    'the state that the optimizer has, such as its moments, is not used: with on="server" the server has a state of its own, '
    "which its checkpoints keep"
)
# What the server can keep for all workers, by the name of PyTorch's class: its name there, and the options that it takes.
_ON_SERVER = {
    "SGD": ("sgd", ()),
    "Adam": ("adam", ("beta1", "beta2", "epsilon")),
    "AdamW": ("adamw", ("beta1", "beta2", "epsilon")),
    "Lion": ("lion", ("beta1", "beta2")),
}
# Settings that the server has no equivalent for, and the value at which they change nothing.
_WITHOUT_EQUIVALENT = {"dampening": 0, "nesterov": False, "amsgrad": False, "maximize": False}


@dataclass(frozen=True)
class OptimizerSpec:
    """The parameters to train, and how.

    Attributes:
        trained: The parameters that are trained, by name.
        frozen: Those that are not trained, by name.
        inner: The optimizer of PyTorch that was given; None: parameters alone.
        choice: Its description for the server; None: parameters alone.
        groups: The tensors whose learning rate or weight decay differs from the others', by name.
        factors: The learning rate of each parameter group, as a share of the run's.
        not_offered: Why the server can't make its steps instead, if that is a scheduler that the worker has kept; else empty.
    """

    trained: dict[str, Tensor]
    frozen: dict[str, Tensor]
    inner: torch.optim.Optimizer | None = None
    choice: OptimizerChoice | None = None
    groups: Mapping[str, Group] = field(default_factory=dict)
    factors: tuple[float, ...] = (1.0,)
    not_offered: str = ""

    @property
    def steps_itself(self) -> bool:
        """Whether the worker makes the optimizer's steps."""
        return self.choice is not None and self.choice.optimizer == "worker"


def ways_to_train(
    params: Parameters | torch.optim.Optimizer,
    on: On | None,
    names: Iterable[tuple[str, Tensor]] = (),
    schedule: LRScheduler | None = None,
    overlap: bool = False,
) -> list[OptimizerSpec]:
    """Reads the arguments of `Optimizer`, and returns the ways to train so, the best one first. A run takes one of them.

    With `on` None and an optimizer of PyTorch, that is first the server, if it would make the same steps, then the worker.

    Raises InvalidRequest if there is no way."""
    given = require_names(names)
    if not is_optimizer(params):
        return [describe_optimizer(params, on or "worker", given, schedule)]
    if overlap and on == "worker":
        raise InvalidRequest('overlap is not available if the worker makes its own steps: leave it out, or use on="server"')
    if overlap or schedule is not None:
        on = on or "server"
    if on is not None:
        return [describe_optimizer(params, on, given, schedule)]
    own = describe_optimizer(params, "worker", given)
    assert own.inner is not None
    try:
        _require_same_steps(own.inner)
        return [describe_optimizer(params, "server", given), own]
    except InvalidRequest as error:
        log.info("this worker makes the steps of its %s itself: %s", type(own.inner).__name__, error)
        return [replace(own, not_offered=str(error) if _has_scheduler(own.inner) else "")]


def _has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler was made on it."""
    return any("initial_lr" in group for group in optimizer.param_groups)


def _require_same_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raises InvalidRequest if the server may know an optimizer of this name, but step otherwise than this one does."""
    if type(optimizer) is torch.optim.SGD:
        raise InvalidRequest("the server's rule adds a momentum to SGD")
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise InvalidRequest("it is neither PyTorch's Adam nor its AdamW")
    if any(optimizer.state.values()):
        raise InvalidRequest("it has made steps already, and the server would begin without its moments")


def describe_optimizer(
    params: Parameters | torch.optim.Optimizer,
    on: On,
    given: Mapping[int, str] = MappingProxyType({}),
    schedule: LRScheduler | None = None,
) -> OptimizerSpec:
    """One way to train: as `on` says. `given` has the names of the parameters, by their id. Raises InvalidRequest if it can't
    be trained so."""
    if on not in ("worker", "server"):
        raise InvalidRequest(f'on is "worker" or "server", not {on!r}')
    given_params: Any = params
    optimizer = given_params if is_optimizer(params) else None
    if schedule is not None and (on == "worker" or optimizer is None):
        raise InvalidRequest(
            "schedule= hands a scheduler to the server, with an optimizer: a worker's own optimizer takes its "
            "scheduler as in PyTorch, with scheduler.step() in the loop"
        )
    if optimizer is not None:
        entries: list[Any] = _named(optimizer)
    else:
        entries = list(given_params.items() if isinstance(params, Mapping) else given_params)
    if given and not any(id(entry[1] if isinstance(entry, tuple) else entry) in given for entry in entries):
        raise InvalidRequest("names= has none of the parameters to train: give the named_parameters() of the same model")
    if optimizer is not None and not given:
        require_own_parameters(optimizer)
    trained, frozen = trained_and_frozen(entries, given)
    if optimizer is None:
        require_apart(trained)
        return OptimizerSpec(trained, frozen)
    if isinstance(optimizer, torch.optim.LBFGS):
        log.warning("LBFGS takes the others' moves for the effect of its own steps, so that several workers diverge: run one")
    if on == "worker":
        return OptimizerSpec(trained, frozen, optimizer, OptimizerChoice("worker"), factors=())
    require_apart(trained)
    if schedule is None and _has_scheduler(optimizer):
        raise InvalidRequest(
            "a scheduler was made on this optimizer: to give it to the server, hand it over, as "
            "Optimizer(..., schedule=scheduler)"
        )
    handed = None if schedule is None else schedule_of(schedule, optimizer)
    rates = [_number(group, name_of_rate(schedule)) for group in optimizer.param_groups]
    rate, decay = max(rates), max(_number(group, "weight_decay") for group in optimizer.param_groups)
    if not rate:
        raise InvalidRequest("the learning rate of every parameter group is 0: nothing would be trained")
    factors = tuple(own / rate for own in rates)
    choice = replace(_choice(optimizer, rate, decay), schedule=handed)
    if any(optimizer.state.values()):
        log.warning(STATE_IS_SERVERS)
    return OptimizerSpec(trained, frozen, optimizer, choice, _groups(optimizer, trained, factors, decay), factors)


def _named(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """The parameters of all groups, with the optimizer's names; else, or if a group has more or fewer names than parameters,
    their position is the name."""
    pairs: list[tuple[str, Tensor]] = []
    for group in optimizer.param_groups:
        positions = [str(len(pairs) + position) for position in range(len(group["params"]))]
        names = group.get("param_names", positions)
        pairs += zip(names if len(names) == len(positions) else positions, group["params"], strict=True)
    return pairs


def _choice(optimizer: torch.optim.Optimizer, rate: float, decay: float) -> OptimizerChoice:
    kind = type(optimizer).__name__
    if kind not in _ON_SERVER:
        raise InvalidRequest(f"the server has no {kind}: use Adam, AdamW, Lion, or SGD without momentum; or {EACH_ITS_OWN}")
    decoupled = any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
    name, known = _ON_SERVER["AdamW" if decoupled else kind]
    settings = [_options(group) for group in optimizer.param_groups]
    if any(each != settings[0] for each in settings):
        raise InvalidRequest('on="server", parameter groups may differ in their learning rate and weight decay alone')
    options = " ".join(f"{option}={settings[0][option]!r}" for option in known)
    return OptimizerChoice(name, options, rate, decay)


def _options(group: Mapping[str, Any]) -> dict[str, float]:
    """The betas and the epsilon of a group. Raises InvalidRequest for a setting that the server has no equivalent for."""
    if momentum := group.get("momentum", 0):
        raise InvalidRequest(
            f"the server has no momentum={momentum} for all workers, because it adds up their stale steps, and training "
            "diverges: give the parameters alone, and the server's default rule (gem) keeps a momentum for each worker "
            f"(--rule gem:momentum=…); or {EACH_ITS_OWN}"
        )
    for name, neutral in _WITHOUT_EQUIVALENT.items():
        if group.get(name, neutral) != neutral:
            raise InvalidRequest(f"the server has no {name}={group[name]}: leave it out, or {EACH_ITS_OWN}")
    beta1, beta2 = map(float, group.get("betas", (0.0, 0.0)))
    return {"beta1": beta1, "beta2": beta2, "epsilon": float(group.get("eps", 0.0))}


def _groups(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, Tensor], factors: Iterable[float], decay: float
) -> dict[str, Group]:
    """The tensors that differ from the others. Raises InvalidRequest for a third weight decay: a tensor has the run's or
    none."""
    groups: dict[int, Group] = {}
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        own = _number(group, "weight_decay")
        if own not in (0.0, decay):
            raise InvalidRequest(f'on="server", a parameter group has the weight decay {decay} or 0, not {own}')
        kind = Group(factor, own == decay)
        groups |= {id(parameter): kind for parameter in group["params"]}
    named = {name: groups[id(parameter)] for name, parameter in trained.items()}
    return {name: group for name, group in named.items() if group != PLAIN}


def _number(group: Mapping[str, Any], name: str) -> float:
    """A setting of a group; PyTorch allows learning rates that are tensors."""
    return float(group.get(name, 0.0))


def log_differences(choice: OptimizerChoice, settings: Hyperparameters) -> None:
    """Logs the settings in which the server differs from the optimizer that the worker brought."""
    for name in ("learning_rate", "weight_decay"):
        brought, own = getattr(choice, name, None), getattr(settings, name)
        if brought is not None and brought != own:
            log.warning("the server was started with %s %s, which is used instead of %s", flag(name), own, brought)
    if choice.schedule is not None:
        schedule = Schedule.of(settings)
        log.info("the server's schedule counts the commits of all workers: %s", schedule)
        if schedule != choice.schedule:
            log.warning("the server was started with the schedule %s, which is used instead of %s", schedule, choice.schedule)
