"""What a companion does for the ranks of its host: it finds their streams in the run folder, sends
them on, frees what arrived, and sees whether the job stands still here.

It keeps no state of its own. Over a socket it is one side of the protocol; in a trace folder that
this host sees it writes replicas and end markers itself, with the collector's own code (`links`).

A rank moves when its spool grows and when it ends. A rank is quiet for many reasons: its traced
steps are over, it evaluates, it saves. Only three things say that a record was to come: a module
call that was not left, a collective that the program waits for, and a train step whose optimizer
has not stepped. The last stands in for what no record shows, such as DDP's own reduction in
backward. Where no rank has moved for the time that was set, and one at least is inside such a thing
(`activity_of`), that is a stall: it and its end are written down (`rankscope.run.jobstatus`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rankscope.companion.blackbox import black_box_of
from rankscope.companion.cleanup import is_in_tree, remove_run
from rankscope.companion.heldstream import HeldStream
from rankscope.companion.links import FolderLink, Link, SocketLink
from rankscope.companion.running.splitstream import RankActivity, activity_of
from rankscope.companion.shipping import Shipment
from rankscope.companion.waitingrule import HostState, JobState
from rankscope.errors import SpoolError
from rankscope.record.phases import Phase
from rankscope.record.ranks import StreamId, ranks_named
from rankscope.run.agreements import (
    ABSENT,
    Order,
    OrderSeen,
    file_time,
    order_in,
    orders_come_to,
    put_order,
    tell_seen,
)
from rankscope.run.folders import (
    JOB_OVER_NAME,
    LAUNCHER_LOCK_NAME,
    ORDER_NAME,
    REPLICA_FOLDER,
    TRACE_NAME,
    RunHeader,
    is_held,
    relay_name,
    streams,
)
from rankscope.run.jobstatus import Stall, keep_stall, stalls_in
from rankscope.run.messages import log
from rankscope.run.prepare import Collection
from rankscope.run.processes import ExitOutcome, is_alive, is_process_alive
from rankscope.settings import settings_of_run
from rankscope.spool.recordcolumns import StreamReader

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


_DISCOVER_S = 0.1
_PATIENCE_S = 300.0
"""How long a relay whose ranks have all ended waits for a collector it does not hear."""
_ABANDONED_S = 30.0
"""The same where no launcher is left to start that collector again."""
_SILENT_S = 2.0
_FIRST_STREAM_S = 3600.0
_ORDERS_S = 0.2


class OrderWatch:
    """Hands orders of `rankscope capture` from the trace folder to the run folder, where ranks
    look. Where a relay sees no trace folder, `rankscope capture` writes into the run folder."""

    def __init__(self, run_folder: Path, header: RunHeader, relay: str) -> None:
        self._run_folder, self._out, self._relay = run_folder, header.out, relay
        self._folder = orders_come_to(run_folder, header)
        self._is_elsewhere = Collection.of_run(header).is_elsewhere
        self._file_time = file_time(self._folder / ORDER_NAME)
        self._seen = ABSENT
        self._looked_at = float("-inf")
        self._said: OrderSeen | None = None
        self._trouble = ""
        self.order: Order | None = None

    def look(self, now: float, streams: Iterable[StreamId], note: str = "") -> None:
        """Hand an order to the ranks, and say that it was seen; `note`: by a black box."""
        if now - self._looked_at < _ORDERS_S:
            return
        self._looked_at = now
        try:
            self._take()
            if self.order is not None and not self._is_elsewhere:
                self._say(self.order, streams, note)
        except SpoolError as error:  # a full disk: tried again
            if str(error) != self._trouble:
                log(f"an order was not handed on: {error}")
            self._trouble = str(error)

    def _take(self) -> None:
        changed_at = self._file_time()
        if changed_at in (ABSENT, self._seen):
            return
        order = order_in(self._folder)
        if order is None:
            path = self._folder / ORDER_NAME
            log(f"{path} is not an order, and is ignored: use rankscope capture")
        # written once: a new time of the same file has every rank read it again
        elif order_in(self._run_folder) != order:
            put_order(self._run_folder, order)
            log(f"handed an order to the ranks: {order.text}")
        self._seen = changed_at
        self.order = order or self.order

    def _say(self, order: Order, streams: Iterable[StreamId], note: str) -> None:
        ranks = tuple(sorted({stream.rank for stream in streams}))
        notice = OrderSeen(number=order.number, host=socket.gethostname(), ranks=ranks, told=note)
        if notice != self._said and (self._out / REPLICA_FOLDER).is_dir():  # gone with its job
            tell_seen(self._out, self._relay, notice)
            self._said = notice


class Relay:
    """The streams of one host on their way, a turn at a time."""

    def __init__(
        self, run_folder: Path, header: RunHeader, is_stopped: Callable[[], bool], *, is_alone: bool
    ) -> None:
        """Send nothing yet, or raise RankscopeError where the other side cannot be reached.

        Args:
            run_folder: of this host.
            header: its `run.json`.
            is_stopped: true once somebody asked for an end (SIGTERM): as if the job were over.
            is_alone: another process gathers the run, and may never come.
        """
        self._run_folder = run_folder
        self._header = header
        self._settings = settings_of_run(header.settings)
        self._is_stopped = is_stopped
        self.is_alone = is_alone
        self._shipments: dict[StreamId, Shipment] = {}
        self._discovered_at = float("-inf")
        self._alive_at = time.monotonic()
        self._job = JobState.UNKNOWN
        self._is_over = False
        """What others were told last of a job that holds steps back."""
        self._tree = header.out / TRACE_NAME
        collection, name = Collection.of_run(header), relay_name(run_folder)
        self._has_own_chunks = collection.is_elsewhere
        self._stalls = StallMonitor(run_folder, header, name)
        self._box = black_box_of(run_folder, header)
        self._orders = OrderWatch(run_folder, header, name)
        self._link: Link
        if collection.is_elsewhere:
            self._link = SocketLink(header, name, self._box)
        else:
            self._link = FolderLink(header, name, self._box, is_shared=collection.is_shared)
        self.outcome: ExitOutcome | None = None

    @property
    def state(self) -> HostState | None:
        """The latest state that was sent of this host."""
        return self._link.state

    def wait(self, timeout_s: float) -> None:
        """Wait for an answer, or for time to pass."""
        self._link.wait(timeout_s)

    def close(self, outcome: ExitOutcome) -> None:
        """Leave; of a finished run remove what this host has, once what it sent is on disk."""
        # asked before the link is closed, and nothing is removed before it is answered
        is_durable = outcome is ExitOutcome.DONE and self._link.is_on_disk()
        is_quiet = self._link.is_done and self._link.is_quiet
        self._link.close()
        if self._box is not None:
            self._box.close()
        for shipment in self._shipments.values():
            shipment.reader.close()
            if shipment.chunks is not None:
                shipment.chunks.close()
        if is_durable:
            self._clean(is_quiet=is_quiet)
        else:
            log(f"the records of this host stay in {self._run_folder}")

    def turn(self) -> bool:
        """Do what can be done at once; True where that was anything."""
        now = time.monotonic()
        self._discover(now)
        box, link = self._box, self._link
        self._stalls.look(self._shipments if box is None else box.streams, now)
        link.stall = self._stalls.latest
        if box is None:
            self._orders.look(now, self._shipments)
        else:
            self._orders.look(now, box.streams, box.answer)
            box.order = self._orders.order
        # the box before the exchange: what it copies is shipped in the same turn
        was_busy = box is not None and box.look(now, self._job, link.stall)
        was_busy = link.exchange(self._shipments, now, self._told_job()) or was_busy
        if not was_busy:
            self.outcome = self._outcome(now)
        return was_busy

    def _outcome(self, now: float) -> ExitOutcome | None:
        link = self._link
        if link.is_done and self.is_alone:  # else who gathers in this process says it
            return ExitOutcome.DONE
        if link.rejection:
            log(link.rejection)
            return ExitOutcome.REJECTED
        # of a job that goes on it is no reason to leave: the disk may have room again
        if self._has_no_room(now):
            log(f"the job is over, and {self._tree.parent} cannot be written")
            return ExitOutcome.NO_ROOM
        if not self.is_alone:
            return None
        is_silent = now - link.heard_at > _SILENT_S
        if is_silent and os.path.exists(self._tree) and not self._has_alive():
            return ExitOutcome.DONE  # the collector may have gone before its Done arrived
        silent_s = now - max(link.heard_at, self._alive_at)
        if silent_s > _SILENT_S and self._has_alive():
            self._alive_at = now  # as long as a rank lives nobody is waited for in vain
            return None
        is_launched = self._job is JobState.LAUNCHED
        if link.strangeness and silent_s > _ABANDONED_S and not is_launched:
            log(f"nothing was sent: {link.strangeness}")
            return ExitOutcome.STRANGE
        if self._is_abandoned(silent_s):
            log(f"no collector for {silent_s:.0f} s")
            return ExitOutcome.UNFINISHED if self._shipments else ExitOutcome.DONE
        has_any = self._shipments or (self._box is not None and self._box.streams)
        if not has_any and now - self._alive_at > _FIRST_STREAM_S:
            log("no rank ever traced")
            return ExitOutcome.UNFINISHED
        return None

    def _has_no_room(self, now: float) -> bool:
        since = self._link.trouble_at
        if since is None or self._job is not JobState.OVER or self._link.is_done:
            return False
        return now - since >= self._settings.drain_seconds and not self._has_alive()

    def _is_abandoned(self, silent_s: float) -> bool:
        is_over = self._job is JobState.OVER
        if is_over and not self._link.is_reached:  # who listens may be building the tree
            return silent_s > min(max(self._settings.finish_seconds, _SILENT_S), _PATIENCE_S)
        return silent_s > _PATIENCE_S

    def _told_job(self) -> JobState:
        """Return the state for others: the job is not over while a black box has more to say."""
        if self._box is None or self._job is not JobState.OVER:
            return self._job
        since = self._box.trouble_at
        if since is not None and time.monotonic() - since > self._settings.finish_seconds:
            return JobState.OVER  # the trace is built without, and the run folder stays
        if self._box.quiet_ranks:
            return JobState.OVER
        shipments = [self._shipments.get(stream) for stream in self._box.streams]
        is_told = all(s is not None and (s.is_open or s.is_done) for s in shipments)
        # a stream that a full disk refuses is opened again and again: said once, it stays said
        self._is_over = self._box.is_settled and (self._is_over or is_told)
        return JobState.OVER if self._is_over else JobState.LAUNCHED

    def _has_alive(self) -> bool:
        if self._box is not None and self._box.has_alive:
            return True
        return any(is_alive(shipment.folder) for shipment in self._shipments.values())

    def _discover(self, now: float) -> None:
        if now - self._discovered_at < _DISCOVER_S:
            return
        self._discovered_at = now
        self._job = self._job_state()
        folder, has_own_chunks = self._run_folder, self._has_own_chunks
        for stream in sorted({*streams(folder)} - self._shipments.keys()):
            self._shipments[stream] = Shipment(folder, stream, has_own_chunks=has_own_chunks)

    def _job_state(self) -> JobState:
        if self._is_stopped() or (self._run_folder / JOB_OVER_NAME).exists():
            return JobState.OVER
        # locks and not process numbers: a number may be another process by now, a lock goes with
        # its holder
        lock = self._run_folder / LAUNCHER_LOCK_NAME
        if lock.exists():  # a launcher of ours holds it while it lives
            if is_held(lock):
                return JobState.LAUNCHED
            return JobState.UNKNOWN if self._has_alive() else JobState.OVER
        agent = self._header.agent
        if not agent:
            return JobState.UNKNOWN
        if is_process_alive(agent):  # it restarts ranks while it has restarts left for them
            streams_here = [*self._shipments, *(() if self._box is None else self._box.streams)]
            life = max((stream.incarnation for stream in streams_here), default=0)
            return JobState.LAUNCHED if life < self._header.max_restarts else JobState.UNKNOWN
        return JobState.UNKNOWN if self._has_alive() else JobState.OVER

    def _clean(self, *, is_quiet: bool) -> None:

        def is_delivered(stream: StreamId) -> bool:
            shipment = self._shipments.get(stream)
            is_shipped = shipment is not None and shipment.is_delivered()
            return is_shipped or is_in_tree(self._run_folder, stream, self._tree)

        is_quiet = is_quiet and self._box is not None and self._box.quiet_ranks > 0
        undelivered = remove_run(self._run_folder, is_delivered, is_quiet=is_quiet)
        if undelivered is not None:
            log(f"{undelivered.name} was not finished: kept in {self._run_folder}")
