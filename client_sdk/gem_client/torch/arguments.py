"""Checks of what a loop gives the optimizer and the sampler: a slip gets an error that says what to write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from gem_api.errors import InvalidRequest
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from gem_client.arguments import is_number
from gem_client.session import Session
from gem_client.torch.rank_session import RankSession

_OPTIMIZER_METHODS = ("step", "zero_grad", "state_dict")
# Arguments of DataLoader that say which samples a batch has, as the sampler does.
_SAMPLER_ARGUMENTS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")

_OWN_LOADER = "use a DataLoader of your own without ShardSampler, and start the server with --until-stopped"


def require_parameters(params: Any, session: Any) -> None:
    """Raises InvalidRequest unless these can be the first two arguments of an Optimizer."""
    if isinstance(params, Session):
        raise InvalidRequest("the session comes second: Optimizer(model.named_parameters(), session)")
    if isinstance(params, nn.Module):
        raise InvalidRequest("give the model's parameters, not the model: Optimizer(model.named_parameters(), session)")
    if isinstance(params, type) and hasattr(params, "step"):
        raise InvalidRequest(
            f"give an optimizer, not its class: Optimizer({params.__name__}(model.parameters(), ...), session)"
        )
    if is_optimizer(params):
        _require_usable(params)
    elif isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise InvalidRequest(
            f"give the model's parameters or an optimizer of PyTorch, not {_kind(params)}: "
            "Optimizer(model.named_parameters(), session)"
        )
    require_session(session)


def is_optimizer(params: Any) -> bool:
    """Whether it is an optimizer, of PyTorch or with an interface like theirs; otherwise it is parameters."""
    return isinstance(params, torch.optim.Optimizer) or hasattr(params, "param_groups")


def parts_of(optimizer: Any) -> Iterator[Any]:
    """An optimizer, and those that it wraps."""
    found, seen = [optimizer], set()
    while found:
        part = found.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            for value in getattr(part, "__dict__", {}).values():
                held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
                found += [each for each in held if not isinstance(each, (type, Tensor)) and is_optimizer(each)]


def _require_usable(optimizer: Any) -> None:
    """Raises InvalidRequest unless a worker can make the optimizer's steps, and its parameters are the model that it trains."""
    if any(base.__name__ == "AcceleratedOptimizer" for base in type(optimizer).__mro__):
        raise InvalidRequest(
            "accelerate has wrapped this optimizer: give Optimizer the one from before, and accelerator.prepare the Optimizer, "
            "as in accelerator.prepare(Optimizer(adamw, session))"
        )
    if missing := [name for name in _OPTIMIZER_METHODS if not callable(getattr(optimizer, name, None))]:
        raise InvalidRequest(
            f"{_kind(optimizer)} has no {', '.join(missing)}: an optimizer needs param_groups, {', '.join(_OPTIMIZER_METHODS)}"
            ". Give the optimizer inside it"
        )
    listed = _listed(optimizer)
    for part in parts_of(optimizer):
        if callable(getattr(part, "train", None)) and callable(getattr(part, "eval", None)):
            raise InvalidRequest(
                f"{_kind(part)} evaluates other parameters than it trains (methods train and eval): an average in "
                "each worker's own state, which the run's θ would not be. Use an optimizer without, such as torch.optim.AdamW"
            )
        if not _listed(part) <= listed:
            raise InvalidRequest(
                f"{_kind(optimizer)} steps parameters that its param_groups do not list, such as copies of the model's: give "
                f"the optimizer inside it, {_kind(part)}, on the model's own parameters"
            )


