"""`at:FILE`: a touch makes every rank trace one and the same step. No torch, no collective.
An order of `rankscope capture` is a touch that says how many steps, and with what.

Every rank looks at FILE when a step begins, and sees a touch at a moment of its own. They agree by
entries in a folder that all of them see: the first rank to make an entry decides what it says, and
every other one reads it. Touches are numbered: a rank that slept through one still learns of it.

    0     the time FILE bears before any touch counts, -1 where it does not exist
    1     the first touch: "train 42 1732190000": trace train step 42
    1.1   "stands" where a rank began step 42 first, or "45" where one was too late for it and
          made it step 45 before anybody had begun; then 1.2 is asked for at step 45, and so on
    2     the second touch

So a step is traced by all ranks, or some rank finds out that it came too late, and says so. An
entry is a symbolic link to its text: made in one call, whole or not at all, on every shared disk.

Of an order the entry has the order itself behind the time, as whoever came first read it; it asks
for several steps in a row, of which the first is agreed on. `1.over` says that a rank has ended the
last of them. There is no entry 0: an order counts though it was made before the first step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rankscope.record.call import Mode
from rankscope.run.eventboard import ABSENT, agree, agreed, file_time
from rankscope.run.orders import OVER, STANDS, Order, is_taken_before, order_in

LEAD = 2
"""Steps from the one in which a touch is seen first to the one that all ranks trace: ranks that
wait for each other once a step are never further apart."""
_SKEW_S = 0.5
"""Hosts see an order at times so far apart."""


class _Asked(NamedTuple):
    touch: int
    attempt: int
    order: Order | None


class _Run(NamedTuple):
    touch: int
    mode: Mode
    last: int
    order: Order | None


class TouchedFile:
    """One rank's eye on the file. Nothing here raises: a rank that cannot agree says so, once."""

    def __init__(
        self,
        file: Path,
        folder: Path | None,
        *,
        missed: Callable[[Mode, int, str], None],
        failed: Callable[[str], None],
        is_alone: bool = False,
        is_distant: bool = False,
        holds_orders: bool = False,
    ) -> None:
        """Begin to look; touches before the first rank did so do not count.

        Args:
            folder: where the ranks agree, made if missing; None for touches of a rank alone.
            missed: told of a step that other ranks traced and this one could not: mode, step, why.
            failed: told why touches are no longer answered here.
            is_distant: ranks of other hosts see an order at other times.
            holds_orders: `file` holds orders, and `folder` lies in one made with the first order.
        """
        self._path = str(file)
        self._holds_orders, self._is_distant = holds_orders, is_distant
        self._look = file_time(file)
        self._folder = folder
        self._missed = missed
        self._failed = failed
        self._is_off = False
        self._lead = 0 if is_alone or folder is None else LEAD
        self._begun = dict.fromkeys(Mode, -1)
        """Last step that began here."""
        self._last_planned = dict.fromkeys(Mode, -1)
        self._planned: dict[tuple[Mode, int], list[_Asked]] = {}
        self._runs: list[_Run] = []
        self.asked: tuple[Order, ...] = ()
        self._pace = (0.0, Mode.TRAIN, 0)
        """When a step of this mode began, a second ago or so: how fast steps are."""
        self._touches = 1
        """Number of the next touch."""
        self._seen = ABSENT
        if not holds_orders:
            self._seen = self._look()
            try:
                if folder is not None:
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._seen = int(self._agree("0", str(self._seen)))
            except OSError as error:
                self._give_up(error)
        self._times = {self._seen}

    def begins(self, mode: Mode, step: int) -> bool:
        """Note that a step begins; True where a touch asks for it."""
        self._begun[mode] = step - 1  # the step itself may still be planned
        is_asked = False
        if not self._is_off:
            try:
                if self._is_distant:
                    self._keep_pace(mode, step)
                seen = self._look()
                if seen != self._seen and seen != ABSENT and self._counts(mode):
                    self._seen = seen
                    self._see(seen, mode, step)
                if self._planned or self._runs:
                    self.asked = ()
                    is_asked = self._stands(mode, step)
            except OSError as error:
                self._give_up(error)
        self._begun[mode] = step
        return is_asked

    def expects(self, mode: Mode, step: int) -> bool:
        """True where this step is planned, as far as this rank knows by now."""
        return (mode, step) in self._planned or any(
            run.mode is mode and step <= run.last for run in self._runs
        )

    def close(self) -> None:
        """Say which steps other ranks traced for touches that were never seen from here."""
        if not self._is_off:
            try:
                for run in self._runs:
                    if self._begun[run.mode] >= run.last:
                        self._end(run)
            except OSError as error:
                self._give_up(error)
        number = self._touches
        while (text := self._read(str(number))) is not None:
            mode, step, _, order = _plan(text)
            attempt = 1
            while (answer := self._read(f"{number}.{attempt}")) not in (None, STANDS):
                step, attempt = int(answer or step), attempt + 1
            if answer == STANDS:
                self._miss(mode, step, order, f"{self._what} was not seen here")
            number += 1

    @property
    def _what(self) -> str:
        return "the order" if self._holds_orders else f"the touch of {self._path}"

    def _miss(self, mode: Mode, first: int, order: Order | None, why: str) -> None:
        last = first + (1 if order is None else order.steps) - 1
        for step in range(first, min(last, self._begun[mode]) + 1):
            self._missed(mode, step, why)

    def _counts(self, mode: Mode) -> bool:
        """An eval step answers a touch only where this process has not trained yet."""
        return mode is Mode.TRAIN or self._begun[Mode.TRAIN] < 0

    def _give_up(self, error: OSError) -> None:
        self._is_off = True
        what = "orders" if self._holds_orders else f"touches of {self._path}"
        self._failed(f"{what} are not answered on this rank: {error}")

    def _keep_pace(self, mode: Mode, step: int) -> None:
        """Note how fast steps are: the first step of an order must lie so far ahead that the last
        host to see the order is in time."""
        now = time.monotonic()
        since, of_mode, at = self._pace
        seconds = now - since
        if of_mode is not mode or step < at or seconds > 60:
            self._pace = (now, mode, step)
        elif seconds >= 1:
            self._lead = LEAD + math.ceil((step - at) / seconds * _SKEW_S)
            self._pace = (now, mode, step)
        elif step - at > self._lead:  # so many in less than a second
            self._lead = step - at

    # ------------------------------------------------------------------ agreeing

    def _see(self, seen: int, mode: Mode, step: int) -> None:
        """Take a touch, or an order that ended with no earlier life of the job."""
        if not self._holds_orders or self._folder is None:
            self._learn(seen, "", mode, step)
            return
        order = order_in(Path(self._path).parent)
        if order is None or is_taken_before(self._folder, order.number):
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._learn(order.number, order.text, mode, step)

    def _learn(self, seen: int, words: str, mode: Mode, step: int) -> None:
        """Read the touches others have seen, up to this one; where nobody has seen it, decide."""
        while seen not in self._times:
            ahead = max(step + self._lead, self._last_planned[mode] + 1)
            text = self._agree(str(self._touches), f"{mode.word} {ahead} {seen} {words}".rstrip())
            where, wanted, known, order = _plan(text)
            self._times.add(known)
            self._touches += 1
            self._plan(where, wanted, _Asked(self._touches - 1, 1, order))

    def _plan(self, mode: Mode, step: int, asked: _Asked) -> None:
        """Wait for a step; where it has begun here already, put it off for everybody."""
        touch, attempt, order = asked
        last = 0 if order is None else order.steps - 1
        while step <= self._begun[mode]:
            later = self._begun[mode] + 1 + self._lead
            answer = self._agree(f"{touch}.{attempt}", str(later))
            if answer == STANDS:
                self._miss(mode, step, order, f"this rank saw {self._what} too late")
                self._runs.append(_Run(touch, mode, step + last, order))
                return
            step, attempt = int(answer), attempt + 1
        self._planned.setdefault((mode, step), []).append(_Asked(touch, attempt, order))
        self._last_planned[mode] = max(self._last_planned[mode], step + last)

    def _stands(self, mode: Mode, step: int) -> bool:
        """True where every rank traces this step, or says that it could not."""
        for asked in self._planned.pop((mode, step), ()):
            answer = self._agree(f"{asked.touch}.{asked.attempt}", STANDS)
            if answer == STANDS:
                last = step if asked.order is None else step + asked.order.steps - 1
                self._runs.append(_Run(asked.touch, mode, last, asked.order))
            else:
                self._plan(mode, int(answer), asked._replace(attempt=asked.attempt + 1))
        is_traced = False
        for run in [run for run in self._runs if run.mode is mode]:
            if step > run.last:
                self._runs.remove(run)
                self._end(run)
                continue
            is_traced = True
            if run.order is not None:
                self.asked += (run.order,)
        return is_traced

    def _end(self, run: _Run) -> None:
        if run.order is not None:
            self._agree(f"{run.touch}.{OVER}", str(run.last))

    def _agree(self, name: str, text: str) -> str:
        return text if self._folder is None else agree(self._folder, name, text)

    def _read(self, name: str) -> str | None:
        return None if self._folder is None else agreed(self._folder, name)


def _plan(text: str) -> tuple[Mode, int, int, Order | None]:
    """Take the entry of a touch apart: mode, step, time of the file, order."""
    mode, step, seen, *words = text.split(" ", 3)
    return Mode[mode.upper()], int(step), int(seen), Order.read(words[0]) if words else None
