"""The tensor layout: the position of each parameter in the packed float32 buffer of the central variable, or of a part."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gem_api.errors import InvalidRequest, LayoutMismatch
from gem_api.ranges import Range
from gem_api.v1 import tensors_pb2 as pb

Vector = npt.NDArray[np.float32]
MAX_TENSORS = 100_000
MAX_PARAMETERS = 1 << 40
MAX_NAME = 512
MAX_AXES = 64  # as many as NumPy has
_OTHER_MODEL = "start the worker with the run's model; another model needs a gem-server of its own, on another port (--listen)"
NAME_TENSORS = "give all workers names: model.named_parameters(), or names=model.named_parameters() with an optimizer"
MAX_RATE_FACTOR = 1.0  # the run has the largest rate of all tensors: rules bound their steps by it


class Group(NamedTuple):
    """The training of a tensor, beside the run's hyper-parameters.

    Attributes:
        rate_factor: Its learning rate, as a share of the run's, from 0 to 1.
        decays: Whether the run's weight decay applies to it.
    """

    rate_factor: float = 1.0
    decays: bool = True


PLAIN = Group()


@dataclass(frozen=True)
class Tensor:
    """One named tensor.

    Attributes:
        name: Unique in the layout.
        shape: In C order.
        group: Its training.
    """

    name: str
    shape: tuple[int, ...]
    group: Group = PLAIN

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nameless(self) -> bool:
        """Whether the name is only a position: the SDK names a worker's tensors so if they have none."""
        return self.name.isdecimal()

    def require_possible(self) -> None:
        """Raises InvalidRequest if the shape is negative or too large."""
        possible = len(self.shape) <= MAX_AXES and all(0 <= extent <= MAX_PARAMETERS for extent in self.shape)
        if not possible or math.prod(extent for extent in self.shape if extent) > MAX_PARAMETERS:
            raise InvalidRequest(
                f"tensor {self.name!r} has shape {str(self.shape)[:100]}: "
                f"at most {MAX_AXES} axes and {MAX_PARAMETERS} parameters are allowed"
            )
        if not 0 <= (factor := self.group.rate_factor) <= MAX_RATE_FACTOR:
            raise InvalidRequest(
                f"tensor {self.name!r} has learning-rate factor {factor}: it must lie in [0, {MAX_RATE_FACTOR:g}]"
            )


