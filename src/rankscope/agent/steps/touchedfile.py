"""`at:FILE`: a touch makes every rank trace one and the same step. No torch, no collective.

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
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rankscope.record.call import Mode
from rankscope.run.eventboard import ABSENT, agree, agreed, file_time

__all__ = ["LEAD", "TouchedFile"]

LEAD = 2
"""Steps between the first rank that sees a touch and the step that all of them trace: ranks that
wait for each other once a step are never further apart.
"""
_STANDS = "stands"


class TouchedFile:
    """One rank's eye on the file. Nothing here raises: a rank that cannot agree says so, once."""

    def __init__(
        self,
        file: Path,
        folder: Path | None,
        *,
        missed: Callable[[Mode, int, str], None],
        failed: Callable[[str], None],
    ) -> None:
        """Begin to look; touches before the first rank did so do not count.

        Args:
            file: the file whose touches count.
            folder: where the ranks agree, made where it is missing; None for a rank that is alone.
            missed: told of a step that other ranks traced and this one could not: mode, step, why.
            failed: told why touches are no longer answered here.
        """
        self._path = str(file)
        self._look = file_time(file)
        self._folder = folder
        self._missed = missed
        self._failed = failed
        self._is_off = False
        self._lead = LEAD if folder is not None else 0
        self._begun = dict.fromkeys(Mode, -1)
        """Last step that began here."""
        self._last_planned = dict.fromkeys(Mode, -1)
        self._planned: dict[tuple[Mode, int], list[tuple[int, int]]] = {}
        """(mode, step) -> (touch, attempt) that ask for it."""
        self._touches = 1
        """Number of the next touch."""
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
                time = self._look()
                if time != self._seen and time != ABSENT and self._counts(mode):
                    self._seen = time
                    self._learn(time, mode, step)
                is_asked = bool(self._planned) and self._stands(mode, step)
            except OSError as error:
                self._give_up(error)
        self._begun[mode] = step
        return is_asked

    def expects(self, mode: Mode, step: int) -> bool:
        """True where this step is planned, as far as this rank knows by now."""
        return (mode, step) in self._planned

    def close(self) -> None:
        """Say which steps other ranks traced for touches that were never seen from here."""
        number = self._touches
        while (text := self._read(str(number))) is not None:
            mode, step, _ = _plan(text)
            attempt = 1
            while (answer := self._read(f"{number}.{attempt}")) not in (None, _STANDS):
                step, attempt = int(answer or step), attempt + 1
            if answer == _STANDS and step <= self._begun[mode]:
                self._missed(mode, step, f"the touch of {self._path} was not seen here")
            number += 1

    def _counts(self, mode: Mode) -> bool:
        """An eval step answers a touch only where this process has not trained yet."""
        return mode is Mode.TRAIN or self._begun[Mode.TRAIN] < 0

    def _give_up(self, error: OSError) -> None:
        self._is_off = True
        self._failed(f"touches of {self._path} are not answered on this rank: {error}")

    # ------------------------------------------------------------------ agreeing

    def _learn(self, time: int, mode: Mode, step: int) -> None:
        """Read the touches others have seen, up to this one; where nobody has seen it, decide."""
        while time not in self._times:
            ahead = max(step + self._lead, self._last_planned[mode] + 1)
            text = self._agree(str(self._touches), f"{mode.word} {ahead} {time}")
            where, wanted, seen = _plan(text)
            self._times.add(seen)
            self._touches += 1
            self._plan(where, wanted, self._touches - 1, 1)

    def _plan(self, mode: Mode, step: int, touch: int, attempt: int) -> None:
        """Wait for a step; where it has begun here already, put it off for everybody."""
        while step <= self._begun[mode]:
            later = self._begun[mode] + 1 + self._lead
            answer = self._agree(f"{touch}.{attempt}", str(later))
            if answer == _STANDS:
                self._missed(mode, step, f"this rank saw the touch of {self._path} too late")
                return
            step, attempt = int(answer), attempt + 1
        self._planned.setdefault((mode, step), []).append((touch, attempt))
        self._last_planned[mode] = max(self._last_planned[mode], step)

    def _stands(self, mode: Mode, step: int) -> bool:
        """True where every rank traces this step, or says that it could not."""
        is_traced = False
        for touch, attempt in self._planned.pop((mode, step), ()):
            answer = self._agree(f"{touch}.{attempt}", _STANDS)
            if answer == _STANDS:
                is_traced = True
            else:
                self._plan(mode, int(answer), touch, attempt + 1)
        return is_traced

    def _agree(self, name: str, text: str) -> str:
        """Return what the first rank said under this name."""
        return text if self._folder is None else agree(self._folder, name, text)

    def _read(self, name: str) -> str | None:
        return None if self._folder is None else agreed(self._folder, name)


def _plan(text: str) -> tuple[Mode, int, int]:
    """Take the entry of a touch apart: mode, step, time of the file."""
    mode, step, time = text.split(" ")
    return Mode[mode.upper()], int(step), int(time)
