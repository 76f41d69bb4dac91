"""The write side of a rank that holds its last steps back: a stream that lets go of its own begin.

Two streams lie in one folder. The *ring* takes the records of steps, and with them the definitions
that grow with the number of steps (shapes, collectives). The *lasting stream* takes what is never
let go: who this rank is, its modules, their first values.

The ring is let go in *turns*. A turn is a run of steps that need no definition of an earlier turn:
the caller defines everything again at its begin. It begins with the first step that begins in a
segment. The oldest turn goes once none of its steps is among those to be held, and none is younger
than `_GRACE_NS`, which a relay may take to notice what happened. A full ring lets go earlier.

A turn that an event asks for stays until it is copied. While such a turn fills the ring, new
records are dropped, and counted; else only where a single turn does not fit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

from rankscope.errors import SpoolError
from rankscope.record.call import Mode
from rankscope.record.ranks import EndReason
from rankscope.run.agreements import MOST_AHEAD, EventBoard, Window, copied_so_far
from rankscope.run.files import Place, Reach, Removable, may_remove
from rankscope.run.folders import KEPT_FOLDER, segment_path
from rankscope.spool.recordformat import CELL_BYTES
from rankscope.spool.writer import SpoolWriter

_SEGMENT_BYTES: Final = 4 << 20
_GRACE_NS: Final = 5_000_000_000
_MOST_UNTOLD: Final = 32
_TURNS: Final = 8
"""A turn takes this part of the ring, at least a segment; more where one step is larger."""


class _Turn(NamedTuple):
    """Where a turn begins in the ring, and its first step: counted here, and as the rank counts."""

    offset: int
    number: int
    begin_ns: int
    mode: Mode
    step: int

    def is_asked(self, after: _Turn, window: Window) -> bool:
        """True if the window may ask for a record of this turn, which `after` follows: values that
        an accelerator delivers late are recorded in the step after theirs."""
        if window.mode is Mode.EVAL:  # eval steps count before the first train step alone
            is_past = after.mode is Mode.EVAL and after.step <= window.first
            return self.mode is Mode.EVAL and self.step <= window.last + 1 and not is_past
        lowest = self.step if self.mode is Mode.TRAIN else 0
        has_trained = after.mode is Mode.TRAIN and after.step > window.first
        return has_trained and lowest <= window.last + 1


class RingWriter(SpoolWriter):
    """One rank's last steps."""

    def __init__(self, folder: Path, *, limit_bytes: int, steps: int, board: EventBoard) -> None:
        """Make both streams. `limit_bytes` is for both together, and for a relay's copies of them;
        `steps`: whole steps to hold beside the running one; `board` has the events that ask for
        steps. Raises SpoolError as `SpoolWriter` does."""
        # half of the limit: what a relay copies out of the ring lies on the same disk
        ring_bytes = limit_bytes // 2
        super().__init__(folder, limit_bytes=ring_bytes, segment_bytes=_SEGMENT_BYTES)
        try:
            self.lasting_stream = SpoolWriter(
                folder / KEPT_FOLDER, limit_bytes=limit_bytes // 8, segment_bytes=_SEGMENT_BYTES
            )
        except SpoolError:
            super().close(EndReason.SWITCHED_OFF)
            raise
        self._steps = steps
        self._board = board
        self._untold: list[Window] = []
        """Requests of this rank that could not be put on the board yet."""
        self._turn_segments = max(1, ring_bytes // _TURNS // self.segment_bytes)
        self._begun_in = 0
        self._turns: deque[_Turn] = deque([_Turn(0, 0, time.monotonic_ns(), Mode.EVAL, 0)])
        self._count = 0
        self._has_trained = False
        self._letting_go = threading.Lock()
        """Never waited for: a thread that finds it taken has nothing to do."""
        self._freed = 0

    def hold(self, window: Window) -> bool:
        """Keep steps that the board could not take to the end; False where too many are kept so."""
        has_room = len(self._untold) < _MOST_UNTOLD
        if has_room:
            self._untold.append(window)
        return has_room

    def begin_step(self, mode: Mode, step: int) -> bool:
        """Note that a step has begun, with the record written last; True where a turn begins with
        it: the caller then defines everything again.

        Train steps count, and eval steps of a program that has not trained.
        """
        if mode is Mode.TRAIN:
            self._has_trained = True
        elif self._has_trained:
            return False
        self._count += 1
        now = time.monotonic_ns()
        # the STEP record has just been written, and takes one cell
        at = max(0, self.committed_bytes - CELL_BYTES)
        index, begun_in = at // self.segment_bytes, self._begun_in
        length = index - self._turns[-1].offset // self.segment_bytes
        is_new = index > begun_in and length >= self._turn_segments
        self._begun_in = index
        if is_new:
            self._turns.append(_Turn(at, self._count, now, mode, step))
        # other ranks may be ahead: what they ask for has to be here as well
        needed = self._count - self._steps - MOST_AHEAD
        while (
            len(self._turns) > 1
            and self._turns[1].number <= needed
            and now - self._turns[1].begin_ns > _GRACE_NS
            and self._let_go()
        ):
            pass
        return is_new

    def close(self, reason: EndReason = EndReason.EXIT) -> None:
        """Write END in both streams; the ring's, written last, says that all records are there."""
        self.hand_on()  # an observer may have something to write in `lasting_stream`
        self.lasting_stream.close(reason)
        super().close(reason)

    def _let_go(self) -> bool:
        """Free the oldest turn; False where there is no other turn, or it has to stay."""
        if not self._letting_go.acquire(blocking=False):
            return False
        try:
            # the running turn never goes: its definitions are those of the step that is written now
            if len(self._turns) < 2 or not may_remove(Removable.TURN, self._place_of_oldest()):
                return False
            # forgotten before its files go: nobody may count on a segment that is being removed
            self._turns.popleft()
            end = self._turns[0].offset // self.segment_bytes
            for index in range(self._freed, end):
                segment_path(self.folder, index).unlink(missing_ok=True)
            self._freed = max(self._freed, end)
            return True
        finally:
            self._letting_go.release()

    def _place_of_oldest(self) -> Place:
        oldest, after = self._turns[0], self._turns[1]
        windows = [event.window(self._steps) for event in self._board.events()]
        asked = [n for n, window in enumerate(windows) if oldest.is_asked(after, window)]
        is_untold = any(oldest.is_asked(after, window) for window in self._untold)
        copied, offset = copied_so_far(self.folder) if asked else (0, 0)
        # the copy says how many requests it knows and how far it read: both have to cover this turn
        is_copied = all(n < copied for n in asked) and after.offset <= offset and not is_untold
        return Place(
            reach=Reach.COPIED if is_copied else Reach.NOWHERE,
            is_asked=bool(asked) or is_untold,
            has_writer=True,
        )

    def _refresh_data_end(self) -> None:
        self._make_segment_free()
        super()._refresh_data_end()

    def _roll_over(self) -> bool:
        self._make_segment_free()
        return super()._roll_over()

    def _make_segment_free(self) -> None:
        while sum(segment.exists() for segment in self._segments) >= self._segments_allowed:
            if not self._let_go():
                return