@dataclass(frozen=True)
class Layout:
    """The tensors of a model, in their order in the packed buffer, without gaps.

    Attributes:
        tensors: All tensors of the model.
        bounds: The elements [begin, end) of the model's packed buffer that a buffer of this layout holds; None for all of them.
    """

    tensors: tuple[Tensor, ...]
    bounds: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.bounds is None:  # else it is part of a layout that was checked
            self._require_valid_tensors()
        if not 0 <= self.begin < self.end <= self.parameters:
            raise InvalidRequest(
                f"the layout's range is [{self.begin}, {self.end}), which is no part of the model's [0, {self.parameters})"
            )
        if self.bounds is not None:  # a piece "w[4096:9000]" of tensor "w" beside a tensor of that name
            _require_distinct([piece.name for piece in self.pieces])

    def _require_valid_tensors(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if not names:
            raise InvalidRequest("the layout has no tensors: give at least one parameter to train")
        _require_few(len(names))
        for name in names:
            if not 0 < len(name) <= MAX_NAME or not name.isprintable():
                raise InvalidRequest(f"tensor name {name[:MAX_NAME]!r} must have 1 to {MAX_NAME} printable characters")
            if name == "__metadata__":
                raise InvalidRequest("a tensor can't be named '__metadata__': safetensors files reserve that name")
        for tensor in self.tensors:
            tensor.require_possible()
        _require_distinct(names)
        if not 0 < self.parameters <= MAX_PARAMETERS:
            raise InvalidRequest(f"the layout holds {self.parameters} parameters; 1 to {MAX_PARAMETERS} are allowed")

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Sequence[int]] | Iterable[tuple[str, Sequence[int]]],
        groups: Mapping[str, Group] = MappingProxyType({}),
    ) -> Layout:
        """A layout from names and shapes, in the order given. `groups` has the tensors that differ from `PLAIN`, by name.

        Raises:
            InvalidRequest: The layout is invalid, or `groups` names a tensor that is not in it.
        """
        pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
        if unknown := sorted(groups.keys() - {name for name, _ in pairs}):
            raise InvalidRequest(f"parameter groups name tensors that the layout does not have: {', '.join(unknown[:5])}")
        return cls(tuple(Tensor(name, tuple(map(int, shape)), groups.get(name, PLAIN)) for name, shape in pairs))

    @classmethod
    def from_message(cls, message: pb.TensorLayout) -> Layout:
        """Converts a message. Raises InvalidRequest if it is invalid."""
        _require_few(len(message.tensors))  # before each becomes a Python object
        whole, bounds = cls(tuple(map(_from_spec, message.tensors))), (message.range_begin, message.range_end)
        return whole if bounds == (0, whole.parameters) else cls(whole.tensors, bounds)

    def to_message(self) -> pb.TensorLayout:
        """The wire form."""
        message = pb.TensorLayout()
        message.CopyFrom(self._message)
        return message

    @cached_property
    def _message(self) -> pb.TensorLayout:
        specs = [_to_spec(tensor) for tensor in self.tensors]
        return pb.TensorLayout(tensors=specs, range_begin=self.begin, range_end=self.end)

    def prepare(self) -> None:
        """Computes what is kept once it was asked for, which takes a second for 100,000 tensors."""
        _ = self.fingerprint, self._message

    def require_whole(self) -> None:
        """Raises InvalidRequest if this is a part of a model. A worker registers with all of it, and each server cuts its
        part."""
        if self.bounds is not None:
            raise InvalidRequest(
                f"the layout's range is [{self.begin}, {self.end}): register with the whole model, [0, {self.parameters})"
            )

    def part(self, of: Range) -> Layout:
        """The layout of one server's part of the model. Raises InvalidRequest if the model is too small for so many parts."""
        if of.whole:
            return self.whole
        if of not in self._parts:
            self._parts[of] = Layout(self.tensors, of.bounds(self.parameters))
        return self._parts[of]

    @cached_property
    def _parts(self) -> dict[Range, Layout]:
        return {}

    @cached_property
    def whole(self) -> Layout:
        """The layout of the whole model."""
        return self if self.bounds is None else Layout(self.tensors)

    @cached_property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def begin(self) -> int:
        """The first element of the model's packed buffer that a buffer of this layout holds."""
        return self.bounds[0] if self.bounds is not None else 0

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.bounds[1] if self.bounds is not None else self.parameters

    @cached_property
    def size(self) -> int:
        """Number of parameters P that a buffer of this layout holds."""
        return self.end - self.begin

    @cached_property
    def pieces(self) -> tuple[Tensor, ...]:
        """The tensors in a buffer of this layout, in order: the model's, or those of its range.

        A tensor that the range cuts is a piece of one axis, named "NAME[first:last]" by its elements in C order."""
        return self.tensors if self.bounds is None else tuple(self._cut_pieces())

    def _cut_pieces(self) -> Iterator[Tensor]:
        begin = 0
        for tensor in self.tensors:
            first, last = max(self.begin - begin, 0), min(self.end - begin, tensor.size)
            if (first, last) == (0, tensor.size) and tensor.size:
                yield tensor
            elif first < last:
                yield replace(tensor, name=f"{tensor.name}[{first}:{last}]", shape=(last - first,))
            begin += tensor.size

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        """int64, shape (pieces + 1,): piece k lies in [offsets[k], offsets[k + 1]) of a buffer of this layout."""
        return np.cumsum([0, *(piece.size for piece in self.pieces)], dtype=np.int64)

    @cached_property
    def factors(self) -> npt.NDArray[np.float32]:
        """float32, shape (pieces, 2): by what each piece's learning rate and weight decay are multiplied."""
        return np.array([piece.group for piece in self.pieces], np.float32)

    @cached_property
    def groups(self) -> dict[str, Group]:
        """The tensors that differ from `PLAIN`, by name."""
        return {tensor.name: tensor.group for tensor in self.tensors if tensor.group != PLAIN}

    @property
    def uniform(self) -> bool:
        """Whether all tensors have the run's learning rate."""
        return all(tensor.group.rate_factor == 1 for tensor in self.tensors)

    @cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 over UTF-8 lines "name NUL shape", shape as decimals joined by commas, and a last line "begin:end".

        A tensor with a learning rate of its own, or without weight decay, adds "NUL factor NUL 1 or 0" to its line."""
        lines = [f"{each.name}\0{','.join(map(str, each.shape))}{_digested(each.group)}\n" for each in self.tensors]
        return hashlib.sha256("".join([*lines, f"{self.begin}:{self.end}\n"]).encode()).digest()

    def split(self, packed: Vector) -> dict[str, Vector]:
        """Views of a packed buffer (float32, shape (P,)), one per piece, in its shape."""
        bounds = zip(self.pieces, self.offsets[:-1], self.offsets[1:], strict=True)
        return {piece.name: packed[begin:end].reshape(piece.shape) for piece, begin, end in bounds}

    def pack(self, tensors: Mapping[str, npt.ArrayLike], out: Vector) -> Vector:
        """Copies the tensors of a whole model into `out` (float32, shape (P,)). Raises LayoutMismatch for missing, unknown or
        misshapen tensors."""
        if tensors.keys() != {tensor.name for tensor in self.tensors}:
            missing = [tensor.name for tensor in self.tensors if tensor.name not in tensors]
            unknown = sorted(tensors.keys() - {tensor.name for tensor in self.tensors})
            raise LayoutMismatch(f"missing tensors: {missing[:5]}; unknown tensors: {unknown[:5]}")
        for name, view in self.split(out).items():
            value = np.asarray(tensors[name])
            if not np.issubdtype(value.dtype, np.floating):
                raise LayoutMismatch(f"tensor {name!r} has dtype {value.dtype}: it must be a float type")
            if value.shape != view.shape:
                raise LayoutMismatch(f"tensor {name!r} has shape {value.shape}, but the layout has {view.shape}")
            np.copyto(view, value, casting="same_kind")
        return out

    def require_same(self, other: Layout) -> None:
        """Raises LayoutMismatch, naming the first difference, unless `other` equals this layout."""
        if self.fingerprint == other.fingerprint or self == other:
            return
        for ours, theirs in zip(self.tensors, other.tensors, strict=False):
            if ours != theirs:
                raise LayoutMismatch(self._lacking(other, ours, theirs) or _difference(ours, theirs))
        if self.tensors == other.tensors:
            raise LayoutMismatch(
                f"the range [{other.begin}, {other.end}) of the model is not [{self.begin}, {self.end}): start all servers "
                "with ranges of the same number, --range 0/N to N-1/N"
            )
        raise LayoutMismatch(f"the model has {len(other.tensors)} tensors, this run's has {len(self.tensors)}: {_OTHER_MODEL}")

    def _lacking(self, other: Layout, ours: Tensor, theirs: Tensor) -> str | None:
        """The reason, if only one of the two models has the tensor in which they differ first."""
        in_run, in_worker = ({tensor.name for tensor in layout.tensors} for layout in (self, other))
        if ours.name not in in_worker and theirs.name in in_run:
            return f"the model lacks tensor {ours.name!r}, which this run trains. Is it frozen here alone? Or {_OTHER_MODEL}"
        if theirs.name not in in_run and ours.name in in_worker:
            return f"this run does not train tensor {theirs.name!r} of the model. Freeze it here, too. Or {_OTHER_MODEL}"
        return None


def _difference(ours: Tensor, theirs: Tensor) -> str:
    """The reason why a worker's tensor does not match the run's."""
    if (ours.name, ours.shape) == (theirs.name, theirs.shape):
        return (
            f"tensor {theirs.name!r} has {_in_words(theirs.group)}, but in this run {_in_words(ours.group)}: give all workers "
            "the same parameter groups"
        )
    if ours.nameless != theirs.nameless:
        return (
            f"tensor {theirs.name!r} does not match this run's {ours.name!r}: one of them is a position, not a name. "
            f"{NAME_TENSORS}"
        )
    return (
        f"tensor {theirs.name!r} of shape {theirs.shape} does not match this run's {ours.name!r} of shape {ours.shape}: "
        f"{_OTHER_MODEL}"
    )


def _require_distinct(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        raise InvalidRequest(
            f"tensor names must be unique; these occur twice: {', '.join(twice[:5])}: prefix each with its module's name"
        )


def _require_few(tensors: int) -> None:
    if tensors > MAX_TENSORS:
        raise InvalidRequest(f"the layout has {tensors} tensors; at most {MAX_TENSORS} are allowed")


def _from_spec(spec: pb.TensorSpec) -> Tensor:
    """Without a factor on the wire it is 1."""
    factor = spec.rate_factor if spec.HasField("rate_factor") else 1.0
    shape = tuple(spec.shape[: MAX_AXES + 1])  # enough to see that there are too many
    return Tensor(spec.name, shape, Group(factor, not spec.no_weight_decay))


def _to_spec(tensor: Tensor) -> pb.TensorSpec:
    factor, decays = tensor.group
    return pb.TensorSpec(
        name=tensor.name, shape=tensor.shape, rate_factor=None if factor == 1 else factor, no_weight_decay=not decays
    )


def _digested(group: Group) -> str:
    return "" if group == PLAIN else f"\0{group.rate_factor!r}\0{group.decays:d}"


def _in_words(group: Group) -> str:
    return f"learning-rate factor {group.rate_factor:g} and {'weight decay' if group.decays else 'no weight decay'}"
