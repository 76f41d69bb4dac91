"""One stream, read as it grows: its records by their step, and what its rank is inside of.

What holds for the whole job stays: definitions, setup, gaps. The records of a step are held until
they are dropped, so the memory is that of the steps held, however long the job.

What one rank is inside of, and what its last steps were, kept while its records come in.

The state is small however long the stream is: the calls that were not left, the step that runs, the
last steps that ended. It may begin anywhere in a stream; what came before is then not known.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import SpoolError, os_errors_as
from rankscope.record.call import Mode
from rankscope.record.notes import Note, NoteKind
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason, StreamId
from rankscope.record.value import ValueFlag
from rankscope.run.jobstatus import EndedStep
from rankscope.spool.recordcolumns import (
    Records,
    Sequences,
    StreamReader,
    ValueRows,
    call_sequences,
    read_ending,
    records,
    records_at,
    step_codes,
)
from rankscope.spool.recordformat import LONGEST_RECORD, NO_SEQUENCE, Decoded, RecordKind, StepEvent
from rankscope.spool.replicas import (
    SettledPrefix,
    free,
    read_settled,
    replica_path,
    settled_to,
    write_settled,
)
from rankscope.tree.assembly.rankstreams import definitions_in

Rows = NDArray[Any]
_OPTIMIZER: Final = (int(Phase.GRADS), int(Phase.PARAMS))
_KEPT_KINDS: Final = frozenset({"rank", "root", "inside", "module", "collective", "slot"})
_KEPT_STEPS: Final = 32
_TRAIN: Final = int(Mode.TRAIN)
_NO_NUMBER: Final = int(
    ValueFlag.ABSENT | ValueFlag.PENDING | ValueFlag.STRUCTURE_ONLY | ValueFlag.PYTHON
)
_CALL_DTYPE: Final = np.dtype(
    [("sequence", "<u8"), ("module", "<u4"), ("step", "<u4"), ("mode", "u1"), ("is_top", "?")]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredCall:
    """A call that a rank entered."""

    sequence: int
    time_ns: int
    """Monotonic time of its host."""
    module: int
    phase: int
    mode: int
    step: int
    collective: int = 0
    number: int = 0
    """Which of its group's it was in the step."""

    @property
    def step_key(self) -> tuple[int, int]:
        """The step it is in."""
        return self.mode, self.step


