"""The compiled kernels use vector instructions, and no masked stores. A loop that stops vectorising, or whose store has a
condition, causes no error, but takes several times as long."""

from __future__ import annotations

import platform
import re
from typing import Any

import numpy as np
import pytest
from gem_server.rules import fused
from numba import njit

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="knows the instructions of x86-64 only")

VECTOR = np.ones(64, np.float32)
ONE = np.float32(1)
BEGIN, END = np.uint64(0), np.uint64(64)
CALLS: dict[str, tuple[Any, ...]] = {
    "_update": (*(VECTOR.copy() for _ in range(4)), BEGIN, END, (ONE,) * len(fused.Scalars._fields), True),
    "_descend": (*(VECTOR.copy() for _ in range(3)), BEGIN, END, ONE, ONE, ONE),
    "_adam": (*(VECTOR.copy() for _ in range(4)), BEGIN, END, (ONE,) * 8, ONE, ONE, ONE, ONE),
    "_lion": (*(VECTOR.copy() for _ in range(3)), BEGIN, END, (ONE,) * 5, ONE, ONE, ONE, ONE),
    "_match": (*(VECTOR.copy() for _ in range(3)), BEGIN, END, (ONE,) * len(fused.Scalars._fields)),
    "_add": (*(VECTOR.copy() for _ in range(3)), BEGIN, END, ONE),
    "_reply": (VECTOR.copy(), VECTOR.copy(), BEGIN, END),
    "_take": (VECTOR.copy(), BEGIN, END, VECTOR.copy()),
    "_bins": (VECTOR.view(np.int32), END, np.int32(1), np.int32(2), np.zeros(64, np.uint8)),
    "all_within": (VECTOR, ONE),
}


def assembly(kernel: str) -> str:
    """What the kernel is compiled to on this machine, now: the code in numba's cache can't be looked into."""
    options = {name: value for name, value in fused._OPTIONS.items() if name != "cache"}
    compiled = njit(**options)(getattr(fused, kernel).py_func)
    compiled(*CALLS[kernel])
    (text,) = compiled.inspect_asm().values()
    return str(text)


def packed(instruction: str, text: str) -> int:
    """How often an instruction on vectors (AVX-512, AVX or SSE) stands in the code."""
    return len(re.findall(rf"^\s+v?{instruction}\s", text, re.MULTILINE))


INSTRUCTIONS = {
    "_update": ["divps", "mulps", "addps"], "_descend": ["divps", "addps"], "_adam": ["divps", "sqrtps"], "_lion": ["mulps"],
    "_match": ["divps"], "_add": ["divps"], "_take": ["mov[ua]ps"], "_bins": ["psrad"], "all_within": [r"cmp\w*ps"],
    "_reply": [],
}  # fmt: skip


UNMASKED = ("_update", "_match", "_descend", "_add", "_reply")
MASKED_STORE = re.compile(r"^\s+v(?:mov\w+\s+%\w+, [-\w]*\([^)]*\) \{%k|maskmov\w+\s+%\w+, %\w+, [-\w]*\()", re.MULTILINE)


@pytest.mark.parametrize("kernel", CALLS)
def test_a_kernel_works_on_vectors_and_does_not_store_under_a_mask(kernel: str) -> None:
    """A masked store to invalid memory, which writes nothing, takes hundreds of cycles on Intel's processors."""
    text = assembly(kernel)
    assert [each for each in INSTRUCTIONS[kernel] if not packed(each, text)] == []
    assert kernel not in UNMASKED or not MASKED_STORE.findall(text)


def test_a_masked_store_would_be_noticed() -> None:
    @njit(nogil=True)  # type: ignore[untyped-decorator]
    def conditional(values: Any, out: Any) -> None:
        for i in range(values.size):
            if values[i] > 0:
                out[i] = values[i]

    conditional(VECTOR.copy(), VECTOR.copy())
    (text,) = conditional.inspect_asm().values()
    if not packed("cmp\\w*ps", text):
        pytest.skip("this processor has no masked stores, so the loop is not vectorised")
    assert MASKED_STORE.findall(text)
