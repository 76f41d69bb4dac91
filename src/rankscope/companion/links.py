"""The two ways a host sends: to a collector that listens, or into a trace folder that it sees.

Either takes what the shipments of a host want to send, and tells them what has arrived.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from abc import ABC, abstractmethod
from pathlib import Path

import zmq

from rankscope.companion.curve import Handshake
from rankscope.companion.hostwatch import BlackBox
from rankscope.companion.protocol import (
    LONGEST_ANSWER,
    MOST_PARTS,
    PROTOCOL_VERSION,
    WINDOW_BYTES,
    BeatSeen,
    Bye,
    Done,
    Ended,
    EndedSeen,
    Frame,
    Happened,
    Hello,
    MemoryBound,
    Message,
    OpenStream,
    Refused,
    Rejected,
    StreamOffset,
    Sync,
    Synced,
    decode,
    encode,
    receive_parts,
)
from rankscope.companion.replica import BackgroundSync, ReplicaFiles, write_host_state
from rankscope.companion.shipping import Shipment
from rankscope.companion.waitingrule import HostState, JobState
from rankscope.errors import FolderError, RankscopeError, SpoolError, WireError
from rankscope.record.ranks import StreamId
from rankscope.record.stepselection import Trigger
from rankscope.run.agreements import agreed_text
from rankscope.run.connection import check_address, is_tcp, read_keys
from rankscope.run.folders import REPLICA_FOLDER, TRACE_NAME, VANISHED_NAME, RunHeader
from rankscope.run.jobstatus import Stall, keep_stall
from rankscope.run.messages import FewLines, log
from rankscope.run.processes import is_alive
from rankscope.spool.replicas import StreamEnd, replica_path, write_end

_BEAT_S = 0.25
_SHARED_BEAT_S = 1.0
_SEND_QUEUE = 64
_BATCH = 1024
_MOST_REFUSED_LOGGED = 10
_SILENT_S = 5.0
"""A collector answers every beat; one that says nothing for so long is connected to again."""
_RECONNECT_MS = 50
_MOST_RECONNECT_MS = 1000


class Link(ABC):
    """One of the two, as the relay's loop sees it."""

    def __init__(self, header: RunHeader, name: str, box: BlackBox | None) -> None:
        self._header, self._name, self._box = header, name, box
        self._job = JobState.UNKNOWN
        self._beat_at = self.heard_at = float("-inf")
        self._told_stall: Stall | None = None
        self.is_reached = False
        """What is sent finds its way to somebody."""
        self.rejection = ""
        self.stall: Stall | None = None
        self.state: HostState | None = None
        self.is_quiet = False
        """Nothing happened on any host: what ranks held back is not asked for. Known at the end."""
        self.trouble_at: float | None = None
        """Monotonic time since when this side cannot write; None where it can."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """True once the tree is built."""

    @property
    def strangeness(self) -> str:
        """Why the other side is not who it should be, or does not know this one."""
        return ""

    @abstractmethod
    def exchange(self, shipments: dict[StreamId, Shipment], now: float, job: JobState) -> bool:
        """Send and receive what can be; True where anything was."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Wait for an answer, or for time to pass."""

    def is_on_disk(self) -> bool:
        """True where what was sent outlasts a loss of power; asked once, at the end."""
        return True  # a collector made sure before it said that all is done

    @abstractmethod
    def close(self) -> None:
        """Leave."""

    def _held(self, shipments: dict[StreamId, Shipment]) -> int:
        """Return how many streams of this host were not refused, those held back among them."""
        refused = sum(shipment.is_refused for shipment in shipments.values())
        return len({*shipments, *(self._box.streams if self._box else ())}) - refused

    def _state(self, shipments: dict[StreamId, Shipment], job: JobState) -> HostState:
        box = self._box
        if box is not None and box.streams:  # the copies of these streams may not be begun
            alive = sum(copy.is_alive for copy in box.streams.values())
        else:  # a shipment that a full disk holds up has not seen its rank go
            alive = sum(s.is_alive and is_alive(s.folder) for s in shipments.values())
        return HostState(
            alive=alive,
            held=self._held(shipments),
            job=job,
            max_restarts=self._header.max_restarts,
            quiet=0 if box is None else box.quiet_ranks,
        )


