"""The black box of one host: sees what happens to its ranks, and has the last steps of all copied.

A rank that ended otherwise than in order, a job that stands still, a touch of the watched file and
an order are seen here; what stands in values is seen by the ranks. All of it goes on one board for
each life of the job (`run.agreements`), with the step at which it was: that is all hosts agree on.
Hosts without a folder that all of them see tell each other by the collector (`hear`).

A box is *quiet* once the ranks of its host have ended in order and nothing was told: nothing is
copied. What they held stays until the collector knows that all hosts are quiet.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rankscope.companion.heldstream import HeldStream
from rankscope.companion.waitingrule import JobState
from rankscope.errors import SpoolError
from rankscope.record.call import Mode
from rankscope.record.ranks import EndReason, StreamId, ranks_named
from rankscope.record.stepselection import StepSelection, Trigger
from rankscope.run.agreements import (
    ABSENT,
    EventBoard,
    Happening,
    Order,
    Window,
    event_folder,
    file_time,
)
from rankscope.run.folders import HELD_FOLDER, RunHeader, read_run_header, streams
from rankscope.run.jobstatus import Stall, job_end
from rankscope.run.messages import log
from rankscope.settings import settings_of_run

_LOOK_S = 0.1
_SETTLED_S = 3.0
"""How long all ranks have to be gone where no launcher says that the job is over."""
_WORDS = {EndReason.LOST: "killed, or gone without a word", EndReason.RAISED: "raised"}
"""How ranks end before which something happened."""


def black_box_of(run_folder: Path, header: RunHeader) -> BlackBox | None:
    """Return the black box of a host's run; None where its ranks hold nothing back."""
    selection = settings_of_run(header.settings).steps
    return BlackBox(run_folder, header, selection) if selection.last else None


def copy_what_is_held(run_folder: Path) -> None:
    """Copy the last steps of ranks whose relay is gone, or raise SpoolError."""
    box = black_box_of(run_folder, read_run_header(run_folder))
    if box is None:
        return
    try:
        while box.look(time.monotonic(), JobState.OVER, None) or box.quiet_ranks:
            if box.quiet_ranks:
                box.hear(Trigger.RECOVERED)
        if not box.is_settled:
            raise SpoolError(f"{run_folder}: {box.trouble or 'a rank is still at work'}")
    finally:
        box.close()


