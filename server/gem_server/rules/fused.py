"""The fused kernel of Gradient Energy Matching: one pass over memory for m, π, θ, s, the worker's reply and the statistics.

The pass works in blocks that stay in the first-level cache, so that the second step of a block reads it from there. The GIL is
released. The following holds for any number of threads:

State: m, π, θ and s are plain IEEE float32, computed in a fixed order, so a replay gives identical bits.
Gradient: It may lie in memory that its worker can still write to. Each block is copied before it is checked and used. An
    element of the copy that is NaN or too large counts as 0. For a gradient that did not change since it passed `all_within`,
    no element does.
Energies: They sum over every element; the order of the sums is not fixed.
Histogram of π: It counts every element of tensors with fewer than 2,048. Of a larger tensor it counts at least 1,024 elements,
    and one in 64 from 65,536 on: runs of 8 neighbours, evenly spaced, at positions that shift from block to block. The counts
    are then scaled to the tensor's size. Elements with Δ = 0 are left out: their π is 0/0 or has no bound, and moves nothing.
    For independent elements, the standard error of a share p is √(p(1 − p)/c), at most 1.6 %; c is the number counted. If
    neighbours are alike, it is up to √8 times as large. The layout and Δ alone determine which elements are counted, so a
    replay gives identical counts.

Indices are unsigned: numba then generates no code for negative ones, and the loops vectorise. numba's cache of a kernel does
not notice changes in another file, so kernels that call each other stay in this one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gem_api.compiled import compiled

BLOCK = 2048
BINS = 256
BITS_PER_BIN = np.int32(19)  # of float32's 23 mantissa bits: 16 bins to an octave
_STILL = BINS  # the place after the bins counts elements with Δ = 0
SAMPLE = 1024  # minimum number of elements counted of a tensor, if it has as many
SGD, ADAM, LION, GIVEN = range(4)  # how an update becomes the step Δ; GIVEN: it is Δ
RUN = 8  # neighbours that are counted together
STRIDE = 64  # of a large tensor, one run in 64 is counted
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_ZERO, _ONE = np.float32(0), np.float32(1)
_NO_PI = np.float32(-1)  # stands for the π of an element with Δ = 0
_LANES = 4
_STEP = 19  # odd, so that over the blocks, runs reach every position in a block


class Scalars(NamedTuple):
    """The numbers of the equations.

    Attributes:
        eta: η.
        mu: μ, by which the old moment is multiplied.
        own: The factor of Δ in the new moment: 1; or 0 if the moment already holds the proxy's whole displacement.
        kappa: κ.
        inside: ε in |Δ + ε|, or 0.
        outside: ε in |Δ| + ε, or 0.
        pi_max: π_max.
        limit: The largest |g| that is applied; beyond it, g counts as 0.
        against: How much |θ_t − s| counts if θ has moved against Δ.
        ahead: How many times the movement by a whole batch's step s lies ahead of θ.
        share: w, how much of that step a commit moves θ.
    """

    eta: float
    mu: float
    own: float
    kappa: float
    inside: float
    outside: float
    pi_max: float
    limit: np.float32
    against: float = 1.0
    ahead: float = 0.0
    share: float = 1.0


@compiled(fastmath={"reassoc", "contract"}, **_OPTIONS)
def _plus_square(total, x):  # type: ignore[no-untyped-def]
    """total + x². A separate function, because only these sums may be re-associated."""
    return total + x * x


@compiled(**_OPTIONS)
def _take(gradient, begin, end, block):  # type: ignore[no-untyped-def]
    """block[0:] ← gradient[begin:end]; a loop, as assigning a slice takes several times as long."""
    for i in range(begin, end):
        block[i - begin] = gradient[i]


@compiled(**_OPTIONS)
def _delta(g, eta, limit):  # type: ignore[no-untyped-def]
    """Δ = −η·g, or 0 if g is NaN or beyond ±limit."""
    return -eta * g if abs(g) <= limit else _ZERO


@compiled(**_OPTIONS)
def _within(value, limit):  # type: ignore[no-untyped-def]
    """The value, or 0 if it is NaN or beyond ±limit."""
    return value if abs(value) <= limit else _ZERO


@compiled(**_OPTIONS)
def _clip(value, bound):  # type: ignore[no-untyped-def]
    """The value, clipped to ±bound."""
    value = value if value < bound else bound
    return value if value > -bound else -bound


@compiled(**_OPTIONS)
def _adam(theta, block, first, second, begin, end, scalars, rate, decay, limit, bound):  # type: ignore[no-untyped-def]
    """block: g → Δ of Adam and AdamW (`optimizers.Adam`, `optimizers.AdamW`) on [begin, end); updates both moments."""
    beta1, rest1, beta2, rest2, correct1, correct2, epsilon, extra = scalars
    for i in range(begin, end):
        g = _within(block[i - begin], limit)
        m = beta1 * first[i] + rest1 * g
        v = beta2 * second[i] + rest2 * g * g
        first[i] = m
        second[i] = v
        mean = m * correct1
        step = mean / (np.sqrt(v * correct2 + extra * (mean * mean)) + epsilon) + decay * theta[i]
        block[i - begin] = _clip(-rate * step, bound)


@compiled(**_OPTIONS)
def _lion(theta, block, first, begin, end, scalars, rate, decay, limit, bound):  # type: ignore[no-untyped-def]
    """block: g → Δ of Lion (`optimizers.Lion`) on [begin, end); updates the moment."""
    beta1, rest1, beta2, rest2, size = scalars
    for i in range(begin, end):
        g, m = _within(block[i - begin], limit), first[i]
        sign = size * np.sign(beta1 * m + rest1 * g)
        first[i] = beta2 * m + rest2 * g
        block[i - begin] = _clip(-rate * (sign + decay * theta[i]), bound)


@compiled(**_OPTIONS)
def _step(code, theta, block, first, second, begin, end, numbers, rate, decay, limit, bound):  # type: ignore[no-untyped-def]
    """block: g → Δ of the optimizer that `code` names. `numbers` are its `scalars`, float32; rate and decay its η_t and λ."""
    if code == ADAM:
        adam = (numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], numbers[7])
        _adam(theta, block, first, second, begin, end, adam, rate, decay, limit, bound)
    elif code == LION:
        lion = (numbers[0], numbers[1], numbers[2], numbers[3], numbers[4])
        _lion(theta, block, first, begin, end, lion, rate, decay, limit, bound)
    elif code == GIVEN:
        for i in range(end - begin):
            block[i] = _clip(numbers[0] * _within(block[i], limit), bound)
    else:
        for i in range(end - begin):
            block[i] = _delta(block[i], rate, limit)


@compiled(**_OPTIONS)
def _reply(source, answer, begin, end):  # type: ignore[no-untyped-def]
    """answer[begin:end] ← source[begin:end], if there is an answer.

    A loop of its own, while the block is in the cache. As an `if` inside another loop it would become a masked store. Without
    an answer that goes to invalid memory, and Intel's processors take a slow path for it: the pass took twice as long.
    """
    if answer.size:
        for i in range(begin, end):
            answer[i] = source[i]


@compiled(**_OPTIONS)
def _used(moved, delta, against):  # type: ignore[no-untyped-def]
    """The part of a commit's room that is used: |θ_t − s|, or `against` times that if θ has moved against Δ."""
    return abs(moved) * (against if (moved < _ZERO) != (delta < _ZERO) else _ONE)


