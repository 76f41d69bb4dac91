"""The companion of one host: it sends on what the ranks of its host record, and on the head host it
gathers the run too, and has the tree built.

Its `Relay` finds the streams of the ranks in the run folder, sends them on and frees what arrived.
It keeps no state of its own. Over a socket it is one side of the protocol; in a trace folder that
this host sees it writes replicas and end markers itself, with the collector's own code (`links`).

A collector that was started by hand has the trace folder for its run folder, and no ranks of its
own.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rankscope.companion.cleanup import is_in_tree, remove_run
from rankscope.companion.gathering import LOOK_S, Gathering, Observer, Turns
from rankscope.companion.hostwatch import StallMonitor, black_box_of
from rankscope.companion.links import FolderLink, Link, SocketLink
from rankscope.companion.shipping import Shipment
from rankscope.companion.waitingrule import HostState, JobState
from rankscope.errors import FolderBusyError, SpoolError
from rankscope.record.ranks import StreamId
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
    COMPANION_LOCK_NAME,
    JOB_OVER_NAME,
    LAUNCHER_LOCK_NAME,
    ORDER_NAME,
    REPLICA_FOLDER,
    RUN_NAME,
    TRACE_NAME,
    FolderLock,
    RunHeader,
    is_held,
    read_run_header,
    relay_name,
    streams,
)
from rankscope.run.messages import log
from rankscope.run.prepare import Collection
from rankscope.run.processes import (
    ExitOutcome,
    is_alive,
    is_process_alive,
)
from rankscope.settings import settings_of_run

_IDLE_S = 0.02
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


class HostCompanion:
    """What a host does for its own ranks, and where it is the head for the run, by turns."""

    def __init__(
        self, run_folder: Path, is_stopped: Callable[[], bool], observer: Observer | None = None
    ) -> None:
        """Take the run folder.

        Args:
            run_folder: of the host; of a collector by hand its trace folder.
            is_stopped: true once somebody asked for an end (SIGTERM).
            observer: told how far the gathering is.

        Raises:
            FolderBusyError: another one is at work there.
            SpoolError: it cannot be used.
        """
        if not run_folder.is_dir():
            raise SpoolError(f"{run_folder}: is not a folder; give the run folder of a host")
        self._folder, self._is_stopped = run_folder, is_stopped
        self._observer = observer or Observer()
        self._header = read_run_header(run_folder)
        self._is_by_hand = run_folder == self._header.out
        self._lock: FolderLock | None = None  # a collector has its own
        if not self._is_by_hand:
            self._lock = FolderLock(run_folder / COMPANION_LOCK_NAME, "companion")
        self._is_busy = False
        """Another process gathers the run."""
        self._relay: Relay | None = None
        self._turns: Turns[ExitOutcome] | None = None
        """Of a run that is gathered here."""
        self._gathered: ExitOutcome | None = None
        self._looked_at = float("-inf")

    def run(self) -> ExitOutcome:
        """Work until the run is finished, or this host can do no more for it. RankscopeError: it
        cannot begin."""
        try:
            header = self._header
            collection = Collection.of_run(header)
            # gathering first: whether the relay is alone is known only then
            if header.collects and not self._begin_gathering(header, collection):
                log(f"{header.out} is gathered by another process")
            if not self._is_by_hand:
                is_alone = self._turns is None
                self._relay = Relay(self._folder, header, self._is_stopped, is_alone=is_alone)
            return self._work()
        finally:
            if self._turns is not None:
                self._turns.close()
            if self._lock is not None:
                self._lock.release()
            if self._gathered is not None or (self._is_by_hand and not self._is_busy):
                (self._header.out / RUN_NAME).unlink(missing_ok=True)  # of a collector by hand

    def _begin_gathering(self, header: RunHeader, collection: Collection) -> bool:
        """Begin to gather; False where another host of a shared folder does."""
        gathering = Gathering(
            self._folder, header, self._is_stopped, self._observer, self._own_host
        )
        turns = gathering.turns()
        try:
            next(turns)
        except FolderBusyError:
            self._is_busy = True
            if self._is_by_hand or not collection.is_shared:
                raise
            return False
        except StopIteration as end:
            self._gathered = end.value
            return True
        self._turns = turns
        return True

    def _own_host(self) -> HostState | None:
        return None if self._relay is None else self._relay.state

    def _work(self) -> ExitOutcome:
        while True:
            self._gather()
            relay = self._relay
            if relay is None:  # the turns of a collector wait by themselves
                if self._gathered is not None:
                    return self._gathered
                continue
            was_busy = relay.outcome is None and relay.turn()
            outcome = relay.outcome
            # the relay stays until the tree is built: it is asked for the state of this host
            if outcome is None and self._turns is None and not relay.is_alone:
                outcome = self._gathered
            if outcome is not None:
                relay.close(outcome)
                return outcome
            if not was_busy:
                relay.wait(_IDLE_S)

    def _gather(self) -> None:
        """Let the gathering have its turn."""
        now = time.monotonic()
        if self._turns is None or (self._relay is not None and now - self._looked_at < LOOK_S):
            return
        self._looked_at = now
        try:
            next(self._turns)
        except StopIteration as end:
            self._turns, self._gathered = None, end.value