class SocketLink(Link):
    """To a collector that listens."""

    def __init__(self, header: RunHeader, name: str, box: BlackBox | None = None) -> None:
        """Connect, which never waits; the box is told what other hosts saw happen. BindError: the
        address may not be used; KeysError: its keys cannot be read."""
        super().__init__(header, name, box)
        self._told_held = 0
        self._is_done = False
        self._first = 0
        self._refused = FewLines(_MOST_REFUSED_LOGGED)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # a fixed name: a relay that connects again is the same peer to the collector
        self._socket.setsockopt(zmq.ROUTING_ID, f"relay-{name}".encode())
        # before it connects: options of a socket hold for the connections made behind them
        self._socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_ANSWER)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        # no queue for a connection that is not there: a collector that comes would get what was
        # sent long ago
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MOST_RECONNECT_MS)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.LINGER, 500)
        keys = header.settings.get("keys")
        self._address = check_address(header.collector, has_keys=bool(keys))
        self._connected_at = time.monotonic()
        self._handshake: Handshake | None = None
        if keys and is_tcp(self._address):
            curve_keys = read_keys(Path(keys), is_collector=False)
            self._handshake = Handshake(self._socket, self._address, curve_keys)
        else:
            self._socket.connect(self._address)
        self._bound = MemoryBound([self._address], peers=lambda: 1)
        log(f"relaying run {header.run_id} to {header.collector}")

    @property
    def is_done(self) -> bool:
        """True once the collector said so."""
        return self._is_done

    @property
    def strangeness(self) -> str:
        """Why the handshake fails; empty without keys."""
        return "" if self._handshake is None else self._handshake.trouble

    def exchange(self, shipments: dict[StreamId, Shipment], now: float, job: JobState) -> bool:
        """Send and receive what can be; True where anything was."""
        if self._handshake is not None:
            self._handshake.look(now)
        was_busy = self._receive(shipments, now)
        if now - max(self.heard_at, self._connected_at) > _SILENT_S:
            self._connect_again(now)
        count = self._held(shipments)
        has_news = (
            job is not self._job or self.stall != self._told_stall or count != self._told_held
        )
        if now - self._beat_at > _BEAT_S or has_news:
            self.state = self._state(shipments, job)
            if not self._greet(self.state):
                return was_busy
            self._job, self._told_held, self._told_stall = job, count, self.stall
            self._beat_at = now
        return self._pump(list(shipments.values()), now) or was_busy

    def wait(self, timeout_s: float) -> None:
        """Wait for an answer."""
        self._socket.poll(int(timeout_s * 1000))

    def close(self) -> None:
        """Leave."""
        if self.is_done:
            self._send(Bye())
        self._bound.close()
        if self._handshake is not None:
            self._handshake.close()
        self._socket.close()
        self._context.term()

    def _connect_again(self, now: float) -> None:
        """Connect once more: libzmq never does after a malformed message (a flipped bit), or where
        the other side vanished."""
        self._connected_at = now
        if self.strangeness:
            return  # the handshake is tried again by itself
        with contextlib.suppress(zmq.ZMQError):  # it may have let go of the address
            self._socket.disconnect(self._address)
        self._socket.connect(self._address)

    def _greet(self, state: HostState) -> bool:
        """Say who this is and how many streams it has; False where that cannot be sent now. This
        comes before any stream: the collector takes none from an unknown relay, and may finish with
        the streams it knows before it hears of another."""
        hello = Hello(PROTOCOL_VERSION, socket.gethostname(), self._header.run_id)
        events = [] if self._box is None else self._box.happened()
        stalls = [] if self.stall is None else [self.stall]  # ever again: any of them may be lost
        messages: list[Message] = [hello, state, *(Happened(*event) for event in events), *stalls]
        return all(self._send(message) for message in messages)

    def _pump(self, waiting: list[Shipment], now: float) -> bool:
        was_busy = False
        # one window for the host: with one for each rank, eight ranks would fill the collector's
        # memory eightfold
        window = WINDOW_BYTES - sum(shipment.in_flight for shipment in waiting)
        self._first += 1
        while waiting:
            # another first one each time: where the window is small the same stream would always
            # win
            turn = self._first % len(waiting)
            still = []
            for shipment in waiting[turn:] + waiting[:turn]:
                message = shipment.next_message(now, window)
                if message is None:
                    continue
                was_busy = True
                if not self._send(message):
                    if isinstance(message, Frame):
                        # the queue is full: not sent, so the next turn begins at these bytes
                        shipment.take_back(message)
                    return False
                if isinstance(message, Frame):
                    window -= 0 if message.chunk else len(message.body)
                    still.append(shipment)
            waiting = still
        return was_busy

    def _receive(self, shipments: dict[StreamId, Shipment], now: float) -> bool:
        was_busy = False
        for _ in range(_BATCH):
            try:
                message = decode(receive_parts(self._socket, MOST_PARTS))
            except zmq.Again:
                break
            except WireError as error:
                self._refused.log(f"refused a message: {error}")
                continue
            self.heard_at = now
            was_busy = was_busy or not isinstance(message, BeatSeen)
            self._take(message, shipments, now)
        return was_busy

    def _take(self, message: Message, shipments: dict[StreamId, Shipment], now: float) -> None:
        match message:
            case StreamOffset(stream) | Synced(stream) | EndedSeen(stream) | Refused(stream):
                if stream in shipments:
                    shipments[stream].take(message, now)
            case Rejected(reason):
                self.rejection = reason
            case Happened() | BeatSeen():
                self._hear(message)
            case Done(is_quiet):
                self._is_done, self.is_quiet = True, is_quiet

    def _hear(self, message: Happened | BeatSeen) -> None:
        if self._box is None:
            return
        try:
            if isinstance(message, Happened):
                self._box.hear_entry(message.incarnation, message.entry)
            elif message.vanished and self._box.quiet_ranks:
                self._box.hear(Trigger.VANISHED, message.vanished)
        except (OSError, ValueError, KeyError) as error:
            self._refused.log(f"what happened elsewhere cannot be noted here: {error}")

    def _send(self, message: Message) -> bool:
        try:
            self._socket.send_multipart(encode(message), zmq.DONTWAIT)
        except zmq.ZMQError:
            self._beat_at = float("-inf")  # who listens next may be another collector
            self.is_reached = False
            return False
        self.is_reached = True
        return True


