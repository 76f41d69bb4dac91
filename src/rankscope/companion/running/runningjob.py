"""The reader of a running job: it reads what is new in each stream once. Those that are handed it
ask where the ranks are, which steps every rank has ended, and for the trace of some of them.

`StepKeeper` writes the finished steps into the tree, and frees their records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from rankscope.companion.running.splitstream import SplitStream, StepKey
from rankscope.errors import RankscopeError, SpoolError
from rankscope.record.call import Mode
from rankscope.record.ranks import StreamId
from rankscope.run.jobstatus import job_end
from rankscope.run.processes import GROWS_FROM_BYTES
from rankscope.spool.recordformat import Decoded
from rankscope.spool.replicas import StreamEnd, read_end, replica_path, replicated
from rankscope.tree.assembly.rankstreams import StreamBytes
from rankscope.tree.build import assemble
from rankscope.tree.document import Document
from rankscope.tree.growingtree import GrowingTree, trace_of
from rankscope.tree.step import StepName
from rankscope.tree.views import Trace

_ABSENT_S: Final = 10.0
"""A rank that began no step of a mode takes no part in it, once others ended one so long ago."""
_DEVICE_S: Final = 2.0
"""An accelerator's values may come so long after their step ended."""
_LOOK_BYTES: Final = 64 << 20
_MOST_HELD: Final = 256 << 20
"""Bytes of records above which ranks that are ahead wait for those that are behind."""
_MOST_LAGGING: Final = 64 << 20
"""Bytes of steps outside training that wait for a rank that counts fewer of them than others."""
_STEPS_PAST: Final = 2
"""So many steps after one a rank writes no record of it any more."""
_AWAY_S: Final = 60.0
"""A rank from which nothing came, or no step of a mode, takes no part after so long."""


class Listener(Protocol):
    """Follows a job while it runs."""

    def look(self, is_stopped: Callable[[], bool]) -> None:
        """Something may be new: do what is to be done."""

    def needs(self, key: StepKey) -> bool:
        """True for a held step whose records are not to be let go yet."""


