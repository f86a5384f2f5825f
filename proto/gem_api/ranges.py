"""Ranges: how θ is cut for several servers, each of which holds a part of the packed buffer."""

from __future__ import annotations

from dataclasses import dataclass

from gem_api.errors import InvalidRequest

UNIT = 4096  # elements: whole int8 blocks, memory pages and tiles of the compiled passes
MAX_RANGES = 1000


@dataclass(frozen=True)
class Range:
    """The part of θ that a server holds.

    Attributes:
        index: The part's number, from 0. Range 0 leads.
        count: The number of parts.
    """

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Range:
        """Reads "I/N". Raises ValueError that says what to write instead."""
        index, slash, count = text.partition("/")
        if not (slash and index.isascii() and index.isdecimal() and count.isascii() and count.isdecimal()):
            raise ValueError(f"{text!r} is not a range: write I/N, such as 0/2 for the first of two servers")
        if not int(index) < int(count) <= MAX_RANGES:
            raise ValueError(f"{text!r} is not a range: I counts from 0 to N - 1, and N is at most {MAX_RANGES}")
        return cls(int(index), int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def leads(self) -> bool:
        """Whether this part's server leads: it alone deals shards, and knows the others."""
        return self.index == 0

    @property
    def whole(self) -> bool:
        """Whether this part is all of θ."""
        return self.count == 1

    def bounds(self, parameters: int) -> tuple[int, int]:
        """The elements [begin, end) of a θ with P parameters that this part holds.

        Part i of N begins at ⌊P·i/N⌋, rounded down to a multiple of `UNIT`; it ends where the next one begins.

        Raises:
            InvalidRequest: The model is too small for so many parts: one would be empty.
        """
        if not self.whole and parameters < self.count * UNIT:
            raise InvalidRequest(
                f"a model of {parameters} parameters is too small for {self.count} servers: each holds at least {UNIT}, so use "
                f"at most {max(1, parameters // UNIT)}"
            )
        return _boundary(parameters, self.index, self.count), _boundary(parameters, self.index + 1, self.count)


WHOLE = Range(0, 1)


def all_bounds(parameters: int, count: int) -> list[tuple[int, int]]:
    """The bounds of all parts of a θ with P parameters, in order. Raises InvalidRequest as `Range.bounds`."""
    return [Range(index, count).bounds(parameters) for index in range(count)]


def _boundary(parameters: int, index: int, count: int) -> int:
    return parameters if index == count else parameters * index // count // UNIT * UNIT


def most_apart(leases: int, uncounted: int) -> int:
    """By how many versions two ranges of a run may differ. `leases` counts those that either has or had: a commit of each may
    have been cut short, and two of one that overlaps. `uncounted` are the commits that either has rejected or discarded."""
    return 2 * leases + uncounted


def older_than_known(known: int, held: int) -> str:
    """The error if the data of a range is older than a worker knows it."""
    return (
        f"its data is older than its workers know: version {known} then, {held} now. Its folder was probably replaced by an "
        "older copy: stop all servers, and make new folders for all ranges from one backup with `gem-ctl reshard`"
    )
