"""The parameters of a PyTorch model: which are trained, and under which names."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from gem_api.errors import InvalidRequest
from torch import Tensor
from torch.nn.parameter import is_lazy

log = logging.getLogger("gem_client")
SAMPLED_VALUES = 1024
Parameters: TypeAlias = Iterable[Tensor] | Iterable[tuple[str, Tensor]]


def trained_and_frozen(
    params: Parameters, names: Mapping[int, str] = MappingProxyType({})
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Maps names to parameters, those to train and the frozen ones; `names` has other names, by the parameter's id. A tied one
    appears once."""
    trained: dict[str, Tensor] = {}
    frozen: dict[str, Tensor] = {}
    seen: set[int] = set()
    for position, entry in enumerate(params):
        if isinstance(entry, dict):
            raise InvalidRequest(
                "parameter groups belong to an optimizer: give one, such as Optimizer(torch.optim.AdamW(groups), session)"
            )
        given, parameter = entry if isinstance(entry, tuple) and len(entry) == 2 else (str(position), entry)
        if not isinstance(parameter, Tensor):
            raise InvalidRequest(f"a parameter is a tensor, not {parameter!r}: give model.named_parameters()")
        name = plain_name(names.get(id(parameter), given))
        if not parameter.requires_grad:
            frozen[name] = parameter
        elif id(parameter) not in seen:
            seen.add(id(parameter))
            if names and id(parameter) not in names and given == str(position):
                raise InvalidRequest(
                    f"names= lacks the parameter at position {position}, of shape {tuple(parameter.shape)}: give the "
                    "named_parameters() of everything that is trained"
                )
            if name in trained:
                raise InvalidRequest(
                    f"two parameters have the name {name!r}: add a prefix for each module, for example "
                    "[*encoder.named_parameters('encoder'), *decoder.named_parameters('decoder')]"
                )
            _require_trainable(name, parameter)
            trained[name] = parameter
    if not trained:
        raise InvalidRequest(
            "give at least one parameter to train: each of these is frozen, or their generator was read before (then call "
            "model.named_parameters() again)"
        )
    return trained, frozen


def _require_trainable(name: str, parameter: Tensor) -> None:
    if not parameter.is_floating_point():
        why = f"has dtype {parameter.dtype}: only real floating-point parameters can be trained"
    elif is_lazy(parameter):
        why = "has no shape yet: call the model with one batch before the Optimizer is made"
    elif parameter.is_meta:
        why = "is on the meta device, where it has no values: move it to another one, and initialise it"
    elif not parameter.is_leaf:
        why = (
            "is computed from other tensors, so it can't be trained itself: give those, or a copy as "
            "nn.Parameter(tensor.detach().clone())"
        )
    else:
        return
    raise InvalidRequest(f"parameter {name!r} {why}")


def fingerprint(frozen: Mapping[str, Tensor]) -> bytes:
    """SHA-256 over the name, the shape and up to 1,024 values of each parameter, spread evenly over it; empty if there is none.

    Floating-point values are rounded to bfloat16, so that workers may keep the same weights in different formats."""
    if not frozen:
        return b""
    digest = hashlib.sha256()
    for name, parameter in frozen.items():
        digest.update(f"{name}\0{tuple(parameter.shape)}\n".encode())
        if not parameter.is_meta:
            values = parameter.detach().reshape(-1)
            values = values[:: max(1, len(values) // SAMPLED_VALUES)]
            values = values.to(torch.bfloat16) if values.is_floating_point() else values
            digest.update(values.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def plain_name(name: str) -> str:
    """The name that a parameter has without `torch.compile`, which wraps a model, or a part of it, in a module `_orig_mod`."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def require_apart(trained: Mapping[str, Tensor]) -> None:
    """Raises InvalidRequest if two parameters share memory: θ has both, and the one that is loaded last would undo the other's
    step."""
    spans = sorted((*_span(parameter), name) for name, parameter in trained.items() if parameter.numel())
    for (memory, _, end, one), (others, start, _, other) in pairwise(spans):
        if memory == others and start < end:
            raise InvalidRequest(
                f"the parameters {one!r} and {other!r} share memory, so one of their gradients would be lost: tie them by "
                "assigning the Parameter itself, not its .data"
            )


def _span(parameter: Tensor) -> tuple[int, int, int]:
    """The memory that a parameter is in, and the addresses of its bytes there, from and to. Of one with gaps, in which another
    may lie, only the first element. On other devices than these, `data_ptr` is no address (on MPS that of an object)."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    elements = extent if extent == parameter.numel() else 1
    if parameter.device.type in ("cpu", "cuda", "xpu"):
        memory, start = 0, parameter.data_ptr()
    else:
        memory, start = parameter.untyped_storage()._cdata, int(parameter.storage_offset()) * parameter.element_size()
    return memory, start, start + elements * parameter.element_size()


def dense(gradient: Tensor) -> Tensor:
    """The gradient as a dense tensor."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure, which computes gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def first_values(trained: Mapping[str, Tensor]) -> dict[str, Any]:
    """The parameters' values as float32 arrays on the host. Raises InvalidRequest if one can't be read, or written in place,
    as loading θ does. Logs that the server rounds double precision."""
    values = {}
    for name, parameter in trained.items():
        try:
            with torch.no_grad():
                parameter.copy_(parameter.clone())
                values[name] = parameter.detach().to("cpu", torch.float32).numpy()
        except (RuntimeError, TypeError) as error:
            raise InvalidRequest(
                f"parameter {name!r}, a {type(parameter).__name__}, can't be read and written in place as one float32 array "
                f"({str(error).splitlines()[0]}): make it an nn.Parameter with all its values in one dense tensor"
            ) from error
    if double := [name for name, parameter in trained.items() if parameter.dtype == torch.float64]:
        log.warning("%d parameters are float64, such as %s: the run's θ and its commits round them to float32",
                    len(double), double[0])  # fmt: skip
    return values


def gather(parameters: Iterable[Tensor], into: Sequence[Tensor], decays: Sequence[float]) -> None:
    """Writes the gradient of each parameter, plus weight_decay·parameter, into a float32 tensor of its shape; zeros if it has
    none."""
    gradients, filled, decayed = [], [], dict[float, list[tuple[Tensor, Tensor]]]()
    for parameter, gradient, decay in zip(parameters, into, decays, strict=True):
        if parameter.grad is None:
            gradient.zero_()
            continue
        gradients.append(dense(parameter.grad))
        filled.append(gradient)
        if decay:
            decayed.setdefault(decay, []).append((gradient, parameter))
    if filled:
        torch._foreach_copy_(filled, gradients)
    for decay, pairs in decayed.items():
        torch._foreach_add_([gradient for gradient, _ in pairs], [parameter for _, parameter in pairs], alpha=decay)
