"""The relay: one per host. Finds streams in the run folder, ships them, frees what arrived.

It keeps no state of its own. Over a socket it is one side of the protocol; in a shared trace folder
it writes replicas and end markers itself, with the collector's own code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from rankscope.errors import RankscopeError, SpoolError, WireError
from rankscope.gather.address import check_address
from rankscope.gather.log import log
from rankscope.gather.protocol import (
    LONGEST_MESSAGE,
    PROTOCOL_VERSION,
    WINDOW_BYTES,
    At,
    Beat,
    BeatSeen,
    Bye,
    Done,
    Ended,
    EndedSeen,
    Frame,
    Hello,
    Message,
    Open,
    Refused,
    decode,
    encode,
)
from rankscope.gather.replica import (
    REPLICAS_NAME,
    TREE_NAME,
    Replicas,
    StreamEnd,
    dropped_in,
    read_end,
    write_end,
)
from rankscope.gather.roster import JobState
from rankscope.gather.shared import HostState, write_host_state
from rankscope.gather.shipping import Shipment
from rankscope.record.run import StreamId
from rankscope.spool.companions import ipc_address
from rankscope.spool.folder import (
    JOB_OVER_NAME,
    LAUNCHER_LOCK_NAME,
    MUSTER_LOCK_NAME,
    RELAY_LOCK_NAME,
    RELAY_LOG_NAME,
    RUN_NAME,
    SHARED,
    FolderLock,
    RunHeader,
    is_held,
    read_run_header,
    remove_run_folder,
    streams,
)
from rankscope.spool.lock import is_alive

__all__ = ["relay"]

_IDLE_S = 0.02
_DISCOVER_S = 0.1
_BEAT_S = 0.25
_SHARED_BEAT_S = 1.0
_SEND_QUEUE = 64
_PATIENCE_S = 300.0
"""How long a relay whose ranks have all ended waits for a collector it does not hear."""
_SILENT_S = 2.0
_FIRST_STREAM_S = 3600.0
_OURS = (
    RUN_NAME,
    JOB_OVER_NAME,
    LAUNCHER_LOCK_NAME,
    MUSTER_LOCK_NAME,
    RELAY_LOG_NAME,
    RELAY_LOCK_NAME,
)
"""Files of a run folder that go with it."""


def relay(run_folder: Path, is_stopped: Callable[[], bool]) -> int:
    """Ship the streams of one host until the run is finished; return the exit code.

    Args:
        run_folder: the host's spool folder of one run.
        is_stopped: true once somebody asked for an end (SIGTERM): as if the job were over.

    Raises:
        FolderBusyError: another relay is at work there.
        SpoolError: the folder cannot be used.
    """
    if not run_folder.is_dir():
        raise SpoolError(f"{run_folder}: is no folder; give the host's run folder of a spool")
    lock = FolderLock(run_folder / RELAY_LOCK_NAME, "relay")
    try:
        return _Relay(run_folder, is_stopped).run()
    finally:
        lock.release()


class _Relay:
    """The loop, common to both ways of sending."""

    def __init__(self, run_folder: Path, is_stopped: Callable[[], bool]) -> None:
        self._run_folder = run_folder
        self._is_stopped = is_stopped
        self._shipments: dict[StreamId, Shipment] = {}
        self._discovered_at = float("-inf")
        self._job = JobState.UNKNOWN
        self._tree = run_folder / TREE_NAME
        self._socket_path: Path | None = None

    def run(self) -> int:
        header = self._wait_for_header()
        if header is None:
            return 1
        self._tree = header.out / TREE_NAME
        if header.collector == ipc_address(self._run_folder):
            self._socket_path = Path(header.collector.removeprefix("ipc://"))
        name = relay_name(self._run_folder)
        link: _SocketLink | _SharedLink
        if header.collector == SHARED:
            link = _SharedLink(header.out, name, header.max_restarts)
        else:
            link = _SocketLink(check_address(header.collector), name, header.max_restarts)
        try:
            is_done = self._ship(link)
        finally:
            link.close()
            for shipment in self._shipments.values():
                shipment.reader.close()
        if is_done:
            self._clean()
        return 0 if is_done else 1

    def _ship(self, link: _SocketLink | _SharedLink) -> bool:
        """Ship until told that the run is finished; False where nobody is there to tell."""
        started = time.monotonic()
        while not link.is_done:
            now = time.monotonic()
            self._discover(now)
            was_busy = link.exchange(self._shipments, now, self._job)
            if not was_busy:
                link.wait(_IDLE_S)
                if self._sees_tree(now - link.heard_at):
                    return True
            if now - max(link.heard_at, started) > _PATIENCE_S and self._has_nothing_alive():
                log(f"no collector for {_PATIENCE_S:.0f} s; the spools stay in {self._run_folder}")
                return False
            if not self._shipments and now - started > _FIRST_STREAM_S:
                log("no rank ever traced")
                return False
        return True

    def _sees_tree(self, silent_s: float) -> bool:
        """The collector may have gone before its Done arrived: on its own host the tree tells."""
        return (
            silent_s > _SILENT_S
            and bool(self._shipments)
            and all(shipment.is_done for shipment in self._shipments.values())
            and self._tree.exists()
        )

    def _has_nothing_alive(self) -> bool:
        return not any(is_alive(shipment.folder) for shipment in self._shipments.values())

    def _wait_for_header(self) -> RunHeader | None:
        """The collector's address may be known only after the relay was started."""
        deadline = time.monotonic() + _FIRST_STREAM_S
        trouble = ""
        while time.monotonic() < deadline and not self._is_stopped():
            try:
                header = read_run_header(self._run_folder)
                if header.collector:
                    return header
                trouble = "it names no collector yet"
            except SpoolError as error:
                trouble = str(error)
            time.sleep(0.1)
        log(f"no usable run.json in {self._run_folder}: {trouble}")
        return None

    def _discover(self, now: float) -> None:
        if now - self._discovered_at < _DISCOVER_S:
            return
        self._discovered_at = now
        self._job = self._job_state()
        for stream in streams(self._run_folder):
            if stream not in self._shipments:
                self._shipments[stream] = Shipment(self._run_folder, stream)

    def _job_state(self) -> JobState:
        """A launcher holds a lock while it lives, so a killed one is as good as its marker."""
        if self._is_stopped() or (self._run_folder / JOB_OVER_NAME).exists():
            return JobState.OVER
        lock = self._run_folder / LAUNCHER_LOCK_NAME
        if not lock.exists():
            return JobState.UNKNOWN
        return JobState.LAUNCHED if is_held(lock) else JobState.OVER

    def _clean(self) -> None:
        """Remove what was shipped; a stream that never got its end stays for `recover`."""
        for stream in streams(self._run_folder):
            shipment = self._shipments.get(stream)
            if shipment is None or not shipment.is_done:
                log(f"{stream.name} was not finished: kept in {self._run_folder}")
                return
        for shipment in self._shipments.values():
            shutil.rmtree(shipment.folder, ignore_errors=True)
        for path in (*(self._run_folder / name for name in _OURS), self._socket_path):
            if path is not None:  # a killed collector leaves its socket, which may lie elsewhere
                path.unlink(missing_ok=True)
        remove_run_folder(self._run_folder)