class StreamTail:
    """What the records say that were taken so far."""

    def __init__(self, *, is_whole: bool = True, has_values: bool = False) -> None:
        """Know nothing yet; `is_whole`: it begins with the stream; `has_values`: read losses."""
        self._is_whole = is_whole
        self._has_values = has_values
        self.definitions: dict[int, dict[str, Any]] = {}
        self.open: dict[int, EnteredCall] = {}
        """{sequence: call} of those that were not left, in the order in which they began."""
        self.latest: EnteredCall | None = None
        """The call that began last; in a backward pass the call whose gradient came last."""
        self.issued: dict[int, EnteredCall] = {}
        """{definition: the collective of that kind that was issued last}."""
        self.written_ns = 0
        self.records = self.lost_records = 0
        self.steps_ended = 0
        self.end: EndReason | None = None
        self.running: tuple[int, int] | None = None
        self.ended: deque[EndedStep] = deque(maxlen=_KEPT_STEPS)
        self.missed: deque[tuple[Mode, int]] = deque(maxlen=_KEPT_STEPS)
        self._missed_notes: set[int] = set()
        self._began_ns = 0
        self._train_mark: StepEvent | None = None
        self._train_begun = self._train_call = self._optimizer_step = self._train_ended = -1
        self._calls: Rows = np.empty(0, _CALL_DTYPE)
        self._waited_ns: dict[int, int] = {}
        self._losses: dict[int, float] = {}
        self._squares: dict[int, float] = {}

    @property
    def identity(self) -> dict[str, Any]:
        """The definition of kind "rank"; {} where it has not come."""
        return next((d for d in self.definitions.values() if d["kind"] == "rank"), {})

    @property
    def step_before_optimizer(self) -> int | None:
        """The train step that runs and whose optimizer has not stepped, None where none does."""
        step = self._train_begun if self._train_mark is StepEvent.BEGIN else -1
        if self._train_mark is None and not self._is_whole:
            step = self._train_call  # its begin was freed: a rank writes in no other time
        return None if step < 0 or step == self._optimizer_step else step

    @property
    def innermost(self) -> EnteredCall | None:
        """The innermost call that was not left; asynchronous collectives do not count."""
        calls = reversed(self.open.values())
        return next((c for c in calls if not c.collective or self.is_synchronous(c)), None)

    def is_synchronous(self, call: EnteredCall) -> bool:
        """True for a collective that the program waits for in the call that issued it."""
        definition = self.definitions.get(call.collective)
        return definition is not None and not definition.get("async", False)

    def take(self, piece: Records, definitions: Mapping[int, dict[str, Any]]) -> None:
        """Take the next records of the stream, and the definitions among them."""
        for number, definition in definitions.items():
            if definition["kind"] in _KEPT_KINDS:
                self.definitions[number] = definition
            elif Note.read("", definition.get("fact")).kind is NoteKind.MISSED_STEP:
                self._missed_notes.add(number)
        self.records += len(piece) - len(piece.positions(RecordKind.FILLER))
        _, enters = piece.columns(RecordKind.ENTER)
        _, exits = piece.columns(RecordKind.EXIT)
        _, steps = piece.columns(RecordKind.STEP)
        _, values = piece.values()
        for rows in (enters, exits, steps, values):
            if len(rows):
                self.written_ns = max(self.written_ns, int(rows["time_ns"].max()))
        self._note_waits(enters, exits)
        self._note_calls(enters, exits)
        if self._has_values:
            self._note_values(enters, values)
        self._note_steps(steps)
        _, gaps = piece.columns(RecordKind.GAP)
        self.lost_records += int(gaps["records"].sum())
        ended = read_ending(piece)
        if ended.reason is not None:
            self.end = ended.reason
            self.lost_records = max(self.lost_records, ended.dropped_records)

    def _note_calls(self, enters: Rows, exits: Rows) -> None:
        if self.open and len(exits):
            for sequence in np.intersect1d([*self.open], exits["sequence"]).tolist():
                del self.open[sequence]
        is_open = ~np.isin(enters["sequence"], exits["sequence"])
        for row in enters[is_open]:
            call = _entered(row)
            self.open[call.sequence] = call
        if not len(enters):
            return
        self.latest = _entered(enters[-1])
        kinds, last = np.unique(enters["collective"][::-1], return_index=True)
        for kind, place in zip(kinds.tolist(), last.tolist()):
            if kind:
                self.issued[kind] = _entered(enters[len(enters) - 1 - place])
        of_train = enters[enters["mode"] == _TRAIN]
        if len(of_train):
            self._train_call = int(of_train["step"][-1])
            stepped = of_train[np.isin(of_train["phase"], _OPTIMIZER)]
            if len(stepped):
                self._optimizer_step = int(stepped["step"][-1])

    def _note_waits(self, enters: Rows, exits: Rows) -> None:
        calls = [c for c in self.open.values() if c.mode == _TRAIN and self.is_synchronous(c)]
        rows = enters[(enters["phase"] == int(Phase.COLLECTIVE)) & (enters["mode"] == _TRAIN)]
        calls += [call for call in map(_entered, rows) if self.is_synchronous(call)]
        sequences = np.array([call.sequence for call in calls], np.uint64)
        for call, place in zip(calls, Sequences(exits["sequence"]).find(sequences).tolist()):
            if place >= 0:
                ns = int(exits["time_ns"][place]) - call.time_ns
                self._waited_ns[call.step] = self._waited_ns.get(call.step, 0) + ns

    def _note_values(self, enters: Rows, values: ValueRows) -> None:
        new = np.empty(len(enters), _CALL_DTYPE)
        for name in ("sequence", "module", "step", "mode"):
            new[name] = enters[name]
        new["is_top"] = (enters["parent"] == NO_SEQUENCE) & (enters["phase"] == int(Phase.FORWARD))
        calls = np.concatenate([self._calls, new])
        calls = calls[np.argsort(calls["sequence"], kind="stable")]
        self._calls = calls[calls["step"] >= self._train_call] if self._train_call > 0 else calls
        if not len(values) or not len(calls):
            return
        phase, slot = values["phase"], values["slot"]
        at = Sequences(calls["sequence"]).find(values["sequence"])
        of, is_known = calls[at], at >= 0
        self._note_backward(values, of, is_known & (phase == int(Phase.BACKWARD)))
        is_known &= (of["mode"] == _TRAIN) & ((values["flags"] & _NO_NUMBER) == 0)
        is_known &= values.has_digest
        is_grad = is_known & (phase == int(Phase.GRADS)) & self._is_slot(slot, "grad:")
        is_loss = is_known & (phase == int(Phase.FORWARD)) & of["is_top"]
        is_loss &= (values["count"] == 1) & self._is_slot(slot, "output")
        if not (is_grad.any() or is_loss.any()):
            return
        wrong = values["nan"] + values["posinf"] + values["neginf"]
        means, norms = values["mean"], values["l2"]
        for place in np.flatnonzero(is_loss).tolist():
            number = float(means[place]) if not wrong[place] else math.nan
            self._losses[int(of["step"][place])] = number
        for step in np.unique(of["step"][is_grad]).tolist():
            of_step = is_grad & (of["step"] == step)
            sum_ = float(np.square(norms[of_step]).sum()) if not wrong[of_step].any() else math.nan
            self._squares[step] = self._squares.get(step, 0.0) + sum_

    def _note_backward(self, values: ValueRows, of: Rows, is_backward: NDArray[np.bool_]) -> None:
        """Take the last gradient for the latest call where it came behind that."""
        places = np.flatnonzero(is_backward)
        if not len(places):
            return
        call, time_ns = of[places[-1]], int(values["time_ns"][places[-1]])
        if self.latest is None or time_ns > self.latest.time_ns:
            fields = {name: int(call[name]) for name in ("sequence", "module", "mode", "step")}
            self.latest = EnteredCall(time_ns=time_ns, phase=int(Phase.BACKWARD), **fields)

    def _is_slot(self, slots: Rows, begin: str) -> NDArray[np.bool_]:
        defined = {number: self.definitions.get(number, {}) for number in np.unique(slots).tolist()}
        names = {number: str(slot.get("name", "")) for number, slot in defined.items()}
        return np.isin(slots, [number for number, name in names.items() if name.startswith(begin)])

    def _note_steps(self, steps: Rows) -> None:
        for row in steps:
            if int(row["text"]) in self._missed_notes and row["event"] == int(StepEvent.NOTE):
                self.missed.append((Mode(int(row["mode"])), int(row["step"])))
            if row["event"] not in (int(StepEvent.BEGIN), int(StepEvent.END)):
                continue
            mode, step, event = int(row["mode"]), int(row["step"]), StepEvent(int(row["event"]))
            if mode == _TRAIN:
                self._train_mark, self._train_begun = event, step
            if event is StepEvent.BEGIN:
                self.running, self._began_ns = (mode, step), int(row["time_ns"])
                continue
            if mode == _TRAIN:
                self._end_train_step(step, int(row["time_ns"]))
            if self.running == (mode, step):
                self.running = None
            self.open = {s: call for s, call in self.open.items() if call.step_key != (mode, step)}

    def _end_train_step(self, step: int, now_ns: int) -> None:
        is_new = step > self._train_ended
        self.steps_ended += is_new
        self._train_ended = max(step, self._train_ended)
        if is_new and self.running == (_TRAIN, step):
            squares = self._squares.get(step)
            self.ended.append(
                EndedStep(
                    step=step,
                    seconds=(now_ns - self._began_ns) / 1e9,
                    waited_s=self._waited_ns.get(step, 0) / 1e9,
                    loss=self._losses.get(step),
                    grad_norm=None if squares is None else math.sqrt(squares),
                )
            )
        sums: tuple[dict[int, Any], ...] = (self._waited_ns, self._losses, self._squares)
        for step_sums in sums:
            for number in [n for n in step_sums if n <= step]:
                del step_sums[number]


