"""Checks of what a loop gives the optimizer and the sampler: a slip gets an error that says what to write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sized
from typing import Any

import torch
from gem_api.errors import InvalidRequest
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from gem_client.arguments import is_number
from gem_client.session import Session

# Arguments of DataLoader that say which samples a batch has, as the sampler does.
_OF_THE_SAMPLER = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


def require_parameters(params: Any, session: Any) -> None:
    """Raises InvalidRequest unless these can be the first two arguments of an Optimizer."""
    if isinstance(params, Session):
        raise InvalidRequest("the session comes second: Optimizer(model.named_parameters(), session)")
    if isinstance(params, nn.Module):
        raise InvalidRequest("give the model's parameters, not the model: Optimizer(model.named_parameters(), session)")
    if isinstance(params, Tensor) or not isinstance(params, (Iterable, torch.optim.Optimizer)):
        raise InvalidRequest(
            f"give the model's parameters or an optimizer of PyTorch, not {_kind(params)}: "
            "Optimizer(model.named_parameters(), session)"
        )
    require_session(session)


def require_session(session: Any) -> None:
    """Raises InvalidRequest unless it is a session."""
    if isinstance(session, str):
        raise InvalidRequest(f"give a session, not an address: open one with gem_client.connect({session!r})")
    if not isinstance(session, Session):
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
            "lacks: use a map-style Dataset"
        )


def require_loader_settings(settings: Collection[str]) -> None:
    """Raises InvalidRequest if one of them says which samples a batch has."""
    if colliding := [name for name in _OF_THE_SAMPLER if name in settings]:
        raise InvalidRequest(
            f"leave {', '.join(colliding)} out of loader(): the server deals the samples, in a random order, and "
            "ShardSampler(session, dataset, batch_size) takes another batch size than the run's"
        )


def is_loss(value: Any) -> bool:
    """Whether it is a number or a tensor that holds one. Reads no device."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return is_number(value)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