@compiled(**_OPTIONS)
def _match(theta, block, snapshot, begin, end, scalars):  # type: ignore[no-untyped-def]
    """Eq. 19 on [begin, end) for the step Δ of a whole batch in `block`, its own proxy: moves θ, and s ahead of it. `block`
    receives π. Returns the sums of (κ·Δ)² and (θ_{t+1} − s)²."""
    _, _, _, kappa, _, outside, pi_max, _, _, ahead, share = scalars
    proxy, central = _ZERO, _ZERO
    for i in range(begin, end):
        delta, before, s = block[i - begin], theta[i], snapshot[i]
        speed = kappa * abs(delta)
        factor = (speed - abs(before - s)) / (abs(delta) + outside)
        factor = factor if factor > _ZERO else _ZERO  # also turns 0/0 into 0
        factor = factor if factor < pi_max else pi_max
        move = factor * delta
        after = before + share * move
        block[i - begin] = factor if delta != _ZERO else _NO_PI
        theta[i] = after
        snapshot[i] = after + ahead * move
        proxy = _plus_square(proxy, speed)
        central = _plus_square(central, after - s)
    return proxy, central


@compiled(**_OPTIONS)
def _update(theta, block, moment, snapshot, begin, end, scalars, snapshot_after):  # type: ignore[no-untyped-def]
    """Eqs. 24, 19 and 27 on [begin, end): updates m, θ and s with the gradient in `block`, which receives π. All arrays must be
    distinct, so that the loop vectorises. Returns the sums of (κ·m)² and (θ_{t+1} − s)²."""
    eta, mu, own, kappa, inside, outside, pi_max, limit, against, _, _ = scalars
    proxy, central = _ZERO, _ZERO
    for i in range(begin, end):
        delta = _delta(block[i - begin], eta, limit)
        m = mu * moment[i] + own * delta
        before, s = theta[i], snapshot[i]
        speed = kappa * abs(m)
        factor = (speed - _used(before - s, delta, against)) / (abs(delta + inside) + outside)
        factor = factor if factor > _ZERO else _ZERO  # also turns 0/0 into 0
        factor = factor if factor < pi_max else pi_max
        after = before + factor * delta
        block[i - begin] = factor if delta != _ZERO else _NO_PI
        moment[i] = m
        theta[i] = after
        snapshot[i] = after if snapshot_after else before
        proxy = _plus_square(proxy, speed)
        central = _plus_square(central, after - s)
    return proxy, central


