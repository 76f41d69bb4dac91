"""The replicas of a trace folder (`spool.replicas`), open for appending.

The length of a replica is the collector's whole state: it is opened by cutting it to its valid
prefix (a kill may have torn the last write; what is settled of it counts as valid) and grows only
at exactly its own end. Paths are built from integers only and never followed through links. One
folder holds replicas of one run only, and a replica records of one process only: another one of the
same rank and life has the next life.

In a shared trace folder relays write replicas by themselves; there a collector watches
(`SharedWatch`) and finishes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import socket
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from rankscope.companion.waitingrule import HostState, JobState, PeerState, StreamSource
from rankscope.errors import FolderError, SpoolError
from rankscope.record.ranks import MAX_INCARNATIONS, EndReason, StreamId
from rankscope.run.agreements import agree
from rankscope.run.files import (
    bytes_on_disk,
    own_subfolder,
    read_json_map,
    sync_by_name,
    write_by_rename,
)
from rankscope.run.folders import (
    CELLS_SUFFIX,
    HOST_STATE_PREFIX,
    REPLICA_FOLDER,
    RUN_ID_NAME,
    VANISHED_NAME,
)
from rankscope.run.messages import log
from rankscope.spool.chunks.safetensors import write_all
from rankscope.spool.recordformat import CELL_BYTES, UNKNOWN, origin_of, origin_text
from rankscope.spool.replicas import read_end, replica_path, replicated, valid_prefix

DEFAULT_QUOTA_BYTES = 64 << 30
MOST_LIVES = 256
"""Streams of one rank, whatever their numbers: more restarts are a fault, or somebody's attack."""
_OPEN_FILES = 256
_SHARE_OF_LIMIT = 4
"""Replicas may use this part (1/4) of the process's file descriptors."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_PASSING = (errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOSPC, errno.EDQUOT)
"""What a disk says that is full, failed, went read-only or was remounted: it may come back."""


Asker = TypeVar("Asker")


@dataclass(frozen=True, slots=True)
class Unsynced:
    """Bytes of a replica that may be in the memory of this host only."""

    stream: StreamId
    length: int
    descriptor: int
    """One of its own, which is closed afterwards."""
    new: Path | None
    """The replica's path where its name has to be put on disk too."""

    def put_on_disk(self) -> None:
        """Wait for the disk; raise OSError: what it refused once it may have forgotten."""
        try:
            # the data first, then the names: a name that survives must not lead to an empty file
            os.fdatasync(self.descriptor)
            if self.new is not None:
                for path in (self.new.with_suffix(".origin"), self.new.parent):
                    with contextlib.suppress(FileNotFoundError):
                        sync_by_name(path)
        finally:
            os.close(self.descriptor)


class BackgroundSync(Generic[Asker]):
    """Puts replicas on disk in a thread of its own, for which who takes records does not wait: a
    spool is freed only once what the collector has of it is there."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Unsynced | None] = SimpleQueue()
        self._finished: SimpleQueue[tuple[Unsynced, str]] = SimpleQueue()
        self._askers: dict[StreamId, Asker] = {}
        # a disk says once that it lost data: a later fdatasync succeeds on what is left
        self._lost: set[StreamId] = set()
        """Replicas that lost data on the disk: their segments are not freed any more."""
        self._thread = threading.Thread(target=self._work, name="sync", daemon=True)
        self._thread.start()

    @property
    def has_lost(self) -> bool:
        """True once a disk said that it lost something; it says that only once."""
        return bool(self._lost)

    def begin(self, place: StreamId, asker: Asker, to_sync: Callable[[StreamId], Unsynced]) -> None:
        """Have a replica put on disk, opened by `to_sync`, where that is not under way or vain."""
        if place in self._lost or place in self._askers:
            return
        with contextlib.suppress(OSError):  # too many open files: it is asked for again
            # opened here and not in the thread: files may be closed or cut meanwhile
            self._waiting.put(to_sync(place))
            self._askers[place] = asker

    def finished(self) -> Iterator[tuple[Asker, int]]:
        """Yield who asked, and how many bytes of the replica are on disk."""
        with contextlib.suppress(Empty):
            while True:
                unsynced, trouble = self._finished.get_nowait()
                asker = self._askers.pop(unsynced.stream)
                if not trouble:
                    yield asker, unsynced.length
                    continue
                self._lost.add(unsynced.stream)
                name = unsynced.stream.name
                log(f"{name}: cannot be put on disk: {trouble}; its host keeps all of it")

    def close(self) -> None:
        """Finish what was begun; nothing may be begun any more."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (unsynced := self._waiting.get()) is not None:
            try:
                unsynced.put_on_disk()
            except OSError as error:
                self._finished.put((unsynced, str(error.strerror)))
            else:
                self._finished.put((unsynced, ""))