class FolderLink(Link):
    """To a trace folder this host sees: the collector's writing, without a collector between."""

    def __init__(
        self, header: RunHeader, name: str, box: BlackBox | None = None, *, is_shared: bool = True
    ) -> None:
        """Open the folder, or raise FolderError; if `is_shared`, this host's state stands there."""
        super().__init__(header, name, box)
        self._out = header.out
        self._is_shared = is_shared
        self._beat = os.getpid() << 20
        self.heard_at = time.monotonic()
        self.is_reached = True
        self._trouble = ""
        self._is_claimed = False
        self._replicas = ReplicaFiles(self._out)
        self._sync: BackgroundSync[Shipment] = BackgroundSync()
        log(f"writing run {header.run_id} into {self._out}")

    @property
    def is_done(self) -> bool:
        """True once the tree is there, or the records are gone because there is to be none."""
        try:
            if (self._out / TRACE_NAME).exists():
                return True
            # asked once our claim is made: before it the folder is not there either
            self.is_quiet = self._is_claimed and not (self._out / REPLICA_FOLDER).exists()
            return self.is_quiet
        except OSError:  # a disk that failed says nothing of either
            return False

    def exchange(self, shipments: dict[StreamId, Shipment], now: float, job: JobState) -> bool:
        """Append what is committed; True where anything was."""
        if not self._is_claimed and not self._claim(now):
            return False
        if now - self._beat_at > _SHARED_BEAT_S or job is not self._job:
            self._job, self._beat_at = job, now
            self._beat += 1
            self.state = self._state(shipments, job)
            if self._is_shared and os.path.exists(self._out / REPLICA_FOLDER):
                with contextlib.suppress(SpoolError):  # the folder goes once the tree is there
                    write_host_state(self._out, self._name, self._beat, self.state)
        self._tell()
        self._hear()
        for shipment, length in self._sync.finished():
            shipment.take_synced(length)
        was_busy = False
        for shipment in shipments.values():
            try:
                was_busy = self._ship(shipment, now) or was_busy
            except RankscopeError as error:
                shipment.take_refusal(str(error))
        if was_busy:
            self.heard_at = now
        return was_busy

    def wait(self, timeout_s: float) -> None:
        """Nothing will call: sleep."""
        time.sleep(timeout_s)

    def is_on_disk(self) -> bool:
        """Wait until what is held, and the tree, outlasts a loss of power; True where it does."""
        self._sync.close()
        return not self._sync.has_lost and self._replicas.sync_all()

    def close(self) -> None:
        """Close the replicas."""
        self._sync.close()
        self._replicas.close()

    def _tell(self) -> None:
        if self.stall is None or self.stall == self._told_stall:
            return
        with contextlib.suppress(SpoolError):  # the disk is full: tried again
            keep_stall(self._out, self._name, self.stall)
            self._told_stall = self.stall

    def _hear(self) -> None:
        if self._box is not None and self._box.quiet_ranks:
            text = agreed_text(self._out / REPLICA_FOLDER, VANISHED_NAME)
            if text is not None:
                with contextlib.suppress(OSError):  # tried again
                    self._box.hear(Trigger.VANISHED, text)

    def _claim(self, now: float) -> bool:
        """Say whose records these are; False where they may not or cannot be written."""
        try:
            self._replicas.claim(self._header.run_id)
        except FolderError as error:
            self.rejection = str(error)
            return False
        except SpoolError as error:
            self._note_trouble(str(error), now)
            return False
        self._is_claimed, self.trouble_at = True, None
        return True

    def _note_trouble(self, text: str, now: float) -> None:
        if text and text != self._trouble:
            log(text)
        self._trouble = text
        if self.trouble_at is None:
            self.trouble_at = now

    def _ship(self, shipment: Shipment, now: float) -> bool:
        message = shipment.next_message(now, WINDOW_BYTES)
        if message is None:
            return False
        try:
            place = self._replicas.place(shipment.stream, shipment.origin)
            if isinstance(message, Ended):
                end = StreamEnd(committed=message.committed, end=message.reason)
                # the marker before the shipment hears of it: it counts as delivered from then on
                write_end(replica_path(self._out, place), end)
            match message:
                case OpenStream():
                    shipment.take_offset(self._replicas.length(place), now)
                    return True
                case Frame(_, _, offset, _, body):
                    shipment.take_offset(self._replicas.append(place, offset, body), now)
                    if self._replicas.trouble:
                        self._note_trouble("", now)  # which it logs itself
                        return False
                case Sync():
                    self._sync.begin(place, shipment, self._replicas.to_sync)
                case Ended():
                    shipment.take_end_seen()
        except SpoolError as error:  # the disk is full, or failed: asked again
            self._note_trouble(str(error), now)
            return False
        self._trouble, self.trouble_at = "", None
        return True
