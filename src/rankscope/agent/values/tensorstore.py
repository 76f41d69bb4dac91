"""Full tensors: which are kept, where they go, that equal ones are stored once, and what could not
be kept.

A kept tensor has a reference, a number from 1 in each life of a rank. Its bytes are written first,
then its TENSOR record, then the value that refers to it: a reference means bytes that are whole.
(From an accelerator the bytes come later: a reference without a record means that they never did.)
"""

from __future__ import annotations

from _thread import get_ident
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import xxhash

from rankscope.agent.guard import say
from rankscope.agent.recorder import Recorder
from rankscope.capture.describe import Described
from rankscope.capture.keeping import DeviceStaging, byte_pieces, own_bytes, why_not_stored
from rankscope.errors import ChunkError, ChunkFullError
from rankscope.globs import glob_matches, slot_matches, split_place
from rankscope.record.ranks import StreamId
from rankscope.run.files import free_bytes
from rankscope.settings import Settings
from rankscope.spool.chunks.writing import ByteArray, ChunkEntry, ChunkWriter
from rankscope.spool.segments import WriteLock

_MOST_STORED: Final = 1 << 16
_CLOSED: Final = "the trace is closed"
BUDGET_SPENT: Final = "the disk budget is used up (--rs-tensor-budget)"
SPOOL_FULL: Final = "the spool is full (--rs-spool-bytes)"
_xxh3: Final[Any] = xxhash.xxh3_64_intdigest


RecordTensor = Callable[[int, ChunkEntry, Described], bool]
"""Commits a TENSOR record: reference, place, description; False where there was no room."""


class TensorBytes(NamedTuple):
    """The bytes of one tensor."""

    whole: ByteArray | None
    pieces: Iterable[ByteArray]
    live: torch.Tensor | None = None
    """The host tensor that owns the memory of `whole`: the program may write to it meanwhile."""
    stride: tuple[int, ...] = ()


class Store(ABC):
    """Stores tensors. For one thread at a time; the caller sees to that."""

    def __init__(self, record: RecordTensor) -> None:
        self.refusal = ""
        self._record = record
        self._is_finished = False

    @property
    def closed_why(self) -> str:
        """Why nothing is stored any more, "" while something may be."""
        return _CLOSED if self._is_finished else ""

    @abstractmethod
    def store(self, reference: int, described: Described, tensor: TensorBytes) -> ChunkEntry | None:
        """Store bytes under a new reference, or find equal ones; None where `refusal` says why."""

    def finish(self) -> None:
        """Store no more; stored tensors stay. Raises ChunkError if the disk refuses the rest."""
        self._is_finished = True


class LocalChunkStore(Store):
    """Stores tensors in chunks."""

    def __init__(self, writer: ChunkWriter, record: RecordTensor) -> None:
        super().__init__(record)
        self._writer = writer
        self._stored: dict[tuple[int, str, tuple[int, ...]], ChunkEntry] = {}

    @property
    def closed_why(self) -> str:
        """As `Store.closed_why`."""
        return "" if self._writer.is_open else self._writer.trouble or _CLOSED

    def store(self, reference: int, described: Described, tensor: TensorBytes) -> ChunkEntry | None:
        """As `Store.store`; a write into `live` meanwhile makes the checksum a wrong one."""
        meta, checksum = described.meta, None
        contiguous, pieces, live, _ = tensor
        if contiguous is not None:
            checksum, pieces = int(_xxh3(contiguous)), (contiguous,)
            equal = self._stored.get((checksum, meta.dtype, meta.shape))
            if equal is not None:
                return equal
        self.refusal = self._writer.trouble or _CLOSED
        try:
            entry = self._writer.write(reference, meta.dtype, meta.shape, pieces, checksum=checksum)
            # the bytes were not copied: a program that wrote to them meanwhile is found by a second
            # hash
            if live is not None and contiguous is not None and _xxh3(contiguous) != checksum:
                copies = byte_pieces(live)
                entry = self._writer.write(reference, meta.dtype, meta.shape, copies)
        except ChunkFullError:
            self.refusal = BUDGET_SPENT
            return None
        except ChunkError:
            self.refusal = self._writer.trouble
            return None
        if entry is None:
            return None
        key = (entry.checksum, meta.dtype, meta.shape)
        equal = self._stored.get(key)
        if equal is not None:
            return equal  # what was just written is not committed: its place is used again
        # bytes, then the record: bytes without a record are lost room, a record without bytes is a
        # lie
        self._writer.commit(entry)
        if not self._record(reference, entry, described):
            self._writer.withdraw(entry)
            self.refusal = SPOOL_FULL
            return None
        if len(self._stored) >= _MOST_STORED:
            del self._stored[next(iter(self._stored))]
        self._stored[key] = entry
        return entry

    def finish(self) -> None:
        """As `Store.finish`."""
        self._writer.finish()


