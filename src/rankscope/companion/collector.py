"""The collector: one per run. Writes what relays send, acknowledges after writing, parses nothing.

Its state is the length of its files, so it may be killed and started again at any moment.

Chunks of full tensors arrive too, from hosts which do not see the trace folder. A chunk grows as
`<out>/tensors/rank00003/000001.part`, only at exactly its own end; its length is all there is to
know, also after a kill. When all of it is here and its checksum is the sender's it takes its name.
Paths are built from integers only and never followed through links.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from rankscope.companion.curve import Admission
from rankscope.companion.protocol import (
    LONGEST_MESSAGE,
    MOST_PARTS,
    PROTOCOL_VERSION,
    BeatSeen,
    Bye,
    ChunkEnded,
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
from rankscope.companion.replica import BackgroundSync, ReplicaFiles
from rankscope.companion.waitingrule import HostState, JobState, PeerState, StreamSource
from rankscope.errors import BindError, FolderError, SpoolError, WireError
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.connection import CurveKeys, check_address, is_ipv6, is_tcp
from rankscope.run.files import sync_by_name
from rankscope.run.jobstatus import Stall, keep_stall
from rankscope.run.messages import FewLines, log
from rankscope.spool.chunks.chunkfiles import chunk_folder, chunk_numbers, chunk_path
from rankscope.spool.chunks.safetensors import checksum_of, write_all
from rankscope.spool.replicas import StreamEnd, read_end, replica_path, replicated, write_end

DEFAULT_QUOTA_BYTES = 1 << 40
_PART_SUFFIX = ".part"
MOST_CHUNKS = 100_000
"""Of one stream."""
_MOST_OPEN = 256
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
Question = OpenStream | Frame | ChunkEnded
Answer = StreamOffset | EndedSeen | Refused


class ReceivedChunks:
    """Writes the chunks of one trace folder; one file is open for each stream that sends."""

    def __init__(self, out: Path, *, quota_bytes: int = DEFAULT_QUOTA_BYTES) -> None:
        self._out, self._quota_bytes = out, quota_bytes
        self._open: dict[StreamId, tuple[int, int]] = {}
        self._whole: dict[StreamId, int] = {}

    def answer(self, message: Question, place: StreamId | None = None) -> tuple[Answer, bool]:
        """Do what a relay asks for; return the answer, and whether anything new is here. `place` is
        the life whose chunks these are here, where another process was the same rank before."""
        asked, stream, chunk = message.stream, place or message.stream, message.chunk
        try:
            if self._is_whole(stream, chunk):
                if isinstance(message, ChunkEnded):
                    return EndedSeen(asked, chunk), False
                size = self._path(stream, chunk).stat().st_size
                return StreamOffset(asked, size, chunk), False
            descriptor = self._descriptor(stream, chunk)
            length = os.fstat(descriptor).st_size
            if isinstance(message, Frame):
                grown = self._append(stream, descriptor, length, message)
                return StreamOffset(asked, grown, chunk), grown > length
            if isinstance(message, OpenStream):
                return StreamOffset(asked, length, chunk), False
            if self._finish(stream, descriptor, length, message):
                return EndedSeen(asked, chunk), True
            return StreamOffset(asked, 0, chunk), True
        except OSError as error:
            self._forget(stream)
            log(f"chunk {chunk} of {stream.name}: {error.strerror}; no more of them are taken")
            return Refused(asked, str(error.strerror), chunk), False

    def close(self) -> None:
        """Close every file."""
        for stream in [*self._open]:
            self._forget(stream)

    def _append(self, stream: StreamId, descriptor: int, length: int, frame: Frame) -> int:
        # not at the end: doubled on its way, or overtaken; the answer tells where to go on
        if frame.offset != length:
            return length
        if self._whole_bytes(stream) + length + len(frame.body) > self._quota_bytes:
            raise OSError(0, f"more than {self._quota_bytes} bytes, the quota of one stream")
        try:
            write_all(descriptor, frame.body, length)
        except OSError:
            os.ftruncate(descriptor, length)
            raise
        return length + len(frame.body)

    def _finish(self, stream: StreamId, descriptor: int, length: int, ended: ChunkEnded) -> bool:
        """Give a chunk its name; where it is not what was sent, empty it and return False."""
        chunk = ended.chunk
        if length != ended.size or checksum_of(descriptor) != ended.checksum:
            # emptied and not kept for repair: nobody knows which of its bytes are wrong
            log(f"chunk {chunk} of {stream.name} is not what was sent: it is taken again")
            os.ftruncate(descriptor, 0)
            return False
        os.fsync(descriptor)  # the relay removes its own once it is told
        # the name behind the bytes: a chunk with its name is whole, also after a loss of power
        os.replace(self._part(stream, chunk), self._path(stream, chunk))
        sync_by_name(self._path(stream, chunk).parent)
        self._whole[stream] = self._whole_bytes(stream) + length
        self._forget(stream)
        return True

    def _is_whole(self, stream: StreamId, chunk: int) -> bool:
        open_chunk = self._open.get(stream)
        return (open_chunk is None or open_chunk[0] != chunk) and self._path(stream, chunk).exists()

    def _descriptor(self, stream: StreamId, chunk: int) -> int:
        open_chunk = self._open.get(stream)
        if open_chunk is not None and open_chunk[0] == chunk:
            return open_chunk[1]
        self._forget(stream)
        part = self._part(stream, chunk)
        part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room(part)
        descriptor = os.open(part, _FLAGS, 0o600)
        self._open[stream] = chunk, descriptor
        return descriptor

    def _make_room(self, part: Path) -> None:
        """See that a stream has no more than one chunk that is not whole, and few open files."""
        names = os.listdir(part.parent)
        if len(names) > MOST_CHUNKS:
            raise OSError(0, f"more than {MOST_CHUNKS} chunks of one stream")
        for name in names:
            if name.endswith(_PART_SUFFIX) and name != part.name:
                (part.parent / name).unlink(missing_ok=True)  # a relay sends one after another
        while len(self._open) >= _MOST_OPEN:
            self._forget(next(iter(self._open)))

    def _whole_bytes(self, stream: StreamId) -> int:
        if stream not in self._whole:
            folder = chunk_folder(self._out, stream)
            sizes = (chunk_path(folder, number).stat().st_size for number in chunk_numbers(folder))
            self._whole[stream] = sum(sizes)
        return self._whole[stream]

    def _forget(self, stream: StreamId) -> None:
        open_chunk = self._open.pop(stream, None)
        if open_chunk is not None:
            os.close(open_chunk[1])

    def _path(self, stream: StreamId, chunk: int) -> Path:
        return chunk_path(chunk_folder(self._out, stream), chunk)

    def _part(self, stream: StreamId, chunk: int) -> Path:
        return self._path(stream, chunk).with_suffix(_PART_SUFFIX)


_RECEIVE_QUEUE = 2
"""Messages zmq holds for each relay before it stops reading: bounds memory at any world size."""
_BATCH = 256
_FAREWELL_S = 3.0
_ANOTHER_RUN = (
    "this collector gathers another run: give each run a trace folder and a collector of its own"
)
"""A stranger learns no more: the id of a run is all that makes a peer its relay."""
_LEAST_PEERS = 64
_PEERS_A_RANK = 4
"""Relays that may be known: one a host, and some for hosts that were replaced."""
_GONE_S = 60.0
_MOST_BROKEN = 10
_MOST_COMPLAINTS = 100
_MOST_EVENTS = 4096
"""Of all lives of a job; a relay tells at most 256 of each."""
_MOST_REJECTED = 100


@dataclass(slots=True)
class _Peer:
    heard_at: float = field(default_factory=time.monotonic)
    state: HostState = field(default_factory=lambda: HostState(alive=0, job=JobState.UNKNOWN))
    stall: Stall | None = None
    is_admitted: bool = False
    """Its run is the one gathered here. Until the disk takes the name of that run nobody knows: the
    relay is heard, and nothing it brings is taken."""
    has_left: bool = False
    events: set[tuple[int, str]] = field(default_factory=set)
    """What its host knows of what happened before black boxes."""


class Intake(StreamSource):
    """Streams that arrive over sockets."""

    def __init__(
        self, out: Path, bind: Sequence[str], *, world_size: int, keys: CurveKeys | None = None
    ) -> None:
        """Bind, and pick up the replicas that are there; `keys`: for TCP addresses. BindError: an
        address may not or cannot be bound; KeysError: the keys are none; FolderError: the trace
        folder cannot be written."""
        for address in bind:
            check_address(address, has_keys=keys is not None)
        self._out, self._world_size = out, world_size
        self._replicas, self._chunks = ReplicaFiles(out), ReceivedChunks(out)
        self._sync: BackgroundSync[tuple[bytes, StreamId]] = BackgroundSync()
        """For a relay, and what it calls the stream."""
        self._ends: dict[StreamId, EndReason | None] = {}
        for stream in replicated(out):
            # all there is to know of a collector that was killed: replicas and markers
            marker = read_end(replica_path(out, stream))
            self._ends[stream] = marker.end if marker else None
        self._peers: dict[bytes, _Peer] = {}
        self._broken, self._complaints = FewLines(_MOST_BROKEN), FewLines(_MOST_COMPLAINTS)
        self._rejected: set[bytes] = set()
        self._events: set[tuple[int, str]] = set()
        self._vanished = self._trouble = ""
        self.progress_at = time.monotonic()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # a relay that connects again takes its name over: else the dead connection has it until TCP
        # gives up
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_MESSAGE)
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        # No zmq heartbeats: libzmq aborts when one falls due on a peer that left while unread.
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._admission: Admission | None = None
        self.addresses = [self._bind(address) for address in bind if not is_tcp(address)]
        if keys is not None:  # for what is bound from here on
            # behind the sockets of this host: a file system's rights guard those, and they have no
            # keys
            self._admission = Admission(self._socket, keys)
        self.addresses += [self._bind(address) for address in bind if is_tcp(address)]
        self._bound = MemoryBound(self.addresses, lambda: len(self._peers))

    def work(self, timeout_s: float) -> None:
        """Take in at most a batch of messages; wait for the first at most `timeout_s`."""
        self._tell_synced()
        if self._admission is not None:
            self._admission.look()
        if not self._socket.poll(int(timeout_s * 1000)):
            return
        # a batch and no more: other work of this process has its turn
        for _ in range(_BATCH):
            try:
                identity, *parts = receive_parts(self._socket, 1 + MOST_PARTS)
            except zmq.Again:
                return
            self._take(identity, parts)

    def streams(self) -> dict[StreamId, EndReason | None]:
        """Every stream a relay opened or a replica exists of, and how it ended."""
        return self._ends

    def peers(self) -> list[PeerState]:
        """Every relay that said Hello."""
        now = time.monotonic()
        return [peer.state.heard(now - peer.heard_at) for peer in self._peers.values()]

    def ask_for_last(self, text: str) -> None:
        """Have quiet hosts send what their ranks held back."""
        self._vanished = text

    @property
    def has_refused_keys(self) -> bool:
        """True once a connection was turned away, which the log says."""
        return self._admission is not None and self._admission.refused > 0

    def excuse(self, seconds: float) -> None:
        """Move every clock on by the time the collector was away."""
        self.progress_at += seconds
        for peer in self._peers.values():
            peer.heard_at += seconds

    @property
    def trouble(self) -> str:
        """Why the disk takes nothing just now."""
        return self._replicas.trouble or self._trouble

    def farewell(self, *, is_quiet: bool) -> None:
        """Say Done to every relay until all have left, for a few seconds at most; nothing where the
        disk refuses: a relay that is told removes its spools."""
        self._sync.close()
        self._tell_synced()
        is_on_disk = self._replicas.sync_all()
        if self._sync.has_lost or not is_on_disk:  # a disk says only once that it lost something
            log("the hosts keep their records: here they may not outlast this process")
            return
        deadline = time.monotonic() + _FAREWELL_S
        while time.monotonic() < deadline:
            waiting = [identity for identity, peer in self._peers.items() if not peer.has_left]
            if not waiting:
                return
            for identity in waiting:
                self._send(identity, Done(is_quiet))
            self.work(0.1)

    def close(self) -> None:
        """Close the sockets and files."""
        self._bound.close()
        self._sync.close()
        self._replicas.close()
        self._chunks.close()
        if self._admission is not None:
            self._admission.close()
        self._socket.close()
        self._context.term()
        for address in self.addresses:
            if address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _bind(self, address: str) -> str:
        try:
            if address.startswith("ipc://"):
                folder = Path(address.removeprefix("ipc://")).parent
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._socket.setsockopt(zmq.IPV6, is_ipv6(address))
            self._socket.bind(address)
        except (zmq.ZMQError, OSError) as error:
            raise BindError(f"{address}: cannot be listened on: {error}") from error
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def _take(self, identity: bytes, parts: list[bytes]) -> None:
        try:
            answer = self._answer(identity, decode(parts))
        except WireError as error:
            self._broken.log(f"refused a message: {error}")
            return
        except SpoolError as error:  # the disk may come back: it asks again
            self._note_trouble(str(error))
            answer = None
        # behind the answer: a Hello has just made it a peer, unless it was refused
        if identity in self._peers:
            self._peers[identity].heard_at = time.monotonic()
        if answer is not None:
            self._send(identity, answer)

    def _answer(self, identity: bytes, message: Message) -> Message | None:
        if isinstance(message, Hello):
            return self._greet(identity, message)
        peer = self._peers.get(identity)
        if peer is None:
            return None  # of another run, or this collector has just been started: it says Hello
        if not peer.is_admitted and not isinstance(message, (HostState, Bye)):
            return None  # it asks again
        match message:
            case OpenStream() | Frame() | Sync() | Ended() | ChunkEnded():
                try:
                    return self._answer_of_stream(identity, message)
                except FolderError as error:
                    self._complaints.log(str(error))
                    chunk = 0 if isinstance(message, (Sync, Ended)) else message.chunk
                    return Refused(message.stream, str(error), chunk)
            case HostState():
                if message != peer.state:
                    peer.state, self.progress_at = message, time.monotonic()
                # what it does not know by its own words: a message that is lost is told with the
                # next beat
                for event in self._events - peer.events:
                    self._send(identity, Happened(*event))
                return BeatSeen(self._vanished)
            case Happened(life, entry):
                if len(self._events) < _MOST_EVENTS:
                    self._events.add((life, entry))
                peer.events |= {(life, entry)} & self._events
                return None
            case Stall():
                self._note_stall(identity, message)
                return None
            case Bye():
                peer.has_left = True
                return None
        raise WireError(f"{type(message).__name__} is nothing a relay says")

    def _answer_of_stream(
        self, identity: bytes, message: OpenStream | Frame | Sync | Ended | ChunkEnded
    ) -> Message | None:
        if isinstance(message, OpenStream) and not message.chunk:
            return self._open(message)
        # the origin is asked each time: two hosts may have the same rank and life
        place = self._opened(message.stream, message.origin)
        match message:
            case Frame(chunk=0):
                return self._append(message, place)
            case Sync(stream):
                self._sync.begin(place, (identity, stream), self._replicas.to_sync)
                return None
            case Ended():
                return self._end(message, place)
        answer, has_grown = self._chunks.answer(message, place)
        if has_grown:
            self.progress_at = time.monotonic()
        return answer

    def _greet(self, identity: bytes, hello: Hello) -> Message | None:
        """Take a relay in, unless it brings records of another run than the one gathered here,
        which the log names and the answer does not. A relay is heard while the disk is full: nobody
        else says that its job is over."""
        peer = self._peers.get(identity)
        if peer is not None and peer.is_admitted:
            return None
        name = f"relay {identity.decode(errors='replace')} on {hello.host or 'unknown host'}"
        if peer is None and not self._has_room_for_a_peer():
            peer_count = len(self._peers)
            self._complaints.log(f"{name} is not heard: {peer_count} relays are known already")
            return None
        if hello.version != PROTOCOL_VERSION:
            reason = f"{name} speaks protocol {hello.version}, not {PROTOCOL_VERSION}"
            reason += ": use one version of rankscope everywhere"
            return self._reject(identity, name, reason, reason)
        try:
            # on disk before the relay is a peer: a collector that is killed and started must decide
            # the same
            self._replicas.claim(hello.run_id)
        except FolderError as error:
            self._peers.pop(identity, None)
            return self._reject(identity, name, str(error), _ANOTHER_RUN)
        except SpoolError as error:
            self._note_trouble(str(error))
            if peer is None:
                self._peers[identity] = _Peer()
            return None
        log(f"{name} brings run {hello.run_id}")
        self._trouble = ""
        self.progress_at = time.monotonic()
        self._peers[identity] = _Peer(is_admitted=True)
        return None

    def _has_room_for_a_peer(self) -> bool:
        if len(self._peers) < max(_LEAST_PEERS, _PEERS_A_RANK * self._world_size):
            return True
        oldest = min(self._peers, key=lambda name: self._peers[name].heard_at)
        if time.monotonic() - self._peers[oldest].heard_at < _GONE_S:
            return False
        # silent for a minute: if it lives it says Hello, and is taken in again
        del self._peers[oldest]
        return True

    def _reject(self, identity: bytes, name: str, noted: str, reason: str) -> Rejected:
        if identity not in self._rejected and len(self._rejected) < _MOST_REJECTED:
            self._rejected.add(identity)
            log(f"{name} was turned away: {noted}")
        return Rejected(reason)

    def _open(self, asked: OpenStream) -> Message:
        stream = asked.stream
        # a relay that is wrong, or a stranger with the key, could make files without end
        if stream.rank >= self._world_size:
            return Refused(stream, f"rank {stream.rank} in a world of {self._world_size}")
        place = self._replicas.place(stream, asked.origin)
        length = self._replicas.length(place)
        self._trouble = ""
        if place not in self._ends:
            self._ends[place] = None
            self.progress_at = time.monotonic()
        return StreamOffset(stream, length)

    def _append(self, frame: Frame, place: StreamId) -> Message:
        length = self._replicas.append(place, frame.offset, frame.body)
        if length == frame.offset + len(frame.body):
            self.progress_at = time.monotonic()
        return StreamOffset(frame.stream, length)

    def _tell_synced(self) -> None:
        for (identity, stream), length in self._sync.finished():
            self._send(identity, Synced(stream, length))

    def _opened(self, stream: StreamId, origin: int) -> StreamId:
        """Return where the records of an opened stream go; raise WireError for any other."""
        place = self._replicas.placed(stream, origin)
        if place not in self._ends:
            raise WireError(f"a word about {stream.name}, which nobody opened")
        return place

    def _end(self, ended: Ended, place: StreamId) -> Message:
        name, committed, reason = ended.stream.name, ended.committed, ended.reason
        length = self._replicas.length(place)
        # less than is here: of another stream, or a lie; taken, the rest would count as lost
        if committed < length or reason is EndReason.RUNNING:
            raise WireError(f"{name} ended {reason.value} at {committed}, {length} are here")
        end = StreamEnd(committed=committed, end=reason)
        if write_end(replica_path(self._out, place), end):
            self._trouble = ""
            self._ends[place] = reason
            self.progress_at = time.monotonic()
            log(f"{place.name} ended ({reason.value}), {length} of {committed} bytes")
        return EndedSeen(ended.stream)

    def _note_stall(self, identity: bytes, message: Stall) -> None:
        peer = self._peers[identity]
        if message == peer.stall:
            return
        name = hashlib.blake2b(identity, digest_size=8).hexdigest()
        with contextlib.suppress(SpoolError):  # a full disk: the relay tells it again
            keep_stall(self._out, name, message)
            peer.stall = message

    def _note_trouble(self, text: str) -> None:
        if text != self._trouble:
            log(text)
        self._trouble = text

    def _send(self, identity: bytes, message: Message) -> None:
        """Send without waiting: what a relay misses it asks for again."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([identity, *encode(message)], zmq.DONTWAIT)