def relay_name(run_folder: Path) -> str:
    """A fixed name for this host and folder: the same after a restart."""
    place = f"{socket.gethostname()}:{run_folder.absolute()}"
    return hashlib.blake2b(place.encode(errors="surrogateescape"), digest_size=8).hexdigest()


class _SocketLink:
    """To a collector that listens."""

    def __init__(self, address: str, name: str, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._job = JobState.UNKNOWN
        self.is_done = False
        self.heard_at = float("-inf")
        self._beat_at = float("-inf")
        self._first = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, f"relay-{name}".encode())
        self._socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_MESSAGE)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(address)
        log(f"relaying to {address}")

    def exchange(self, shipments: dict[StreamId, Shipment], now: float, job: JobState) -> bool:
        """Send and receive what can be; True where anything was."""
        if now - self._beat_at > _BEAT_S or job is not self._job:
            self._job = job
            self._send(Hello(PROTOCOL_VERSION, socket.gethostname()))
            alive = sum(shipment.is_alive for shipment in shipments.values())
            self._send(Beat(alive, len(shipments), job, self._max_restarts))
            self._beat_at = now
        was_busy = self._receive(shipments, now)
        return self._pump(list(shipments.values()), now) or was_busy

    def wait(self, timeout_s: float) -> None:
        """Wait for an answer."""
        self._socket.poll(int(timeout_s * 1000))

    def close(self) -> None:
        """Leave."""
        if self.is_done:
            self._send(Bye())
        self._socket.close()
        self._context.term()

    def _pump(self, waiting: list[Shipment], now: float) -> bool:
        """Send one message of each stream in turn, as long as the window allows."""
        was_busy = False
        window = WINDOW_BYTES - sum(shipment.in_flight for shipment in waiting)
        self._first += 1
        while waiting:
            turn = self._first % len(waiting)
            still = []
            for shipment in waiting[turn:] + waiting[:turn]:
                message = shipment.next_message(now, window)
                if message is None:
                    continue
                was_busy = True
                if not self._send(message):
                    if isinstance(message, Frame):
                        shipment.take_back(message)
                    return False
                if isinstance(message, Frame):
                    window -= len(message.body)
                    still.append(shipment)
            waiting = still
        return was_busy

    def _receive(self, shipments: dict[StreamId, Shipment], now: float) -> bool:
        was_busy = False
        while True:
            try:
                message = decode(self._socket.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return was_busy
            except WireError as error:
                log(f"refused a message: {error}")
                continue
            self.heard_at = now
            was_busy = was_busy or not isinstance(message, BeatSeen)
            self._take(message, shipments, now)

    def _take(self, message: Message, shipments: dict[StreamId, Shipment], now: float) -> None:
        match message:
            case At(stream, offset):
                if stream in shipments:
                    shipments[stream].take_offset(offset, now)
            case EndedSeen(stream):
                if stream in shipments:
                    shipments[stream].take_end_seen()
            case Refused(stream, reason):
                if stream in shipments:
                    shipments[stream].take_refusal(reason)
            case Done():
                self.is_done = True

    def _send(self, message: Message) -> bool:
        try:
            self._socket.send_multipart(encode(message), zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True


class _SharedLink:
    """To a trace folder this host sees: the collector's writing, without a collector between."""

    def __init__(self, out: Path, name: str, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._job = JobState.UNKNOWN
        self._out = out
        self._name = name
        self._beat = os.getpid() << 20
        self._beat_at = float("-inf")
        self._replicas = Replicas(out)
        self.heard_at = time.monotonic()
        log(f"writing into the shared folder {out}")

    @property
    def is_done(self) -> bool:
        """True once the tree is there."""
        return (self._out / TREE_NAME).exists()

    def exchange(self, shipments: dict[StreamId, Shipment], now: float, job: JobState) -> bool:
        """Append what is committed; True where anything was."""
        is_due = now - self._beat_at > _SHARED_BEAT_S or job is not self._job
        if is_due and (self._out / REPLICAS_NAME).exists():
            self._job = job
            self._beat += 1
            self._beat_at = now
            state = HostState(beat=self._beat, job=job, max_restarts=self._max_restarts)
            with contextlib.suppress(SpoolError):  # the folder goes once the tree is there
                write_host_state(self._out, self._name, state)
        was_busy = False
        while self._replicas.reports:
            log(self._replicas.reports.pop(0))
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

    def close(self) -> None:
        """Close the replicas."""
        self._replicas.close()

    def _ship(self, shipment: Shipment, now: float) -> bool:
        message = shipment.next_message(now, WINDOW_BYTES)
        match message:
            case Open(stream):
                shipment.take_offset(self._replicas.length(stream), now)
            case Frame(stream, offset, _, body):
                shipment.take_offset(self._replicas.append(stream, offset, body), now)
            case Ended(stream, committed, reason):
                if read_end(self._out, stream) is None:
                    dropped = dropped_in(self._out, stream)
                    write_end(
                        self._out,
                        stream,
                        StreamEnd(committed=committed, end=reason, dropped=dropped),
                    )
                shipment.take_end_seen()
        return message is not None