class BlackBox:
    """All held streams of one host."""

    def __init__(self, run_folder: Path, header: RunHeader, selection: StepSelection) -> None:
        self._run_folder, self._header = run_folder, header
        self._steps, self._file = selection.last, selection.file
        self._look_at_file: Callable[[], int] | None = None
        self.streams: dict[StreamId, HeldStream] = {}
        self._boards: dict[int, EventBoard] = {}
        self._judged: set[StreamId] = set()
        self._logged_events: dict[int, int] = {}
        self._looked_at = float("-inf")
        self._alive_at = time.monotonic()
        self.order: Order | None = None
        self.answer = ""
        """What was done about it: "steps 16-20", as far as this host is asked."""
        self.trouble = ""
        self.trouble_at: float | None = None
        self.quiet_ranks = 0
        """Ranks of this host where all of them ended in order and nothing happened; else 0."""

    @property
    def has_alive(self) -> bool:
        """True while a rank of this host lives."""
        return any(stream.is_alive for stream in self.streams.values())

    @property
    def is_settled(self) -> bool:
        """True where every copy is whole, or nothing is to be copied."""
        return bool(self.quiet_ranks) or all(stream.is_done for stream in self.streams.values())

    def happened(self) -> list[tuple[int, str]]:
        """Return what was told on this host so far: the life of the job, and the board's entry."""
        boards = self._boards.items()
        return [(life, event.entry) for life, board in boards for event in board.events()]

    def hear(self, trigger: Trigger, text: str = "") -> None:
        """Tell what happened elsewhere at the furthest step of this host, or raise OSError."""
        if self.streams:
            self._tell(trigger, self._of_last_life(), text=text)
            self.quiet_ranks, self._looked_at = 0, float("-inf")

    def hear_entry(self, life: int, entry: str) -> None:
        """Take over an entry of another host's board; raise ValueError for none, or OSError."""
        board = self._boards.setdefault(life, self._board(life))
        event = Happening.read(entry)
        if event not in board.events():
            board.tell(event)
        self.quiet_ranks = 0

    def look(self, now: float, job: JobState, stall: Stall | None) -> bool:
        """See what happened, and copy what is asked for; True where there is more to copy now."""
        if now - self._looked_at < _LOOK_S:
            return False
        self._looked_at = now
        has_more, trouble = False, ""
        try:
            self._discover()
            if self.has_alive:
                self._alive_at = now
            is_final = not self.has_alive and self._is_over(job, now)
            self._see_ends()
            self._see_stall(stall)
            self._see_touch()
            self._see_order()
            if is_final:
                self._see_untold()
                self._see_interruption()
            # read behind all that may have told: what is seen in this look is copied in it
            windows = {life: self._windows(life) for life in self._boards}
            # only once all is over: until then something may still happen
            is_quiet = is_final and not any(windows.values())
            self.quiet_ranks = len({stream.rank for stream in self.streams}) if is_quiet else 0
            for stream, held_stream in self.streams.items() if not is_quiet else ():
                try:
                    has_more |= held_stream.copy(windows[stream.incarnation], is_final=is_final)
                except (OSError, SpoolError) as error:  # a full disk: tried again
                    trouble = str(error)
        except (OSError, SpoolError) as error:
            trouble = str(error)
        if trouble and trouble != self.trouble:
            log(f"black box: {trouble}")
        if bool(trouble) != bool(self.trouble):
            self.trouble_at = now if trouble else None
        self.trouble = trouble
        if has_more:
            self._looked_at = float("-inf")
        return has_more

    def close(self) -> None:
        """Leave every copy as it is."""
        for stream in self.streams.values():
            stream.close()

    def _is_over(self, job: JobState, now: float) -> bool:
        if job is JobState.UNKNOWN:
            return bool(self.streams) and now - self._alive_at > _SETTLED_S
        return job is JobState.OVER

    def _discover(self) -> None:
        folder = self._run_folder / HELD_FOLDER
        for stream in streams(folder) if folder.is_dir() else ():
            if stream not in self.streams:
                self.streams[stream] = HeldStream(self._run_folder, stream)
                self._boards.setdefault(stream.incarnation, self._board(stream.incarnation))

    def _board(self, life: int) -> EventBoard:
        return EventBoard(event_folder(self._run_folder, self._header, life))

    def _windows(self, life: int) -> list[Window]:
        events = self._boards[life].events()
        for event in events[self._logged_events.get(life, 0) :]:
            log(f"{event.text} at {event.mode.word} step {event.step}")
        self._logged_events[life] = len(events)
        return [event.window(self._steps) for event in events]

    def _of_last_life(self, *, alive: bool = False) -> dict[StreamId, HeldStream]:
        life = max((stream.incarnation for stream in self.streams), default=0)
        return {
            stream: held_stream
            for stream, held_stream in self.streams.items()
            if stream.incarnation == life and (held_stream.is_alive or not alive)
        }

    def _tell(
        self, trigger: Trigger, ranks: Mapping[StreamId, HeldStream], /, **fields: object
    ) -> None:
        """Tell, unless it was told, what happened to ranks of one life; at their furthest step."""
        if not ranks:
            return
        board = self._boards[next(iter(ranks)).incarnation]
        text = trigger.text(**fields)
        if not board.was_told(trigger, text):
            mode, step = _furthest(ranks)
            board.tell(Happening(trigger=trigger, mode=mode, step=step, text=text))

    def _see_ends(self) -> None:
        ended: dict[int, dict[StreamId, HeldStream]] = {}
        for stream, copy in self.streams.items():
            if stream not in self._judged and not copy.is_done and not copy.is_alive:
                if copy.ending() in _WORDS:
                    ended.setdefault(stream.incarnation, {})[stream] = copy
                else:
                    self._judged.add(stream)
        for those in ended.values():
            causes = []
            for ending, words in _WORDS.items():
                ranks = sorted(s.rank for s, copy in those.items() if copy.ending() is ending)
                causes += [f"{ranks_named(ranks)} {words}"] * bool(ranks)
            self._tell(Trigger.ENDED, those, ranks=", ".join(causes))
            # behind the telling: a board that a full disk refuses is told again with the next look
            self._judged.update(those)

    def _see_untold(self) -> None:
        for stream, held_stream in self.streams.items():
            for event in held_stream.untold():
                if event not in self._boards[stream.incarnation].events():
                    self._boards[stream.incarnation].tell(event)

    def _see_interruption(self) -> None:
        name = job_end([self._header.out]).signal
        if name and not any(board.events() for board in self._boards.values()):
            self._tell(Trigger.INTERRUPTED, self._of_last_life(), signal=name)

    def _see_stall(self, stall: Stall | None) -> None:
        if stall is not None and not stall.over_ns:
            alive = self._of_last_life(alive=True)
            ranks = ranks_named(sorted(stream.rank for stream in alive))
            self._tell(Trigger.STALLED, alive, ranks=ranks)

    def _see_touch(self) -> None:
        if self._file is None or not self.streams:
            return
        if self._look_at_file is None:
            self._look_at_file = file_time(self._file)
        touched_at = self._look_at_file()
        board = self._boards[max(stream.incarnation for stream in self.streams)]
        if touched_at not in (ABSENT, board.first_time(touched_at)):
            alive = self._of_last_life(alive=True)
            self._tell(Trigger.TOUCHED, alive, file=self._file, time=touched_at)

    def _see_order(self) -> None:
        if self.order is None or not self.streams:
            return
        text = Trigger.ORDERED.text(number=self.order.number)
        if not any(board.was_told(Trigger.ORDERED, text) for board in self._boards.values()):
            self._tell(Trigger.ORDERED, self._of_last_life(alive=True), number=self.order.number)
        for board in self._boards.values():
            for event in board.events():
                if event.text == text:
                    first = max(0, event.step - self._steps)
                    self.answer = f"{event.mode.word} {first} {event.step} {self.order.number}"


def _furthest(held_streams: Mapping[StreamId, HeldStream]) -> tuple[Mode, int]:
    steps = []
    for held_stream in held_streams.values():
        with contextlib.suppress(SpoolError):
            steps.append(held_stream.last_step())
    return max(steps, key=lambda step: (-step[0], step[1]), default=(Mode.TRAIN, 0))