def _listed(optimizer: Any) -> set[int]:
    """The ids of the parameters in all groups."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list) or any(not isinstance(_params(group), (list, tuple)) for group in groups):
        raise InvalidRequest(
            f"the param_groups of {_kind(optimizer)} are not a list of groups, each with a list of params: give an "
            "optimizer as PyTorch's"
        )
    return {id(parameter) for group in groups for parameter in _params(group)}


def _params(group: Any) -> Any:
    return group.get("params") if isinstance(group, dict) else None


def require_own_parameters(optimizer: Any) -> None:
    """Raises InvalidRequest for an optimizer that is not one of PyTorch's and has no names: it may step copies of the model's
    parameters, as optimizers for fp16 do, and names show whose they are. So it does if a group's names do not fit."""
    if not hasattr(optimizer, "_optimizer_step_pre_hooks") and any(
        "param_names" not in each for each in optimizer.param_groups
    ):
        raise InvalidRequest(
            f"{_kind(optimizer)} is not one of PyTorch's own optimizers: add names=model.named_parameters(), which "
            "shows that it steps the model's parameters, not copies"
        )
    for group in optimizer.param_groups:
        named, count = len(group.get("param_names", group["params"])), len(group["params"])
        if named != count:
            raise InvalidRequest(
                f"a parameter group has {count} parameters, but {named} names, so whose they are is not known: add "
                "names=model.named_parameters()"
            )


def require_names(names: Any) -> dict[int, str]:
    """The names by the parameter's id. Raises InvalidRequest unless they are `named_parameters()`, and not read before."""
    advice = "give names=model.named_parameters()"
    if isinstance(names, nn.Module) or not isinstance(names, Iterable):
        raise InvalidRequest(f"names= is {_kind(names)}: {advice}")
    pairs = list(names.items() if isinstance(names, Mapping) else names)
    if not pairs and names != ():
        raise InvalidRequest(f"names= is empty, as a generator is that was read before: {advice}, called again")
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)):
            raise InvalidRequest(f"names= has pairs of a name and a parameter, not {_kind(pair)}: {advice}")
    return {id(parameter): name for name, parameter in pairs}


def require_projection(project: Any) -> None:
    """Raises InvalidRequest unless it can be called without arguments."""
    if project is None:
        return
    if not callable(project):
        raise InvalidRequest(f"project is a function without arguments that changes the parameters, not {project!r}")
    with suppress(ValueError):  # a function of C may have no signature
        try:
            signature(project).bind()
        except TypeError as error:
            raise InvalidRequest(f"project is called without arguments, but this function has a {error}") from None


def require_session(session: Any) -> None:
    """Raises InvalidRequest unless it is a session."""
    if isinstance(session, str):
        raise InvalidRequest(f"give a session, not an address: open one with gem_client.connect({session!r})")
    if not isinstance(session, Session | RankSession):
        raise InvalidRequest(f"give the session that gem_client.connect returns, not {_kind(session)}")


def require_step(closure: Any, loss: Any) -> None:
    """Raises InvalidRequest unless these can be the arguments of `Optimizer.step`."""
    if closure is not None and not callable(closure):
        raise InvalidRequest(
            f"give the loss by its name, step(loss=loss): the first argument is a closure, not {_kind(closure)}"
        )
    if loss is not None and not is_loss(loss):
        raise InvalidRequest(f"loss is a number or a one-element tensor, not {loss!r}")


def require_dataset(dataset: Any) -> None:
    """Raises InvalidRequest unless samples of it can be dealt by their index."""
    if isinstance(dataset, DataLoader):
        raise InvalidRequest("give the data set, not a DataLoader: ShardSampler(session, loader.dataset).loader() makes one")
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise InvalidRequest(
            f"the server deals samples by their index, so the data set needs __len__ and __getitem__, which {_kind(dataset)} "
            f"lacks: use a map-style Dataset, or {_OWN_LOADER}"
        )


def require_loader_settings(settings: Collection[str]) -> None:
    """Raises InvalidRequest if one of them says which samples a batch has."""
    if colliding := [name for name in _SAMPLER_ARGUMENTS if name in settings]:
        raise InvalidRequest(
            f"leave {', '.join(colliding)} out of loader(): the server deals the samples, in a random order, and "
            "ShardSampler(session, dataset, batch_size) takes another batch size than the run's. To choose samples yourself, "
            f"{_OWN_LOADER}"
        )


def is_loss(value: Any) -> bool:
    """Whether it is a number or a tensor that holds one. Reads no device."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return is_number(value)


def _kind(value: Any) -> str:
    """The name of its class, with an article."""
    name = type(value).__name__
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"
