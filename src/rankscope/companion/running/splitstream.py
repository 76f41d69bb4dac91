"""One stream, read as it grows: its records by their step, and what its rank is inside of.

What holds for the whole job stays: definitions, setup, gaps. The records of a step are held until
they are dropped, so the memory is that of the steps held, however long the job.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankscope.companion.running.streamtail import StreamTail
from rankscope.errors import SpoolError
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import StreamId
from rankscope.spool.definitions import Decoded
from rankscope.spool.recordcolumns import (
    Records,
    call_sequences,
    records,
    records_at,
    step_codes,
)
from rankscope.spool.recordformat import LONGEST_RECORD, NO_SEQUENCE, RecordKind, StepEvent
from rankscope.spool.replicas import (
    SettledPrefix,
    free,
    read_settled,
    replica_path,
    settled_to,
    write_settled,
)
from rankscope.tree.assembly.rankstreams import definitions_in

Cells = NDArray[np.uint8]
_LEAST_BYTES: Final = 64 << 10
_PIECE_BYTES: Final = 8 << 20
_KEPT: Final = -1
_LATE: Final = -2
_OF_A_CALL: Final = (RecordKind.EXIT, RecordKind.VALUE, RecordKind.SAMPLES, RecordKind.ERROR)
"""Records that follow that of their call."""


class StepKey(NamedTuple):
    """A step as one rank counts it."""

    mode: int
    step: int


class SplitStream:
    """One stream: what was read of its replica."""

    def __init__(
        self, out: Path, stream: StreamId, decoded: Decoded, earlier: SplitStream | None = None
    ) -> None:
        """Read nothing yet; `decoded` as of `read_stream`; `earlier`: the same stream as far as it
        was read, to read it again from the begin on."""
        self.stream = stream
        self.tail: StreamTail = StreamTail(has_values=True) if earlier is None else earlier.tail
        self._tail_from: int = 0 if earlier is None else earlier.offset
        """What lies before was taken by the tail."""
        self._decoded = decoded
        self.ended: dict[int, int] = {}
        self.ended_ns: dict[StepKey, int] = {}
        self.trained_by_then: dict[StepKey, int] = {}
        """The last train step that had ended when a held step ended, -1 for none."""
        self.with_tensors: set[StepKey] = set()
        self.keeps_tensors = False
        self.begun: set[int] = set()
        self.is_over = False
        self.has_accelerator = False
        """Some value lies on one: such a value may be written after its step ended."""
        self.late_records = 0
        self.offset: int = 0
        self.settled = 0
        self.is_read_out = False
        self._path = replica_path(out, stream)
        self._kept: list[Cells] = []
        self._held: dict[StepKey, list[Cells]] = {}
        self.held: dict[StepKey, int] = {}
        self._numbers: dict[StepKey, int] = {}
        self._next_number = itertools.count()
        self._last_dropped: dict[int, int] = {}
        self._sequences = np.empty(0, np.uint64)
        """Of the calls that are held or kept, sorted."""
        self._owners = np.empty(0, np.int64)
        """Of each: the number of its step, or `_KEPT`, or `_LATE`."""
        self._clock_offset_ns = 0

    @property
    def kept_bytes(self) -> int:
        """Of records that hold for the whole job."""
        return sum(part.size for part in self._kept)

    @property
    def held_bytes(self) -> int:
        """Of the records of steps that are held."""
        return sum(self.held.values())

    def read(self, most_bytes: int) -> int:
        """Read at most about so many new bytes; return how many there were, or raise SpoolError."""
        self._begin_where_records_are()
        read_bytes, most_piece = 0, min(max(most_bytes, _LEAST_BYTES), _PIECE_BYTES)
        while read_bytes < most_bytes:
            before = self._tail_from - self.offset
            size = min(most_piece, before) if before > 0 else most_piece
            try:
                unread = self._path.stat().st_size - self.offset  # before: it grows meanwhile
                piece = records_at(self._path, self.offset, size)
            except OSError as error:
                raise SpoolError(f"{self._path}: cannot be read: {error.strerror}") from error
            if not piece.committed_bytes:
                if unread > LONGEST_RECORD:
                    raise SpoolError(f"{self._path}: damaged from byte {self.offset} on")
                break
            self._take(piece, is_told=before <= 0)
            self.offset += piece.committed_bytes
            read_bytes += piece.committed_bytes
        self.is_read_out = not read_bytes
        return read_bytes

    def drop(self, key: StepKey) -> None:
        """Let the records of a step go."""
        self._last_dropped[key.mode] = max(key.step, self._last_dropped.get(key.mode, -1))
        if self._held.pop(key, None) is None:
            return
        del self.held[key]
        self.ended_ns.pop(key, None)
        self.trained_by_then.pop(key, None)
        self.with_tensors.discard(key)
        gone = self._owners == self._numbers.pop(key)
        self._sequences, self._owners = self._sequences[~gone], self._owners[~gone]

    def close(self) -> None:
        """Let all records go: the rank has another life."""
        for key in [*self._held]:
            self.drop(key)
        self._kept = []
        self._sequences, self._owners = self._sequences[:0], self._owners[:0]

    def cells(self, keys: Collection[StepKey]) -> Cells:
        """Return whole records, [bytes]: what holds for the whole job, and those of some steps."""
        if len(self._kept) > 1:
            self._kept = [np.concatenate(self._kept)]
        parts = [
            *self._kept,
            *(p for key, parts_of in self._held.items() if key in keys for p in parts_of),
        ]
        return np.concatenate(parts).reshape(-1) if parts else np.empty(0, np.uint8)

    def settle(self) -> None:
        """Free what was read but is not held, on disk, as of `RunningJob.settle`."""
        prefix = SettledPrefix(self.offset, self.cells(self._held).tobytes(), self.late_records)
        if prefix.hidden_bytes:
            write_settled(self._path, prefix)
            free(self._path, self.offset)
            self.settled = self.offset

    def _begin_where_records_are(self) -> None:
        """Go on behind what was written into the tree and freed, with what is left of it."""
        if settled_to(self._path) <= self.offset:
            return
        prefix = read_settled(self._path)
        self.close()
        self._last_dropped.clear()
        self._take(records(prefix.kept), is_told=prefix.settled_to > self._tail_from)
        self.offset, self.late_records = prefix.settled_to, prefix.late_records
        self.settled = self.offset

    def _take(self, piece: Records, *, is_told: bool) -> None:
        owners = np.full(len(piece), _KEPT, np.int64)
        definitions = definitions_in(piece, self._decoded)[0]
        self._note_definitions(definitions.values())
        if is_told:
            self.tail.take(piece, definitions)
        positions, enters = piece.columns(RecordKind.ENTER)
        is_setup = enters["phase"] == int(Phase.SETUP)
        rows_of = self._steps_of(step_codes(enters["mode"], enters["step"]))
        owners[positions] = np.where(is_setup, _KEPT, rows_of)
        self._remember(enters["sequence"], owners[positions])
        positions, steps = piece.columns(RecordKind.STEP)
        owners[positions] = self._steps_of(step_codes(steps["mode"], steps["step"]))
        self._note_steps(steps)
        positions, values = piece.values()
        rows_of = self._owners_of(values["sequence"])
        named = np.unique(rows_of[(values["reference"] != 0) & (rows_of >= 0)]).tolist()
        self.with_tensors.update(key for key, n in self._numbers.items() if n in named)
        is_of_call = np.isin(piece.kind, _OF_A_CALL)
        owners[is_of_call] = self._owners_of(call_sequences(piece)[is_of_call])
        positions, errors = piece.columns(RecordKind.ERROR)
        has_no_call = errors["sequence"] == np.uint64(NO_SEQUENCE)
        owners[positions[has_no_call]] = _KEPT
        owners[piece.positions(RecordKind.FILLER)] = _LATE
        self.late_records += int((owners == _LATE).sum()) - len(piece.positions(RecordKind.FILLER))
        self.is_over |= len(piece.positions(RecordKind.END)) > 0
        keys = {number: key for key, number in self._numbers.items()}
        for owner in np.unique(owners[owners != _LATE]).tolist():
            cells = piece.cells_of(np.flatnonzero(owners == owner))
            if owner == _KEPT:
                self._kept.append(cells)
            else:
                self._held[keys[owner]].append(cells)
                self.held[keys[owner]] += cells.size

    def _note_definitions(self, definitions: Iterable[Mapping[str, Any]]) -> None:
        for definition in definitions:
            if definition["kind"] == "rank":
                wall, monotonic = definition.get("wall_ns"), definition.get("monotonic_ns")
                settings = definition.get("settings")
                self.keeps_tensors |= isinstance(settings, dict) and bool(settings.get("tensors"))
                if isinstance(wall, int) and isinstance(monotonic, int):
                    self._clock_offset_ns = wall - monotonic
            elif definition["kind"] == "meta":
                device = str(definition.get("device") or "cpu").partition(":")[0]
                self.has_accelerator |= device not in ("cpu", "meta")

    def _note_steps(self, steps: NDArray[Any]) -> None:
        for event in steps:
            mode, step = int(event["mode"]), int(event["step"])
            self.begun.add(mode)
            if event["event"] == int(StepEvent.END):
                self.ended[mode] = max(step, self.ended.get(mode, -1))
                if StepKey(mode, step) in self._held:
                    when = int(event["time_ns"]) + self._clock_offset_ns
                    self.ended_ns[StepKey(mode, step)] = when
                    trained = self.ended.get(int(Mode.TRAIN), -1)
                    self.trained_by_then[StepKey(mode, step)] = trained

    def _steps_of(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        distinct, inverse = np.unique(codes, return_inverse=True)
        numbers = np.full(len(distinct), _LATE, np.int64)
        for i, code in enumerate(distinct.tolist()):
            key = StepKey(code >> 32, code & 0xFFFF_FFFF)
            if key not in self._held:
                if key.step <= self._last_dropped.get(key.mode, -1):
                    continue
                self._held[key], self.held[key] = [], 0
                self._numbers[key] = next(self._next_number)
            numbers[i] = self._numbers[key]
        steps: NDArray[np.int64] = numbers[inverse.reshape(-1)]
        return steps

    def _remember(self, sequences: NDArray[Any], owners: NDArray[np.int64]) -> None:
        if len(sequences):
            sequences_all = np.concatenate([self._sequences, sequences.astype(np.uint64)])
            order = np.argsort(sequences_all, kind="stable")
            self._sequences = sequences_all[order]
            self._owners = np.concatenate([self._owners, owners])[order]

    def _owners_of(self, sequences: NDArray[Any]) -> NDArray[np.int64]:
        if not len(self._sequences):
            return np.full(len(sequences), _LATE, np.int64)
        at = np.minimum(np.searchsorted(self._sequences, sequences), len(self._sequences) - 1)
        is_known = self._sequences[at] == sequences
        owners: NDArray[np.int64] = np.where(is_known, self._owners[at], _LATE)
        return owners
