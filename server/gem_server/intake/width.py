"""The number of large transfers that have a turn at the same time: no more than fill the network.

On a far network one connection can't do that, as its system lets a few MB at most be under way. Nobody says how much a network
carries. So now and then one transfer more, or one less, is tried for some turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

TURNS_PER_TRIAL = 3  # turns of a try, which beginnings and ends of others disturb
TURNS_BETWEEN_TRIALS = 32  # turns until the next try, after one that has failed
GAIN_TO_GROW = 1.15  # a trial of one more is kept from this rate on, relative to that before
LOSS_TO_SHRINK = 0.9  # a trial of one less is kept from this rate on, relative to that before


@dataclass
class Width:
    """Adapts to the turns that end.

    Attributes:
        now: How many may have a turn at the same time.
        minimum: No fewer are tried.
    """

    now: int = 1
    minimum: int = 1
    _step: int = 1
    _rested: int = TURNS_BETWEEN_TRIALS
    _before: tuple[int, float] | None = None  # what there was before a try: the width, and the rate
    _rates: list[float] = field(default_factory=list)

    def set_minimum(self, minimum: int) -> None:
        """Sets how many may always have a turn at the same time."""
        self.minimum = minimum
        self.now = max(self.now, minimum)

    def ended(self, begun_under: int, together: int, pace: float) -> None:
        """A turn has ended.

        Args:
            begun_under: The width when it began.
            together: How many had a turn when it began, with it.
            pace: Its seconds for each byte.
        """
        self._rested += 1
        if begun_under != self.now or together < self.now or pace <= 0:
            return
        self._rates.append(together / pace)
        if len(self._rates) < TURNS_PER_TRIAL:
            return
        rate = fmean(self._rates)
        self._rates.clear()
        if self._before is not None:
            self._judge(*self._before, rate)
        elif self._rested >= TURNS_BETWEEN_TRIALS:
            self._before = self.now, rate
            self.now += self._step if self.now + self._step >= self.minimum else 1

    def _judge(self, width: int, before: float, rate: float) -> None:
        self._before = None
        if rate < before * (GAIN_TO_GROW if self.now > width else LOSS_TO_SHRINK):
            self.now, self._step, self._rested = width, -self._step, 0