_MOST_NAMES: Final = 1 << 16
_MOST_REASONS: Final = 50
_SHARE: Final = 0.5


class TensorStore:
    """Keeps the full tensors of one rank. Call it under
    `rankscope.capture.torch_internals.tensors`; every method may be called from several threads."""

    def __init__(
        self,
        globs: Iterable[str],
        store: Store,
        record: RecordTensor,
        *,
        memory_bytes: int,
        tell: Callable[[str], None],
        note: Callable[[str, str], None] | None = None,
    ) -> None:
        """Prepare to keep; nothing is made before the first tensor.

        Args:
            globs: `path:slot`, split at the first colon; without one all slots of those paths.
            record: commits that another value has bytes which are stored already.
            memory_bytes: bytes on their way from an accelerator, held at a time.
            tell: called once for each reason for which something is not kept, and for the sums.
            note: told the same, the reason before the text, for the trace.
        """
        self._setting_globs = tuple(globs)
        self._globs: dict[str, tuple[str, str]] = {}
        self.unmatched_globs: dict[str, None] = {}
        """Globs that have selected nothing so far, most likely misspelt."""
        self._ever: set[str] = set()
        self.select_also(())
        self._store = store
        self._record = record
        self._memory_bytes = memory_bytes
        self._tell = tell
        self._note = note or (lambda _reason, _text: None)
        self._storing = WriteLock()
        self._holder = self._storing.holder
        self._next_reference = 1
        self._staging: dict[torch.device, DeviceStaging] = {}
        self._staged: dict[
            tuple[torch.device, int], tuple[int, Described, tuple[int, ...], int]
        ] = {}
        """By device and ticket: reference, description, strides, bytes."""
        self._missed: dict[str, list[int]] = {}

    def select_also(self, globs: tuple[str, ...]) -> None:
        """Keep the tensors that these globs and those of the setting match, until the next call."""
        self._globs = {glob: split_place(glob) for glob in (*self._setting_globs, *globs)}
        self._takes_all = any({path, slot} <= {"*", "**"} for path, slot in self._globs.values())
        self._choices: dict[tuple[str, str], bool] = {}
        if not self._takes_all:
            self.unmatched_globs |= dict.fromkeys(
                glob for glob in self._globs if glob not in self._ever
            )
        self._ever |= {*self._globs}

    def wants(self, path: str, slot: str) -> bool:
        """True where the globs take this slot of this path."""
        if self._takes_all:
            return True
        is_taken = self._choices.get((path, slot))
        if is_taken is None:
            taking = {
                glob
                for glob, (p, s) in self._globs.items()
                if glob_matches(p, path) and slot_matches(s, slot)
            }
            for glob in taking:
                self.unmatched_globs.pop(glob, None)
            is_taken = bool(taking)
            if len(self._choices) >= _MOST_NAMES:
                self._choices.clear()
            self._choices[path, slot] = is_taken
        return is_taken

    def keep(self, tensor: torch.Tensor, described: Described) -> int:
        """Keep a tensor of this rank, described by `Describer.describe`, as it is now; it may
        change or be freed afterwards. Return the reference of its bytes, 0 if it is not kept."""
        if self._store.closed_why:
            return self._miss(self._store.closed_why, tensor)
        token, holder = (get_ident(),), self._holder
        try:
            if holder.setdefault(0, token) is not token and not self._storing.wait(token):
                why = "another thread, or what a signal interrupted, was writing"
                return self._miss(why, tensor)
            can_read = described.can_digest or described.can_digest_on_device
            reason = why_not_stored(described.meta, can_read=can_read)
            if reason is not None:
                return self._miss(f"{described.meta.dtype}: {reason}", tensor)
            if described.can_digest_on_device:
                return self._stage(tensor, described)
            return self._store_from_host(tensor, described)
        finally:
            if 0 in holder and holder[0] is token:
                del holder[0]

    def collect(self, *, wait: bool = False) -> None:
        """Store what has arrived from accelerators; wait for all at the end of a trace alone."""
        if not self._staged:
            return
        self._exclusively(lambda: self._collect(wait=wait))

    def close(self) -> None:
        """Store what is still on its way, finish the open chunk, and tell what was not kept."""
        try:
            # nested in a write: the chunk is finished from the records
            self._exclusively(self._finish)
        except ChunkError as error:
            self._tell(str(error))
        for reason, line in zip(self._missed, self.notes()):
            self._tell(line)
            self._note(reason, line)

    def notes(self) -> list[str]:
        """Return a line for each reason for which tensors were not kept: how many, how large."""
        return [
            f"{count} {'tensor' if count == 1 else 'tensors'} ({size / 1e6:.1f} MB) "
            f"{'was' if count == 1 else 'were'} not kept: {reason}"
            for reason, (count, size) in self._missed.items()
        ]

    # ------------------------------------------------------------------ storing

    def _exclusively(self, work: Callable[[], None]) -> None:
        """Do what no other thread may do meanwhile; nothing inside of a write (`WriteLock`)."""
        token, holder = (get_ident(),), self._holder
        try:
            if holder.setdefault(0, token) is token or self._storing.wait(token):
                work()
        finally:
            if 0 in holder and holder[0] is token:
                del holder[0]

    def _finish(self) -> None:
        self._collect(wait=True)
        for staging in self._staging.values():
            staging.close()
        self._staging.clear()
        self._store.finish()

    def _store_from_host(self, tensor: torch.Tensor, described: Described) -> int:
        reference = self._next_reference
        # now: an interrupt while it is stored may cost a number, never give it twice
        self._next_reference += 1
        content = TensorBytes(own_bytes(tensor), byte_pieces(tensor), tensor)
        entry = self._store.store(reference, described, content)
        # nothing was stored under the number, so the next tensor gets it
        if entry is None or entry.reference != reference:
            self._next_reference = reference
        return self._miss(self._store.refusal, tensor) if entry is None else entry.reference

    def _stage(self, tensor: torch.Tensor, described: Described) -> int:
        device = tensor.device
        staging = self._staging.get(device)
        if staging is None:
            staging = self._staging[device] = DeviceStaging(device, self._memory_bytes)
        ticket = staging.stage(tensor)
        if ticket is None:
            self._collect(wait=False)
            ticket = staging.stage(tensor)
        if ticket is None:
            why = "no room on the way from the accelerator (--rs-tensor-memory)"
            if staging.is_capturing():
                why = "a CUDA graph was being captured"
            return self._miss(staging.failure or why, tensor)
        reference = self._next_reference
        self._next_reference += 1
        stride = () if tensor.is_contiguous() else tuple(tensor.stride())
        self._staged[device, ticket] = reference, described, stride, _size_of(tensor)
        return reference

    def _collect(self, *, wait: bool) -> None:
        for device, staging in self._staging.items():
            for ticket, data in staging.arrived(wait=wait):
                staged = self._staged.pop((device, ticket), None)
                if staged is None:
                    continue  # interrupted before its reference was given
                reference, described, stride, _ = staged
                entry = self._store.store(
                    reference, described, TensorBytes(data, (), stride=stride)
                )
                if entry is None:
                    self._count(self._store.refusal, len(data))
                elif entry.reference != reference:
                    self._record(reference, entry, described)
            if staging.failure:
                for key in [key for key in self._staged if key[0] == device]:
                    self._count(staging.failure, self._staged.pop(key)[3])

    # ------------------------------------------------------------------ not kept

    def _miss(self, reason: str, tensor: torch.Tensor) -> int:
        self._count(reason, _size_of(tensor))
        return 0

    def _count(self, reason: str, size: int) -> None:
        missed = self._missed.get(reason)
        if missed is None and len(self._missed) >= _MOST_REASONS:
            reason = "(further reasons)"
            missed = self._missed.get(reason)
        if missed is None:
            missed = self._missed[reason] = [0, 0]
            self._tell(f"tensors are not kept: {reason}")
            self._note(reason, f"tensors were not kept: {reason}")
        missed[0] += 1
        missed[1] += size