def _origin_path(out: Path, stream: StreamId) -> Path:
    return out / REPLICA_FOLDER / f"{stream.name}.origin"


class ReplicaFiles:
    """The replicas of one trace folder, with a bounded number of files open at a time."""

    def __init__(self, out: Path, *, quota_bytes: int = DEFAULT_QUOTA_BYTES) -> None:
        """Make `<out>/spool` (0700), or raise FolderError."""
        self._out, self._quota_bytes = out, quota_bytes
        self._lengths: dict[StreamId, int] = {}
        self._open: OrderedDict[StreamId, int] = OrderedDict()
        self._places: dict[tuple[StreamId, int], StreamId] = {}
        self._named_on_disk: set[StreamId] = set()
        self._life_counts: dict[int, int] = {}
        self._held: dict[int, int] = {}
        """Bytes of a rank on disk, or more where some were freed since they were counted."""
        self._run_id = ""
        # a job has more ranks than a process may open files: the longest unused are closed
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            limit = _OPEN_FILES * _SHARE_OF_LIMIT
        self._most_open = max(1, min(_OPEN_FILES, limit // _SHARE_OF_LIMIT))
        self.trouble = ""
        """Why the last write failed (a full disk, mostly); empty once one succeeds again."""
        try:
            out.mkdir(mode=0o700, parents=True, exist_ok=True)
            own_subfolder(out / REPLICA_FOLDER)
        except OSError as error:
            raise FolderError(f"{out}: cannot be made: {error.strerror}; see --rs-out") from error

    def claim(self, run_id: str) -> None:
        """Say whose records these are; the first to say so decides, also after a restart.
        FolderError: they are another run's; SpoolError: it cannot be written, now."""
        if run_id == self._run_id:
            return
        holder_id = _first_word(self._out / REPLICA_FOLDER / RUN_ID_NAME, run_id)
        if holder_id != run_id:
            raise FolderError(
                f"{self._out} gathers run {holder_id}, and takes nothing of run {run_id}: "
                f"give each run a trace folder and a collector of its own"
            )
        self._run_id = run_id

    def place(self, stream: StreamId, origin: int) -> StreamId:
        """Return the life whose replica takes these records: their own, or the next free one.

        Args:
            stream: as the host that has them calls it.
            origin: which process wrote them (`spool.recordformat`).

        Raises:
            FolderError: every life is taken, or a replica cannot be read.
            SpoolError: one cannot be read, or the place not be noted, now.
        """
        place = self.placed(stream, origin)
        while place is None:
            free = next(life for life in self._lives(stream) if self._holder(life) is None)
            if self._count(stream.rank) >= MOST_LIVES:
                raise FolderError(
                    f"{stream.name}: {MOST_LIVES} lives of this rank are here, no more are taken"
                )
            _first_word(_origin_path(self._out, free), origin_text(origin))
            self._life_counts[stream.rank] += 1
            place = self.placed(stream, origin)  # another host may have been quicker
            if place not in (None, stream):
                before = f"another process wrote {stream.name} before"
                log(f"{before}: the records of this one are kept as {place.name}")
        return place

    def placed(self, stream: StreamId, origin: int) -> StreamId | None:
        """Return where these records were placed, None where nowhere; errors as of `place`."""
        place = self._places.get((stream, origin))
        if place is not None:
            return place
        for life in self._lives(stream):
            holder = self._holder(life)
            if holder is None:
                return None
            if holder == origin_text(origin):
                self._places[stream, origin] = life
                return life
        return None

    def _lives(self, stream: StreamId) -> Iterator[StreamId]:
        for life in range(stream.incarnation, MAX_INCARNATIONS):
            yield StreamId(rank=stream.rank, incarnation=life)
        raise FolderError(f"{stream.name}: every life of this rank is taken")

    def _holder(self, stream: StreamId) -> str | None:
        """Return whose records the replica of a stream takes, None where it takes anybody's."""
        with contextlib.suppress(OSError):
            return _origin_path(self._out, stream).read_text(errors="replace")
        origin = _origin_in(replica_path(self._out, stream))
        return origin_text(origin) if origin else None

    def length(self, stream: StreamId) -> int:
        """Bytes held of a stream; opens its replica the first time, with errors as of `place`."""
        if stream not in self._lengths:
            self._descriptor(stream)
        return self._lengths[stream]

    def append(self, stream: StreamId, offset: int, body: bytes) -> int:
        """Write `body` if `offset` is the replica's end; return the length afterwards either way.
        FolderError: the quota is used up; a disk that refuses is logged and tried again;
        SpoolError: the replica cannot be opened, now."""
        length = self.length(stream)
        if offset != length:
            return length
        descriptor = self._descriptor(stream)
        # for the rank, all its lives together: restarts must not multiply the quota
        if not self._has_room(stream.rank, len(body)):
            quota = f"{self._quota_bytes} bytes, the quota of one rank"
            raise FolderError(f"{stream.name}: would exceed {quota}")
        try:
            # the length in memory moves last: a write that fails is cut off, and taken again
            write_all(descriptor, body, length)
        except OSError as error:
            self._take_back(stream, descriptor, length)
            if not self.trouble:
                path = replica_path(self._out, stream)
                self.trouble = f"{path}: cannot be written: {error.strerror}"
                log(f"{self.trouble}; tried again until it can")
            return length
        if self.trouble:
            log("the disk takes records again")
            self.trouble = ""
        self._held[stream.rank] += len(body)
        self._lengths[stream] = length + len(body)
        return self._lengths[stream]

    def to_sync(self, stream: StreamId) -> Unsynced:
        """Return what has to be on disk for a stream to outlast a crash; errors as of `length`."""
        # a descriptor of its own: the replica may be closed for room before the thread comes to it
        descriptor = os.dup(self._descriptor(stream))
        path = replica_path(self._out, stream)
        is_new = stream not in self._named_on_disk
        self._named_on_disk.add(stream)
        return Unsynced(stream, self._lengths[stream], descriptor, path if is_new else None)

    def sync_all(self) -> bool:
        """Wait until all replicas, and the name of the tree, are on disk; log what is not."""
        is_on_disk = True
        folder = self._out / REPLICA_FOLDER
        try:
            replicas = [replica_path(self._out, stream) for stream in replicated(self._out)]
        except OSError as error:
            log(f"{folder}: cannot be listed: {error.strerror}")
            return False
        for path in (*replicas, folder, self._out):
            try:
                sync_by_name(path)
            except FileNotFoundError:
                pass  # the tree holds what it held
            except OSError as error:
                log(f"{path}: cannot be put on disk: {error.strerror}")
                is_on_disk = False
        return is_on_disk

    def _take_back(self, stream: StreamId, descriptor: int, length: int) -> None:
        """Undo half a write, or else reopen the file: after a failure, or a remount that made it
        read-only, open files of a file system are of no use."""
        try:
            os.ftruncate(descriptor, length)
        except OSError:
            os.close(self._open.pop(stream))
            del self._lengths[stream]

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _count(self, rank: int) -> int:
        if rank not in self._life_counts:
            self._measure(rank)
        return self._life_counts[rank]

    def _has_room(self, rank: int, more_bytes: int) -> bool:
        """True where the replicas of a rank may occupy more of the disk, which are measured again
        before anything is refused: their settled begin may have been freed."""
        if rank not in self._held or self._held[rank] + more_bytes > self._quota_bytes:
            self._measure(rank)
        return self._held[rank] + more_bytes <= self._quota_bytes

    def _measure(self, rank: int) -> None:
        """See how many lives of a rank are here, and how much of the disk they occupy. Both at
        once: a folder of a thousand ranks is long, and listed for each of them."""
        names = _files_of(self._out, rank)
        self._life_counts[rank] = len({name.rpartition(".")[0] for name in names})
        folder, occupied = self._out / REPLICA_FOLDER, 0
        for name in names:
            if name.endswith(CELLS_SUFFIX):
                with contextlib.suppress(OSError):
                    occupied += bytes_on_disk((folder / name).lstat())
        self._held[rank] = occupied

    def _descriptor(self, stream: StreamId) -> int:
        descriptor = self._open.get(stream)
        if descriptor is not None:
            self._open.move_to_end(stream)
            return descriptor
        path = replica_path(self._out, stream)
        try:
            descriptor = self._with_room(lambda: os.open(path, _FLAGS, 0o600))
        except OSError as error:
            raise _trouble(f"{path}: cannot be opened: {error.strerror}", error) from error
        status = os.fstat(descriptor)
        # O_NONBLOCK let the open return for a pipe that somebody planted; it is refused here
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise FolderError(f"{path}: is not an ordinary file; remove it")
        if stream not in self._lengths:
            try:
                # read once at the start: from then on only this process appends
                valid = self._with_room(lambda: valid_prefix(path))
            except SpoolError as error:
                os.close(descriptor)
                raise _trouble(str(error), error.__cause__) from error
            if valid != status.st_size:
                try:
                    os.ftruncate(descriptor, valid)
                except OSError as error:
                    os.close(descriptor)
                    raise _trouble(f"{path}: cannot be cut: {error.strerror}", error) from error
                size, cut = status.st_size, f"cut from {status.st_size} to {valid} valid bytes"
                behind = f"it goes on behind the {valid} that were settled"
                survived = f"{size} bytes survived a crash of the host; {behind}"
                log(f"{path}: {cut if valid < size else survived}")
            self._lengths[stream] = valid
        self._open[stream] = descriptor
        while len(self._open) > self._most_open:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def _with_room(self, ask: Callable[[], int]) -> int:
        """Return what needs one more descriptor; where they are short, files are closed for it."""
        while True:
            try:
                return ask()
            except (OSError, SpoolError) as error:
                cause = error if isinstance(error, OSError) else error.__cause__
                is_short = isinstance(cause, OSError) and cause.errno in _NO_DESCRIPTORS
                if not is_short or not self._open:
                    raise
                os.close(self._open.popitem(last=False)[1])


def _files_of(out: Path, rank: int) -> list[str]:
    stem = StreamId(rank=rank, incarnation=0).name.rpartition(".")[0]
    try:
        names = os.listdir(out / REPLICA_FOLDER)
    except OSError:
        return []
    return [name for name in names if name.startswith(f"{stem}.")]


def _first_word(path: Path, word: str) -> str:
    """Write a small file unless there is one; return what stands in it: the first word decides."""
    # a name that no other process on any host has: two drafts in one file would be neither's word
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.new")
    try:
        with draft.open("w") as file:
            file.write(word)
            file.flush()
            os.fsync(file.fileno())  # else a crash of the host may leave its name alone
        try:
            os.link(draft, path)  # one of several hosts wins, and its file is whole
        except FileExistsError:
            if not path.stat().st_size:  # as of a host that crashed
                os.replace(draft, path)
        except OSError:  # a disk without hard links
            if not path.exists():
                os.replace(draft, path)
        return path.read_text(errors="replace")
    except OSError as error:
        raise SpoolError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _origin_in(replica: Path) -> int:
    """Return whose records a replica begins with; UNKNOWN where there are none."""
    try:
        with replica.open("rb") as file:
            begin = file.read(CELL_BYTES)
            return origin_of(begin + file.read(int.from_bytes(begin[6:8], "little") * CELL_BYTES))
    except FileNotFoundError:
        return UNKNOWN
    except OSError as error:
        raise _trouble(f"{replica}: cannot be read: {error.strerror}", error) from error


def _trouble(text: str, cause: BaseException | None) -> FolderError | SpoolError:
    # told apart because the sender acts on it: refused for good, or asked again
    is_passing = isinstance(cause, OSError) and cause.errno in _PASSING
    return SpoolError(text) if is_passing else FolderError(text)


def write_host_state(out: Path, relay: str, beat: int, state: HostState) -> None:
    """Leave the state of one relay, or raise SpoolError; another `beat` shows that it lives."""
    path = out / REPLICA_FOLDER / f"{HOST_STATE_PREFIX}{relay}.json"
    fields = {"beat": beat, **asdict(state), "job": int(state.job)}
    write_by_rename(path, json.dumps(fields) + "\n")


def read_host_states(out: Path) -> dict[str, tuple[int, HostState]]:
    """Read the beats and states of all relays; one that cannot be read is left out."""
    states = {}
    try:
        names = os.listdir(out / REPLICA_FOLDER)
    except OSError:
        return {}
    for name in names:
        if name.startswith(HOST_STATE_PREFIX) and name.endswith(".json"):
            with contextlib.suppress(SpoolError, KeyError, TypeError, ValueError):
                fields = read_json_map(out / REPLICA_FOLDER / name)
                beat, job = int(fields.pop("beat")), JobState(fields.pop("job"))
                counts = {field: int(count) for field, count in fields.items()}
                states[name] = beat, HostState(job=job, **counts)
    return states


class SharedWatch(StreamSource):
    """Streams that relays write into a trace folder by themselves."""

    def __init__(self, out: Path, own_host: Callable[[], HostState | None] | None = None) -> None:
        """Watch; `own_host` has the state of this host where no other writes into the folder."""
        self._out, self._own_host = out, own_host
        self._seen: dict[StreamId, tuple[int, EndReason | None]] = {}
        self._beats: dict[str, tuple[int, float]] = {}
        self._said: list[HostState] = []
        self._peers: list[PeerState] = []
        self.progress_at = time.monotonic()
        ReplicaFiles(out).close()

    def work(self, timeout_s: float) -> None:
        """Wait, then look at replicas, markers and hosts' states."""
        time.sleep(timeout_s)
        now = time.monotonic()
        lengths: dict[StreamId, tuple[int, EndReason | None]] = {}
        for stream, length in replicated(self._out).items():
            marker = read_end(replica_path(self._out, stream))
            lengths[stream] = (length, marker.end if marker else None)
        if lengths != self._seen:
            self._seen, self.progress_at = lengths, now
        # a beat that does not change tells a dead relay from one that is only idle
        self._peers = []
        host_state = None if self._own_host is None else self._own_host()
        if self._own_host is None:
            states = read_host_states(self._out)
        else:  # of a process that hears itself
            states = {} if host_state is None else {"": (time.monotonic_ns(), host_state)}
        reported = [states[name][1] for name in sorted(states)]
        if reported != self._said:
            self._said, self.progress_at = reported, now
        for name, (beat, state) in states.items():
            last, since = self._beats.get(name, (-1, now))
            if beat != last:
                since = now
            self._beats[name] = beat, since
            self._peers.append(state.heard(now - since))

    def streams(self) -> dict[StreamId, EndReason | None]:
        """Every stream with a replica, and how it ended."""
        return {stream: end for stream, (_, end) in self._seen.items()}

    def peers(self) -> list[PeerState]:
        """Every host that wrote a state."""
        return self._peers

    def excuse(self, seconds: float) -> None:
        """Move every clock on by the time the collector was away."""
        self.progress_at += seconds
        self._beats = {name: (beat, at + seconds) for name, (beat, at) in self._beats.items()}

    def ask_for_last(self, text: str) -> None:
        """Leave word for the relays."""
        with contextlib.suppress(OSError):  # asked again
            agree(self._out / REPLICA_FOLDER, VANISHED_NAME, text)

    def farewell(self, *, is_quiet: bool) -> None:
        """Nothing to do: relays see the tree appear."""

    def close(self) -> None:
        """Nothing is open."""