class RunningJob:
    """The streams of the newest life of a job, read as they grow."""

    def __init__(self, out: Path, *, traced_ranks: int) -> None:
        self._out, self._traced_ranks = out, traced_ranks
        self._streams: dict[int, SplitStream] = {}
        self._replaced: list[SplitStream] = []
        """Of earlier lives, with nothing held."""
        self.lengths: dict[StreamId, int] = {}
        self.life = 0
        self._seen_at: dict[StepKey, float] = {}
        self._read_s = 0.0
        self._definitions: Decoded = {}
        self._ends: dict[int, StreamEnd] = {}
        self.trouble: dict[int, str] = {}
        """{rank: why its stream cannot be read}; it is left alone from then on."""
        self.taken_bytes = 0
        self.listeners: list[Listener] = []

    @property
    def streams(self) -> list[SplitStream]:
        """What was read, of each rank its last life last."""
        return [*self._replaced, *self._streams.values()]

    def end_of(self, stream: StreamId) -> StreamEnd | None:
        """Return the end marker of a stream as of the last look; None where there was none."""
        if stream.incarnation == self.life:
            return self._ends.get(stream.rank)
        return read_end(replica_path(self._out, stream))

    @property
    def held_bytes(self) -> int:
        """Of the records of steps that are held."""
        return sum(stream.held_bytes for stream in self._streams.values())

    @property
    def kept_bytes(self) -> int:
        """Of the records that hold for the whole job."""
        return sum(stream.kept_bytes for stream in self._streams.values())

    @property
    def settled_bytes(self) -> int:
        """That a `settle` would free, about."""
        return sum(s.offset - s.settled - s.held_bytes for s in self._streams.values())

    @property
    def keeps_tensors(self) -> bool:
        """Full tensors are kept of every step."""
        return any(stream.keeps_tensors for stream in self._streams.values())

    def look(self, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Read what is new, have listeners look, let go what none needs; True where more waits."""
        self.taken_bytes = self.read(is_stopped)
        for listener in self.listeners:
            listener.look(is_stopped)
        self.let_go()
        return self.taken_bytes > 0

    def let_go(self) -> None:
        """Let the records go that no listener needs."""
        needed = {k for k in self.held() for listener in self.listeners if listener.needs(k)}
        self.drop(self.held() - needed)

    def read(self, is_stopped: Callable[[], bool]) -> int:
        """Read what is new in every stream, a part of it where that is much; return the bytes."""
        self._read_s = time.time()
        self._discover()
        # a share for each: one rank that is far ahead must not use up the look
        share = _LOOK_BYTES // max(1, len(self._streams))
        # a step is held until its last rank ends it: the memory is freed by reading those that are
        # behind
        behind = self._behind() if self.held_bytes > _MOST_HELD else None
        read_bytes = 0
        for rank, stream in self._streams.items():
            if is_stopped():
                break
            if rank in self.trouble or (behind is not None and rank not in behind):
                continue
            try:
                read_bytes += stream.read(share)
            except SpoolError as error:
                self.trouble[rank] = str(error)
        now = time.monotonic()
        for stream in self._streams.values():
            for key in stream.ended_ns:
                self._seen_at.setdefault(key, now)
        return read_bytes

    def read_again(self) -> None:
        """Read again from the first record that is there: steps of earlier records were let go."""
        for rank, stream in self._streams.items():
            self._streams[rank] = SplitStream(self._out, stream.stream, self._definitions, stream)
        self._seen_at.clear()

    def finished(self) -> list[StepKey]:
        """Return the held steps that every rank has ended, in the order in which they ended."""
        now = time.monotonic()
        has_accelerator = any(stream.has_accelerator for stream in self._streams.values())
        least_s = _DEVICE_S if has_accelerator else 0.0
        keys = []
        for key, seen_at in self._seen_at.items():
            is_late = now - seen_at >= _ABSENT_S
            has_all_ranks = len(self._streams) >= self._traced_ranks
            if (
                now - seen_at >= least_s
                and (has_all_ranks or is_late)
                and all(
                    stream.is_over
                    or rank in self._ends
                    or stream.ended.get(key.mode, -1) >= key.step
                    or (key.mode not in stream.begun and is_late)
                    for rank, stream in self._streams.items()
                )
            ):
                keys.append(key)
        return sorted(keys, key=self._when)

    def past(self) -> list[StepKey]:
        """Return the held steps to which no rank will add a record, in the order of their ends."""
        now = time.monotonic()
        past_keys, lagging = [], []
        for key, seen_at in self._seen_at.items():
            is_away = now - seen_at >= _AWAY_S
            if len(self._streams) < self._traced_ranks and not is_away:
                continue
            behind = [
                stream
                for rank, stream in self._streams.items()
                if not self._is_past(rank, stream, key)
                and not (is_away and key.mode not in stream.begun)
            ]
            if not behind:
                past_keys.append(key)
            elif all(self._has_trained_on(stream, key) for stream in behind):
                lagging.append(key)
        room = _MOST_LAGGING
        for key in sorted(lagging, key=self._when, reverse=True):
            room -= self.bytes_of(key)
            if room < 0:
                past_keys.append(key)
        return sorted(past_keys, key=self._when)

    def _is_past(self, rank: int, stream: SplitStream, key: StepKey) -> bool:
        if stream.is_over or rank in self._ends:
            return stream.is_read_out
        ended = stream.ended.get(key.mode, -1)
        if ended >= key.step + _STEPS_PAST:
            return True
        # one that never evaluates takes no part; one that does may count fewer steps than others
        is_behind = key.mode in stream.begun and ended < key.step
        return not is_behind and self._has_trained_on(stream, key)

    def _has_trained_on(self, stream: SplitStream, key: StepKey) -> bool:
        """True for a step outside training, behind which a rank trained on without it."""
        trained = max(stream.trained_by_then.get(key, -1) for stream in self._streams.values())
        is_side = key.mode != int(Mode.TRAIN)
        return is_side and stream.ended.get(int(Mode.TRAIN), -1) >= trained + _STEPS_PAST

    def _when(self, key: StepKey) -> tuple[int, StepKey]:
        return self.ended_ns(key), key

    def ended_ns(self, key: StepKey) -> int:
        """Return the wall clock in ns at which the last rank ended a held step, 0 for none."""
        return max((stream.ended_ns.get(key, 0) for stream in self._streams.values()), default=0)

    def bytes_of(self, key: StepKey) -> int:
        """Return the bytes of the records of a held step."""
        return sum(stream.held.get(key, 0) for stream in self._streams.values())

    def held(self) -> set[StepKey]:
        """Return the steps whose records are in memory."""
        return {key for stream in self._streams.values() for key in stream.held}

    def _behind(self) -> set[int]:
        ranks: set[int] = set()
        modes: set[int] = set()
        for key in sorted(self._seen_at, key=self._when):
            if key.mode not in modes:
                late = {
                    r for r, stream in self._streams.items() if not self._is_past(r, stream, key)
                }
                modes |= {key.mode} if late else set()
                ranks |= late
        return ranks or {*self._streams}

    def has_tensors(self, key: StepKey) -> bool:
        """True where full tensors of a step were asked for: which came is known at the end."""
        return any(key in stream.with_tensors for stream in self._streams.values())

    def settle(self) -> None:
        """Free on disk what was read and is in the tree; raise SpoolError or OSError."""
        for stream in self._streams.values():
            stream.settle()

    def drop(self, keys: Iterable[StepKey]) -> None:
        """Let the records of steps go."""
        for key in keys:
            self._seen_at.pop(key, None)
            for stream in self._streams.values():
                stream.drop(key)

    def trace(self, keys: Iterable[StepKey]) -> Callable[[], Trace]:
        """Return what makes the trace of setup and some steps as they are now, in any thread; it
        raises TraceError without a record, TraceVersionError for a newer record format."""
        sources, read_s = self._sources(keys), self._read_s

        def made() -> Trace:
            document = assemble(sources, decoded=self._definitions, end=job_end([self._out]))
            return trace_of(document, self._out, is_live=True, read_s=read_s)

        return made

    def document(self, keys: Iterable[StepKey], began_ns: int | None = None) -> Document:
        """Return setup and some steps as a document; `began_ns` and errors as of `assemble`."""
        end = job_end([self._out])
        return assemble(self._sources(keys), decoded=self._definitions, began_ns=began_ns, end=end)

    def _sources(self, keys: Iterable[StepKey]) -> list[StreamBytes]:
        chosen = set(keys)
        return [
            StreamBytes(
                stream=stream.stream,
                data=stream.cells(chosen),
                is_verified=True,
                end=self._ends[rank].end if rank in self._ends else None,
            )
            for rank, stream in self._streams.items()
        ]

    def _discover(self) -> None:
        self.lengths = lengths = replicated(self._out)
        life = max((stream.incarnation for stream in lengths), default=0)
        if life > self.life:  # the job began again: what was before is over
            self.life = life
            for reader in self._streams.values():
                reader.close()
            self._replaced += self._streams.values()
            self._streams.clear()
            self._ends.clear()
            self._seen_at.clear()
            self.trouble.clear()
        for stream in lengths:
            if stream.incarnation == life and stream.rank not in self._streams:
                self._streams[stream.rank] = SplitStream(self._out, stream, self._definitions)
        self._streams = dict(sorted(self._streams.items()))
        for rank, split in self._streams.items():
            marker = None if rank in self._ends else read_end(replica_path(self._out, split.stream))
            if marker is not None:
                self._ends[rank] = marker


_PART_BYTES: Final = 32 << 20
"""Of records that are assembled at a time, where that is more than one step."""
_MOST_BYTES: Final = 128 << 20
"""Of records of one step: to assemble it takes a dozen times as much memory."""
_WAIT_S: Final = 10.0
"""Steps wait for others until they are worth a part, but not longer."""
_RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSizes:
    """Bytes of records."""

    begin: int = GROWS_FROM_BYTES
    """Of the whole job, before the tree grows."""
    part: int = 8 << 20
    """That are worth a part; 0 for any."""
    free: int = 16 << 20


class StepKeeper:
    """One job, whose tree grows once its records are many."""

    def __init__(
        self,
        job: RunningJob,
        out: Path,
        *,
        say: Callable[[str], object],
        sizes: KeepSizes = KeepSizes(),
        dataset: Callable[[Trace], None] | None = None,
    ) -> None:
        """Write nothing yet; `say` takes lines about trouble. `dataset` takes the trace of each
        part before it is in the tree, so it has what is in the tree; after a kill it may get steps
        again."""
        self._job, self._out, self._say = job, out, say
        self._sizes, self._dataset = sizes, dataset
        self._tree: GrowingTree | None = None
        self._written_at = time.monotonic()
        self._took_s = 0.0
        self._is_off = False
        self._retry_at = 0.0

    def look(self, is_stopped: Callable[[], bool]) -> None:
        """Write what is worth it, free it."""
        if self._is_off or time.monotonic() < self._retry_at:
            return
        try:
            self._grow_once(is_stopped)
        except OSError as error:
            self._say(
                f"steps are not written while the job runs: {error.strerror}; tried again; their "
                "records are kept"
            )
            self._retry_at = time.monotonic() + _RETRY_S
        except RankscopeError as error:
            self._say(
                f"steps are not written any more while the job runs: {error}; their records are "
                "kept until its end"
            )
            self.close()

    def needs(self, key: StepKey) -> bool:
        """True for a held step that is to be written."""
        tree = None if self._is_off else self._tree
        return tree is not None and StepName(self._job.life, key.mode, key.step) not in tree.written

    @property
    def is_behind(self) -> bool:
        """So much came with the last look that there should be less time between them."""
        is_growing = self._tree is not None and not self._is_off
        return is_growing and self._job.taken_bytes >= self._sizes.free

    def close(self) -> None:
        """Write nothing more."""
        self._is_off = True
        if self._tree is not None:
            self._tree.close()

    def _grow_once(self, is_stopped: Callable[[], bool]) -> None:
        job = self._job
        if self._tree is None:
            if sum(job.lengths.values()) >= self._sizes.begin:
                self._tree = GrowingTree.to_write(self._out)
                if self._tree is not None:
                    job.read_again()
            return
        if job.keeps_tensors:
            self.close()  # which records name a tensor is known at the end
            return
        largest = max(map(job.bytes_of, job.held()), default=0)
        if largest > _MOST_BYTES:
            self._say(
                f"steps are not written while the job runs: one takes {largest >> 20} MB of "
                f"records, more than {_MOST_BYTES >> 20}; their records are kept until its end"
            )
            self.close()
            return
        due = [key for key in job.past() if self.needs(key) and not job.has_tensors(key)]
        for part in self._parts(self._due(due)):
            if is_stopped():
                return
            self._write(self._tree, part)
        job.let_go()
        rewritten = job.kept_bytes + job.held_bytes  # rewritten each time
        if job.settled_bytes >= max(self._sizes.free, 2 * rewritten):
            # on disk before the records go: `settle` destroys what these steps were made of
            self._tree.sync()
            job.settle()

    def _due(self, keys: list[StepKey]) -> list[StepKey]:
        """Return the steps, or none yet: setup is read again for each part."""
        worth = max(self._sizes.part, self._job.kept_bytes) if self._sizes.part else 0
        # longer where it took long to write the last one
        has_waited = time.monotonic() - self._written_at > _WAIT_S * max(1.0, self._took_s)
        return keys if has_waited or sum(map(self._job.bytes_of, keys)) >= worth else []

    def _parts(self, keys: Sequence[StepKey]) -> list[list[StepKey]]:
        parts: list[list[StepKey]] = []
        size = _PART_BYTES
        for key in keys:
            if size >= _PART_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(key)
            size += self._job.bytes_of(key)
        return parts

    def _write(self, tree: GrowingTree, keys: Sequence[StepKey]) -> None:
        began = time.monotonic()
        document = self._job.document(keys, tree.began_ns)
        if self._dataset is not None:
            self._dataset(trace_of(document, self._out, is_live=True))
        # behind the dataset: a kill in between gives the dataset these steps twice, in files of the
        # same names
        tree.add(document)
        self._written_at = time.monotonic()
        self._took_s = self._written_at - began
