"""What happens to the ranks of one host: whether they stand still, and what a black box waits for.

A rank moves when its spool grows and when it ends. A rank is quiet for many reasons: its traced
steps are over, it evaluates, it saves. Only three things say that a record was to come: a module
call that was not left, a collective that the program waits for, and a train step whose optimizer
has not stepped. The last stands in for what no record shows, such as DDP's own reduction in
backward. Where no rank has moved for the time that was set, and one at least is inside such a thing
(`activity_of`), that is a stall: it and its end are written down (`rankscope.run.jobstatus`).

The black box of a host sees what happens to its ranks, and has the last steps of all copied. A rank
that ended otherwise than in order, a job that stands still, a touch of the watched file and an
order are seen here; what stands in values is seen by the ranks. All of it goes on one board for
each life of the job (`run.agreements`), with the step at which it was: that is all hosts agree on.
Hosts without a folder that all of them see tell each other by the collector (`hear`).

A box is *quiet* once the ranks of its host have ended in order and nothing was told: nothing is
copied. What they held stays until the collector knows that all hosts are quiet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rankscope.companion.heldstream import HeldStream
from rankscope.companion.running.splitstream import RankActivity, activity_of
from rankscope.companion.shipping import Shipment
from rankscope.companion.waitingrule import JobState
from rankscope.errors import SpoolError
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
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
from rankscope.run.folders import (
    HELD_FOLDER,
    RunHeader,
    read_run_header,
    streams,
)
from rankscope.run.jobstatus import Stall, job_end, keep_stall, stalls_in
from rankscope.run.messages import log
from rankscope.run.processes import is_alive
from rankscope.settings import settings_of_run
from rankscope.spool.recordcolumns import StreamReader

# ---- a job that stands still ---------------------------------------------------------------------

_STALL_LOOK_S = 1.0
_AWAY_S = 5.0
"""A relay that was itself away for longer than that has seen nothing meanwhile."""
_CLOSE_NS = 1_000_000_000
_LAST_WORDS_S = 5.0
"""A rank that writes again goes on if it lives so long after that: one that Ctrl-C ends writes that
it raised, and is gone a moment later."""
_MOST_PLACES = 4


Watchable = Shipment | HeldStream


class _WatchedStream:
    def __init__(self, shipment: Watchable, now: float, *, counts_steps: bool) -> None:
        self._shipment, self._counts_steps = shipment, counts_steps
        self._reader = StreamReader(shipment.folder)
        self._end = 0
        self.is_alive = True
        self.grew_at = self.ended_at = now
        """`ended_at` of a rank that lives is when it was found."""
        self._activities: dict[int, RankActivity] = {}

    def look(self, now: float) -> None:
        if not self.is_alive:
            return
        self.is_alive = is_alive(self._shipment.folder)
        if not self.is_alive:
            self.ended_at = now
        try:
            begin = max(self._end, self._shipment.sent, self._reader.lowest())
            end = self._reader.committed(begin)  # what was sent has been looked at before
        except SpoolError:
            self.grew_at = now  # not known: nobody is said to stand
            return
        finally:
            self._reader.close()
        if end > self._end:
            self._end, self.grew_at = end, now

    def has_all_sent(self) -> bool:
        return self._shipment.has_sent(self._end)

    def activity(self) -> RankActivity:
        if self._end not in self._activities:
            definitions = self._shipment.definitions
            try:
                activity_now = activity_of(
                    self._reader, definitions, counts_steps=self._counts_steps
                )
                self._activities = {self._end: activity_now}
            except SpoolError:
                return RankActivity(written_ns=0, inside="")
            finally:
                self._reader.close()
        return self._activities[self._end]


class StallMonitor:
    """Watches the streams of one host."""

    def __init__(self, run_folder: Path, header: RunHeader, relay: str) -> None:
        """Watch nothing yet; take up the stall that an earlier relay of this host noticed."""
        self._run_folder = run_folder
        self._relay = relay
        settings = settings_of_run(header.settings)
        self._limit_s = settings.stall_seconds
        # A program of one rank may well stop before its optimizer, for its user to look at
        # gradients; and without records of gradients or parameters none says that it has stepped.
        says_steps = not {Phase.GRADS.word, Phase.PARAMS.word}.isdisjoint(settings.phases)
        self._counts_steps = header.world_size > 1 and says_steps
        self._streams: dict[StreamId, _WatchedStream] = {}
        self._looked_at = float("-inf")
        self._noticed_at = time.monotonic()
        self._moved_at = 0.0
        """When a rank was first seen to write again, 0 while none was."""
        self.latest: Stall | None = next(iter(stalls_in(run_folder)[-1:]), None)
        """The last one noticed; its `over_ns` is 0 while it lasts."""
        self._is_taken_up = self._stands

    @property
    def _stands(self) -> bool:
        return self.latest is not None and not self.latest.over_ns

    def look(self, shipments: Mapping[StreamId, Watchable], now: float) -> None:
        """See who moves; cheap, and does nothing most of the time."""
        if not self._limit_s:
            return
        is_due = now - self._looked_at >= min(_STALL_LOOK_S, self._limit_s / 4)
        # not later where the last rank has just gone: soon nobody asks this relay any more
        if not is_due and not (self._stands and not any(s.is_alive for s in shipments.values())):
            return
        away_s, self._looked_at = now - self._looked_at, now
        for stream, shipment in shipments.items():
            if stream not in self._streams:
                watched = _WatchedStream(shipment, now, counts_steps=self._counts_steps)
                self._streams[stream] = watched
        if not self._streams:
            return
        if _AWAY_S < away_s < float("inf"):
            for watched in self._streams.values():
                # the clocks go on by the time that nobody looked: a suspended host is no stall
                watched.grew_at += away_s
        for watched in self._streams.values():
            watched.look(now)
        if self._stands:
            self._look_for_its_end()
        else:
            self._look_for_one(now)

    def _look_for_one(self, now: float) -> None:
        moved_at = max(max(w.grew_at, w.ended_at) for w in self._streams.values())
        if now - moved_at < self._limit_s:
            return
        places: dict[str, list[int]] = {}
        for stream, watched in self._streams.items():
            # a full spool takes no record: its rank may train on, and only seem to stand
            is_watched = watched.is_alive and watched.has_all_sent()
            if is_watched and (inside := watched.activity().inside):
                places.setdefault(inside, []).append(stream.rank)
        if not places:
            return
        listed = [f"{ranks_named(ranks)} in {inside}" for inside, ranks in places.items()]
        if len(listed) > _MOST_PLACES:
            listed[_MOST_PLACES:] = ["..."]
        self._noticed_at, self._moved_at, self._is_taken_up = now, 0.0, False
        self._note(
            Stall(
                host=socket.gethostname(),
                since_ns=self._wall_ns(self._last_ns()),
                noticed_ns=time.time_ns(),
                where=", ".join(listed),
            )
        )

    def _look_for_its_end(self) -> None:
        assert self.latest is not None  # it stands
        streams = self._streams.values()
        has_grown = any(s.is_alive for s in streams if s.grew_at > self._noticed_at)
        if has_grown and not self._is_taken_up:
            self._moved_at = self._moved_at or self._looked_at
            if self._looked_at - self._moved_at < _LAST_WORDS_S:
                return
        has_ended = any(s.ended_at > self._noticed_at for s in streams if not s.is_alive)
        if self._is_taken_up:  # it may have gone on while no relay was there
            is_later = self._wall_ns(self._last_ns()) > self.latest.since_ns + _CLOSE_NS
            has_ended = not any(stream.is_alive for stream in streams)
            has_grown, self._is_taken_up = is_later, False
            self._noticed_at = time.monotonic()
        if has_grown or has_ended:
            over_ns = time.time_ns()
            self._note(dataclasses.replace(self.latest, over_ns=over_ns, is_by_end=not has_grown))

    def _last_ns(self) -> int:
        return max(
            stream.activity().written_ns if stream.is_alive else int(stream.ended_at * 1e9)
            for stream in self._streams.values()
        )

    @staticmethod
    def _wall_ns(monotonic_ns: int) -> int:
        return max(0, time.time_ns() - (time.monotonic_ns() - monotonic_ns))

    def _note(self, stall: Stall) -> None:
        self.latest = stall
        log(stall.sentence(time.time_ns()))
        with contextlib.suppress(SpoolError):  # a full disk: the log has it
            keep_stall(self._run_folder, self._relay, stall)


# ---- the black box -------------------------------------------------------------------------------

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