@compiled(**_OPTIONS)
def _gather(bits, size, first, stride, sample, held):  # type: ignore[no-untyped-def]
    """sample[held:] ← every `stride`-th run of the block's first `size` elements, from run number `first` on. Returns the
    number of elements in the sample then. It copies the last run as a whole, which is faster; the next call overwrites the
    excess."""
    for begin in range(np.uint64(first * RUN), size, np.uint64(stride * RUN)):
        for i in range(np.uint64(RUN)):
            sample[held + i] = bits[begin + i]
        held += min(np.uint64(RUN), size - begin)
    return held


@compiled(**_OPTIONS)
def _bins(bits, size, lowest, top, index):  # type: ignore[no-untyped-def]
    """The bin of each π, from its bit pattern. Positive floats are ordered like their bits, so a shift finds the bin without a
    search. Subtracting 1 first puts a value on an edge into the bin below. Returns how many have no π; they are in bin 1."""
    still = np.int32(0)
    for i in range(size):
        still += np.int32(bits[i] < 0)
        bin_ = max(np.int32(np.int32(np.int32(bits[i] - 1) >> BITS_PER_BIN) - lowest), np.int32(1))
        bin_ = bin_ if bits[i] != 0 else np.int32(0)
        index[i] = np.uint8(bin_ if bits[i] < top else BINS - 1)
    return still


@compiled(**_OPTIONS)
def _count(index, size, lanes):  # type: ignore[no-untyped-def]
    """Counts the bins in several tables alternately. Neighbours often share a bin, and with one table each count would wait for
    the last."""
    even = size - size % np.uint64(8)
    for i in range(np.uint64(0), even, np.uint64(8)):
        for lane in range(np.uint64(8)):
            lanes[lane % np.uint64(_LANES), index[i + lane]] += np.uint32(1)
    for i in range(even, size):
        lanes[0, index[i]] += np.uint32(1)


@compiled(**_OPTIONS)
def _fold(lanes, still, row):  # type: ignore[no-untyped-def]
    """row ← the sum of the tables, which are then reset to zero. Of bin 1, `still` elements have no π."""
    for i in range(BINS):
        row[i] = np.int64(lanes[0, i]) + lanes[1, i] + lanes[2, i] + lanes[3, i]
    row[1] -= still
    row[_STILL] = still
    lanes[:] = 0


@compiled(**_OPTIONS)
def _stride(size):  # type: ignore[no-untyped-def]
    """The stride s, a power of two: of a tensor of `size` elements, one run in s is counted."""
    stride = 1
    while stride < STRIDE and size >= 2 * stride * SAMPLE:
        stride *= 2
    return stride


@compiled(**_OPTIONS)
def _stretch(row, size):  # type: ignore[no-untyped-def]
    """Scales counts so that they add up to `size` exactly. It rounds their running sum, so each is within 1 of its exact
    value."""
    total = row.sum()
    if total == size:
        return
    scale = size / total
    running, before = 0, 0
    for i in range(row.size):
        running += row[i]
        now = int(running * scale + 0.5)
        row[i] = now - before
        before = now


@compiled(**_OPTIONS)
def quantile(counts, edges, share):  # type: ignore[no-untyped-def]
    """The value below which `share` of the counted π lie, interpolated linearly inside its bin (1/16 octave wide)."""
    total = counts[:BINS].sum()
    rank = share * total
    below = 0
    for i in range(BINS):
        if below + counts[i] >= rank and counts[i] > 0:
            if i == 0 or i == BINS - 1:
                return edges[i]
            return edges[i] + (edges[i + 1] - edges[i]) * np.float32((rank - below) / counts[i])
        below += counts[i]
    return _ZERO