def _entered(row: Any) -> EnteredCall:
    names = ["sequence", "time_ns", "module", "phase", "mode", "step"]
    if row["phase"] == int(Phase.COLLECTIVE):
        names += ["collective", "number"]
    return EnteredCall(**{name: int(row[name]) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankActivity:
    """What a rank was inside of when it wrote its last record."""

    written_ns: int
    """Monotonic time of that record on its host; 0 for a record without a time."""
    inside: str
    """What it is inside of: `a collective of train step 2`; "" for nothing that is known."""


def activity_of(
    reader: StreamReader, definitions: StreamReader | None = None, *, counts_steps: bool
) -> RankActivity:
    """Read what a rank is inside of, or raise SpoolError; `definitions` is a stream with more of
    them; `counts_steps`: a train step before its optimizer counts."""
    tail = StreamTail(is_whole=reader.lowest() == 0)
    for source in filter(None, (definitions, reader)):
        for chunk in source.chunks():
            piece = records(chunk, is_verified=True)
            tail.take(piece, definitions_in(piece, {})[0])
    inside, call = "", tail.innermost
    if call is not None:
        noun = "a collective" if call.collective else "a call"
        inside = f"{noun} of {Mode(call.mode).word} step {call.step}"
    elif counts_steps and tail.step_before_optimizer is not None:
        inside = f"train step {tail.step_before_optimizer}, before its optimizer"
    return RankActivity(written_ns=tail.written_ns, inside=inside)


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
            with os_errors_as(SpoolError, f"{self._path}: cannot be read"):
                unread = self._path.stat().st_size - self.offset  # before: it grows meanwhile
                piece = records_at(self._path, self.offset, size)
            if not piece.committed_bytes:
                # nothing whole in more than the longest record: damage, not a record on its way
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
            # the prefix on disk first, then the hole: a kill in between loses nothing
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
        self._take(records(prefix.payload), is_told=prefix.settled_to > self._tail_from)
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
        # calls decide: a value or an exit knows its call alone, and goes where that went
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
                # a step that is in the tree stays as it is: a late record is counted, not added
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
