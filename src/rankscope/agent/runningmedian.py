"""When a number that every step has leaps: the rule for gradient norms and for watched values."""

from __future__ import annotations

import math
import statistics
from collections import deque
from itertools import dropwhile
from typing import Final

__all__ = ["RunningMedian"]

_STEPS: Final = 32
"""Steps whose magnitudes make the running median."""
_FEWEST: Final = 8
"""Nothing leaps before so many are known."""
_RISING: Final = 2.0
"""Times the median beyond which a step may be one of those over which a run diverges."""
_LEAST: Final = 0.01
"""Part of the highest median so far below which a magnitude is near zero."""


class RunningMedian:
    """The magnitudes that one number had in the last steps."""

    __slots__ = ("_factor", "_highest", "_last", "limit", "median")

    def __init__(self, factor: float) -> None:
        """Know no step yet; a magnitude `factor` times the median leaps."""
        self._factor = factor
        self._last: deque[float] = deque(maxlen=_STEPS)
        self._highest = 0.0
        self.median = 0.0
        """Of the last steps."""
        self.limit = math.inf
        """A magnitude of the next step leaps where it is beyond this; inf where nothing is."""

    def add(self, magnitude: float) -> None:
        """Take what a step had; finite, 0 or more.

        The limit is `factor` times the median, raised so that right programs stay below it: where
        some steps are of another kind (a second data set, a loss that every tenth step has), to the
        square root of `factor` times the largest of them, which does not look at the steps that
        have been rising until now; where the number has all but vanished, to a hundredth of its
        highest median. A median of 0 has no multiples.
        """
        last = self._last
        last.append(magnitude)
        if len(last) < _FEWEST:
            return
        self.median = statistics.median(last)
        self._highest = max(self._highest, self.median)
        if not self.median:
            self.limit = math.inf
            return
        rising = _RISING * self.median
        before = max(dropwhile(lambda one: one > rising, reversed(last)), default=0.0)
        self.limit = max(
            self._factor * self.median, math.sqrt(self._factor) * before, _LEAST * self._highest
        )