@compiled(**_OPTIONS)
def _finish_tensor(row, tensor, offsets, edges, counts, medians):  # type: ignore[no-untyped-def]
    """Adds a tensor's histogram to `counts`, stretched to its size, and takes its median."""
    _stretch(row, offsets[tensor + 1] - offsets[tensor])
    medians[tensor] = quantile(row, edges, 0.5)
    counts += row


@compiled(**_OPTIONS)
def _cut(part, parts, offsets):  # type: ignore[no-untyped-def]
    """The element at which a part begins: about part/parts of all, at the beginning of a block of the tensor there."""
    size = offsets[-1]
    if part == parts:
        return size
    at = size * part // parts
    return at - (at - offsets[np.searchsorted(offsets, at, side="right") - 1]) % BLOCK


@compiled(**_OPTIONS)
def gem_part(  # type: ignore[no-untyped-def]
    part, parts, theta, gradient, moment, second, snapshot, answer, offsets, factors, edges, settings, optimizer, numbers,
    decay, bound, snapshot_after, answer_after, counts, shared, medians, energies,
):  # fmt: skip
    """Applies one commit to one of `parts` ranges of the central variable. The ranges may be processed in parallel.

    Args:
        part: Number of the range, from 0.
        theta, gradient, moment, snapshot: float32, shape (P,), distinct. θ, m and s are updated in place.
        second: float32, shape (P,): the second moment of a shared optimizer; or shape (0,).
        answer: float32, shape (P,), distinct: receives the θ of the worker's next gradient; or shape (0,) for none.
        offsets: int64, shape (tensors + 1,): where each tensor lies.
        factors: float32, shape (tensors, 2): by what η and λ are multiplied in each tensor.
        edges: float32, shape (BINS,), from `bins.bin_edges`.
        settings: float32, shape (11,): the values of `Scalars`. An array, because numba takes longer to accept as many numbers.
        optimizer: SGD if Δ = −η·g is matched with the proxy in `moment`; else the shared optimizer whose step is matched.
        numbers: float32: its `scalars`.
        decay, bound: float32: its weight decay λ, and the largest |Δ|.
        snapshot_after: Whether s becomes θ_{t+1}, else θ_t, if Δ is matched with the proxy.
        answer_after: Whether the answer becomes θ_{t+1}, else s.
        counts: int64, shape (parts, 3, BINS + 1): [part, 0] receives the histogram of π over the tensors that lie completely in
            the range, with the number of elements without π behind it; [part, 1] and [part, 2] the counts of a tensor that
            begins before it, or ends after it.
        shared: int64, shape (parts, 2): receives the numbers of these two tensors, or -1.
        medians: float32, shape (tensors,), of zeros: receives the medians of the tensors that lie completely in the range.
        energies: float64, shape (parts, 2): receives Σ(κ·m)² and Σ(θ_{t+1} − s)², s being the snapshot before this commit.
    """
    begin, end = _cut(part, parts, offsets), _cut(part + 1, parts, offsets)
    lowest, top = np.int32((edges.view(np.int32)[2] >> BITS_PER_BIN) - 2), edges.view(np.int32)[-1]
    block, sample, index = np.empty(BLOCK, np.float32), np.empty(2 * BLOCK, np.int32), np.empty(2 * BLOCK, np.uint8)
    bits = block.view(np.int32)
    lanes, row = np.zeros((_LANES, BINS), np.uint32), np.empty(BINS + 1, np.int64)
    counts[part, 0], shared[part], energies[part] = 0, -1, 0
    tensor = np.searchsorted(offsets, begin, side="right") - 1
    while tensor < offsets.size - 1 and offsets[tensor] < end:
        first, last = offsets[tensor], offsets[tensor + 1]
        stride, held, still = _stride(last - first), np.uint64(0), np.int64(0)
        until = min(last, end)
        rate, tensor_decay = settings[0] * factors[tensor, 0], decay * factors[tensor, 1]
        scalars = (  # in the order of `Scalars`
            rate, settings[1], settings[2], settings[3], settings[4], settings[5], settings[6], settings[7], settings[8],
            settings[9], settings[10],
        )  # fmt: skip
        for start in range(max(first, begin), until, BLOCK):
            low, high = np.uint64(start), np.uint64(min(start + BLOCK, last))
            _take(gradient, low, high, block)
            if optimizer == SGD:
                proxy, central = _update(theta, block, moment, snapshot, low, high, scalars, snapshot_after)
            else:
                limit = settings[7]
                _step(optimizer, theta, block, moment, second, low, high, numbers, rate, tensor_decay, limit, bound)
                proxy, central = _match(theta, block, snapshot, low, high, scalars)
            _reply(theta if answer_after else snapshot, answer, low, high)
            energies[part, 0] += proxy
            energies[part, 1] += central
            held = _gather(bits, high - low, (start - first) // BLOCK * _STEP % stride, stride, sample, held)
            if held >= np.uint64(BLOCK) or high == np.uint64(until):
                still += _bins(sample, held, lowest, top, index)
                _count(index, held, lanes)
                held = np.uint64(0)
        _fold(lanes, still, row)
        if begin <= first and last <= end:
            _finish_tensor(row, tensor, offsets, edges, counts[part, 0], medians)
        else:
            slot = 1 if first < begin else 2
            shared[part, slot - 1] = tensor
            counts[part, slot] = row
        tensor += 1


@compiled(**_OPTIONS)
def join_parts(offsets, edges, counts, shared, medians, energies):  # type: ignore[no-untyped-def]
    """Finishes the tensors that several parts share. Arguments as filled by `gem_part`.

    Returns:
        The median of π over all tensors, whose histogram is in counts[0, 0, :BINS] now; and the energies ½Σ(κ·m)² and
        ½Σ(θ_{t+1} − s)².
    """
    row = np.zeros(BINS + 1, np.int64)
    unfinished = -1
    for part in range(shared.shape[0]):
        if part:
            counts[0, 0] += counts[part, 0]
        for slot in range(2):
            tensor = shared[part, slot]
            if tensor >= 0:
                if unfinished >= 0 and unfinished != tensor:
                    _finish_tensor(row, unfinished, offsets, edges, counts[0, 0], medians)
                    row[:] = 0
                row += counts[part, slot + 1]
                unfinished = tensor
    if unfinished >= 0:
        _finish_tensor(row, unfinished, offsets, edges, counts[0, 0], medians)
    return quantile(counts[0, 0], edges, 0.5), 0.5 * energies[:, 0].sum(), 0.5 * energies[:, 1].sum()


@compiled(**_OPTIONS)
def descend_part(  # type: ignore[no-untyped-def]
    part, parts, theta, gradient, first, second, snapshot, answer, offsets, factors, optimizer, numbers, eta, decay, limit,
    bound, divisor,
):  # fmt: skip
    """θ ← θ + Δ / divisor on one of `parts` ranges, then s ← θ and the answer ← θ; Δ is the step of `optimizer`, SGD's
    included. η, λ, the largest |g|, the largest |Δ| and the divisor are float32; the other arguments are as for `gem_part`."""
    block = np.empty(BLOCK, np.float32)
    begin, end = _cut(part, parts, offsets), _cut(part + 1, parts, offsets)
    tensor = np.searchsorted(offsets, begin, side="right") - 1
    while tensor < offsets.size - 1 and offsets[tensor] < end:
        until = min(offsets[tensor + 1], end)
        rate, tensor_decay = eta * factors[tensor, 0], decay * factors[tensor, 1]
        for start in range(max(offsets[tensor], begin), until, BLOCK):
            low, high = np.uint64(start), np.uint64(min(start + BLOCK, until))
            _take(gradient, low, high, block)
            if optimizer == SGD:
                _descend(theta, block, snapshot, low, high, rate, limit, divisor)
            else:
                _step(optimizer, theta, block, first, second, low, high, numbers, rate, tensor_decay, limit, bound)
                _add(theta, block, snapshot, low, high, divisor)
            _reply(theta, answer, low, high)
        tensor += 1


@compiled(**_OPTIONS)
def _descend(theta, block, snapshot, begin, end, eta, limit, divisor):  # type: ignore[no-untyped-def]
    """The step of SGD in one loop, which takes three quarters of the time of two."""
    for i in range(begin, end):
        delta = _delta(block[i - begin], eta, limit)
        after = theta[i] + delta / divisor
        theta[i] = after
        snapshot[i] = after


@compiled(**_OPTIONS)
def _add(theta, block, snapshot, begin, end, divisor):  # type: ignore[no-untyped-def]
    """θ ← θ + Δ / divisor, with the step Δ in `block`."""
    for i in range(begin, end):
        after = theta[i] + block[i - begin] / divisor
        theta[i] = after
        snapshot[i] = after


@compiled(**_OPTIONS)
def all_within(values, limit):  # type: ignore[no-untyped-def]
    """Whether |v| ≤ limit for every element; False if any is NaN."""
    inside = np.int32(1)
    for i in range(values.size):
        inside &= np.int32(abs(values[i]) <= limit)
    return inside == 1
