"""Whether the job stands still on this host, and what its ranks are inside of: answered here alone.

A rank moves when its spool grows and when it ends. A rank is quiet for many reasons: its traced
steps are over, it evaluates, it saves. Only three things say that a record was to come: a module
call that was not left, a collective that the program waits for, and a train step whose optimizer
has not stepped. The last stands in for what no record shows, such as DDP's own reduction in
backward.

Where no rank has moved for the time that was set, and one at least is inside such a thing
(`activity_of`), that is a stall: it and its end are written down (`rankscope.run.jobend`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from rankscope.companion.heldstream import HeldStream
from rankscope.companion.log import log
from rankscope.companion.running.streamtail import RankActivity, activity_of
from rankscope.companion.shipping import Shipment
from rankscope.errors import SpoolError
from rankscope.record.phases import Phase
from rankscope.record.ranks import StreamId, ranks_named
from rankscope.run.folders import RunHeader
from rankscope.run.jobend import Stall, keep_stall, stalls_in
from rankscope.run.locks import is_alive
from rankscope.settings import settings_of_run
from rankscope.spool.streamreader import StreamReader

_LOOK_S = 1.0
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
                found = activity_of(self._reader, definitions, counts_steps=self._counts_steps)
                self._activities = {self._end: found}
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
        is_due = now - self._looked_at >= min(_LOOK_S, self._limit_s / 4)
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