def _size_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, 0 for one that does not tell."""
    try:
        return int(tensor.numel()) * tensor.element_size()
    except (RuntimeError, TypeError, NotImplementedError):
        return 0


def free_disk_share(folder: Path, writers: int) -> int:
    """Return the default budget of one rank: half of what is free, divided by the writers."""
    return int(free_bytes(folder) * _SHARE) // max(writers, 1)


def make_tensor_store(
    settings: Settings,
    recorder: Recorder,
    folder: Path,
    stream: StreamId,
    writers: int,
    make_store: Callable[[Recorder, int], Store] | None = None,
) -> TensorStore:
    """Return what keeps the full tensors of one rank.

    Args:
        folder: takes the chunks: the trace folder, or where that is not seen the run folder.
        writers: ranks that keep tensors on that disk, for the default budget.
        make_store: takes the bytes in place of chunks, told how many there may be.
    """
    budget = settings.tensor_budget
    limit_bytes = free_disk_share(folder, writers) if budget is None else budget
    if make_store is not None:
        store = make_store(recorder, limit_bytes)
    else:
        chunks = ChunkWriter(folder, stream, limit_bytes=limit_bytes)
        store = LocalChunkStore(chunks, recorder.tensor)
    return TensorStore(
        settings.tensors or (),
        store,
        recorder.tensor,
        memory_bytes=settings.tensor_memory,
        tell=lambda text: say(f"rank {stream.rank}: {text}"),
        note=recorder.not_kept,
    )
