"""The tensor layout: positions in the buffer, and how two sides notice that their layouts differ."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from gem_api import layout as layout_module
from gem_api.errors import InvalidRequest, LayoutMismatch
from gem_api.layout import MAX_AXES, MAX_TENSORS, Group, Layout, Tensor
from gem_api.ranges import Range
from gem_api.v1 import tensors_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.core import bits

NAMES = st.text(min_size=1, max_size=12).filter(lambda name: name.isprintable() and name != "__metadata__")
SHAPES = st.lists(st.integers(0, 4), max_size=3)
LAYOUTS = (
    st.dictionaries(NAMES, SHAPES, min_size=1, max_size=5)
    .filter(lambda shapes: any(0 not in shape for shape in shapes.values()))
    .map(Layout.of)
)
few = settings(max_examples=30)
TWO = Layout.of({"weight": (2, 3), "bias": (3,)})


@few
@given(LAYOUTS)
def test_a_layout_crosses_the_wire_unchanged(layout: Layout) -> None:
    received = Layout.from_message(pb.TensorLayout.FromString(layout.to_message().SerializeToString()))
    assert received == layout
    assert received.fingerprint == layout.fingerprint


@few
@given(LAYOUTS)
def test_the_fingerprint_is_that_of_the_documented_text(layout: Layout) -> None:
    digest = hashlib.sha256()
    total = 0
    for tensor in layout.tensors:
        digest.update(tensor.name.encode() + b"\x00" + b",".join(b"%d" % extent for extent in tensor.shape) + b"\n")
        total += int(np.prod(tensor.shape, dtype=np.int64))
    digest.update(b"0:%d\n" % total)
    assert layout.fingerprint == digest.digest()


def test_the_fingerprint_of_a_known_layout_never_changes() -> None:
    """Other languages compute it too, and checkpoints outlive versions."""
    assert TWO.fingerprint.hex() == "79581e12aca2edcf15073c2d3b0e0a4fa2cb9c4f50c11cbf40a2d7040017f948"


@few
@given(LAYOUTS)
def test_packing_and_splitting_are_inverse(layout: Layout) -> None:
    packed = np.arange(layout.size, dtype=np.float32)
    tensors = layout.split(packed)
    assert [tensor.shape for tensor in tensors.values()] == [tensor.shape for tensor in layout.tensors]
    assert bits(layout.pack(tensors, np.empty(layout.size, np.float32))) == bits(packed)
    assert int(layout.offsets[-1]) == layout.size == sum(tensor.size for tensor in tensors.values())


def test_the_packed_bytes_are_little_endian_float32_in_c_order() -> None:
    packed = TWO.pack({"bias": [7.0, 8.0, 9.0], "weight": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]}, np.empty(9, "<f4"))
    assert bits(packed) == struct.pack("<9f", 1, 2, 3, 4, 5, 6, 7, 8, 9)
    TWO.split(packed)["bias"][:] = 0
    assert packed.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0], "what is split are views"


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"weight": np.zeros((2, 3))}, r"missing tensors: \['bias'\]"),
        ({"weight": np.zeros((2, 3)), "bias": np.zeros(3), "extra": 0}, r"unknown tensors: \['extra'\]"),
        ({"weight": np.zeros((3, 2)), "bias": np.zeros(3)}, r"'weight' has shape \(3, 2\)"),
        ({"weight": np.zeros((2, 3), np.int64), "bias": np.zeros(3)}, r"'weight' has dtype int64: it must be a float type"),
        ({"weight": np.zeros((2, 3)), "bias": np.zeros(3, complex)}, r"'bias' has dtype complex128"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tensors: dict[str, np.ndarray], why: str) -> None:
    with pytest.raises(LayoutMismatch, match=why):
        TWO.pack(tensors, np.empty(9, np.float32))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (Layout.of({"weight": (2, 3), "bias": (4,)}), r"'bias' of shape \(4,\)"),
        (Layout.of({"weight": (2, 3), "b": (3,)}), "'b' of shape"),
        (Layout.of({"bias": (3,), "weight": (2, 3)}), "'bias' of shape"),
        (Layout.of({"bias": (3,)}), "lacks tensor 'weight', which this run trains. Is it frozen here alone"),
        (Layout.of({"early": (1,), "weight": (2, 3), "bias": (3,)}), "does not train tensor 'early' of the model. Freeze it"),
        (Layout.of({"weight": (2, 3)}), "has 1 tensors, this run's has 2"),
        (Layout.of({"weight": (2, 3), "bias": (3,), "more": (1,)}), "has 3 tensors"),
    ],
)
def test_another_layout_is_refused_with_the_first_difference(other: Layout, why: str) -> None:
    with pytest.raises(LayoutMismatch, match=why):
        TWO.require_same(other)
    TWO.require_same(Layout.of({"weight": [2, 3], "bias": [3]}))


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ([], "no tensors"),
        ([("", (1,))], "printable characters"),
        ([("a\0b", (1,))], "printable characters"),
        ([("x" * 513, (1,))], "1 to 512 printable"),
        ([("__metadata__", (1,))], "safetensors"),
        ([("a", (1,)), ("b", (1,)), ("a", (2,))], "these occur twice: a"),
        ([("a", (0,)), ("b", (3, 0))], "0 parameters"),
        ([("a", (2**40, 2**40))], "parameters"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(pairs: list[tuple[str, tuple[int, ...]]], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        Layout.of(pairs)


def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=str(MAX_TENSORS)):
        Layout(tuple(Tensor(f"t{number}", ()) for number in range(MAX_TENSORS + 1)))


def test_a_message_with_too_many_tensors_is_refused_before_any_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "_from_spec", lambda spec: pytest.fail("it was converted"))
    with pytest.raises(InvalidRequest, match=f"{MAX_TENSORS + 1} tensors; at most {MAX_TENSORS}"):
        Layout.from_message(pb.TensorLayout(tensors=[pb.TensorSpec()] * (MAX_TENSORS + 1)))


def test_no_more_axes_of_a_shape_are_converted_than_a_tensor_may_have() -> None:
    spec = pb.TensorSpec(name="w", shape=[1] * 100_000)
    assert len(layout_module._from_spec(spec).shape) == MAX_AXES + 1
    with pytest.raises(InvalidRequest, match=f"at most {MAX_AXES} axes"):
        Layout.from_message(pb.TensorLayout(tensors=[spec]))


def test_a_wire_form_that_was_changed_changes_no_other() -> None:
    message = TWO.to_message()
    message.tensors[0].name = "other"
    assert Layout.from_message(TWO.to_message()) == TWO


@pytest.mark.parametrize("bounds", [(0, 10), (9, 18), (0, 0), (5, 4), (9, 9)])
def test_a_range_that_is_no_part_of_the_model_is_refused(bounds: tuple[int, int]) -> None:
    message = TWO.to_message()
    message.range_begin, message.range_end = bounds
    with pytest.raises(InvalidRequest, match="no part of the model"):
        Layout.from_message(message)


def test_a_part_of_a_model_has_the_pieces_of_its_range() -> None:
    layout = Layout.of({"a": (100, 100), "empty": (0,), "b": (5000,), "c": (3,)}, {"b": Group(0.5, False)})
    parts = [layout.part(Range(index, 3)) for index in range(3)]
    assert [part.bounds for part in parts] == [(0, 4096), (4096, 8192), (8192, 15003)]
    assert [piece.name for part in parts for piece in part.pieces] == ["a[0:4096]", "a[4096:8192]", "a[8192:10000]", "b", "c"]
    assert parts[2].offsets.tolist() == [0, 1808, 6808, 6811]
    assert parts[2].factors.tolist() == [[1, 1], [0.5, 0], [1, 1]]
    packed = np.arange(layout.size, dtype=np.float32)
    joined = [view.reshape(-1) for part in parts for view in part.split(packed[part.begin : part.end]).values()]
    assert np.array_equal(np.concatenate(joined), packed)


def test_a_tensor_named_as_a_piece_of_another_is_refused_where_both_meet() -> None:
    """Their range could not be restarted: its checkpoint would have one tensor for the two."""
    layout = Layout.of({"w": (20_000,), "w[8192:20000]": (64,)})
    assert [piece.name for piece in layout.part(Range(0, 2)).pieces] == ["w[0:8192]"]
    with pytest.raises(InvalidRequest, match=r"these occur twice: w\[8192:20000\]"):
        layout.part(Range(1, 2))


def test_parts_differ_from_each_other_and_survive_the_wire() -> None:
    layout = Layout.of({"w": (20_000,)})
    parts = [layout, *(layout.part(Range(index, 2)) for index in range(2))]
    assert len({part.fingerprint for part in parts}) == 3
    assert [Layout.from_message(part.to_message()) for part in parts] == parts
    assert {part.whole for part in parts} == {layout}
    with pytest.raises(LayoutMismatch, match="same number"):
        parts[1].require_same(parts[2])
    with pytest.raises(InvalidRequest, match="whole model"):
        parts[1].require_whole()


@pytest.mark.parametrize(
    "shape", [(0, 2**63), (0, 2**40, 2**40), (1,) * 65, (-2, -3)], ids=["huge extent", "huge product", "65 axes", "negative"]
)
def test_a_shape_that_no_array_can_have_is_refused_at_the_door(shape: tuple[int, ...]) -> None:
    """It would come to light in the next checkpoint only, and take the server down."""
    with pytest.raises(InvalidRequest):
        Layout.of({"odd": shape, "weight": (4,)})
