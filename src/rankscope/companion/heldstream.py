"""One stream that its rank holds back, and what is made of it once something happened.

The records of the steps that are asked for are copied, with every definition, into a stream of the
usual kind, which is shipped like any other. The copy grows by whole segments: each is filled beside
its place, ends with a note of how far the copy goes, and is renamed to its place. So a relay goes
on where a killed one was, and nobody sees half of a segment.

A copy says two things beside the records: what was asked for (definitions of kind "asked"), and
which steps it has and which its rank no longer had (the last definition of kind "copied").
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import msgpack  # type: ignore[import-untyped]  # ships no annotations
import numpy as np
from numpy.typing import NDArray

from rankscope.errors import SpoolError
from rankscope.record.call import Mode
from rankscope.record.notes import BLACK_BOX
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.agreements import Happening, Window, mark_copied
from rankscope.run.folders import (
    HELD_FOLDER,
    KEPT_FOLDER,
    segment_indexes,
    segment_path,
    stream_folder,
)
from rankscope.run.messages import log
from rankscope.run.processes import StreamLock, is_alive
from rankscope.spool.recordcolumns import Records, StreamReader, call_sequences, records
from rankscope.spool.recordformat import (
    CELL_BYTES,
    DEFINITION_LENGTH,
    END,
    END_REASONS,
    NO_SEQUENCE,
    PAYLOAD_BYTES,
    STEP,
    TO_ITS_END,
    RecordKind,
    StepEvent,
    first_record,
)
from rankscope.spool.segments import Closed, Segment, put

_COPIED_KIND: Final = "copied"
_LAST_NUMBER: Final = 0xFFFF_FFFF
"""Definitions that are made here are numbered from above, where no rank comes."""
_SEGMENT_BYTES: Final = 4 << 20
_NOTE_ROOM_BYTES: Final = 256 << 10
_READ_BYTES: Final = 1 << 20
_LOOK_BYTES: Final = 16 << 20
"""Bytes looked at in one go, so that the relay answers in between."""
_BEYOND_ALL_BYTES: Final = 1 << 62
_SEGMENT_PAUSE_S: Final = 1.0
_Runs = list[list[int]]
"""Runs of steps, each [mode, first, last], in order and apart."""


@dataclass(slots=True)
class _State:
    kept: int = 0
    ring: int = -1
    """Bytes read of the ring; -1 for none."""
    high: int = 0
    """Where the ring was read for the first time."""
    step: int = -1
    mode: int = int(Mode.EVAL)
    is_taken: bool = False
    """These records are copied: the step is asked for, and was not copied before this pass."""
    copied: _Runs = field(default_factory=list)
    gone: _Runs = field(default_factory=list)
    """Steps that the ring no longer had when it was read."""
    torn: _Runs = field(default_factory=list)
    """Steps that are copied in part, or whose records the rank dropped in part."""
    hole: int = -1
    """The first step that may have been let go before the next record that is read; -1 for none."""
    dropping: list[int] = field(default_factory=list)
    """Mode and step at which the rank began to drop records, while it did not say up to where."""
    calls: list[list[int]] = field(default_factory=list)
    """First and last call number of each run of records copied since `ring` last began."""
    windows: int = 0
    noted: int = 0
    """Of how many it was said what happened."""
    numbers: int = 0
    is_done: bool = False


class HeldStream:
    """The held stream of one rank, and its copy."""

    def __init__(self, run_folder: Path, stream: StreamId) -> None:
        """Go on with a copy that was begun; raise SpoolError where another process makes it."""
        self.stream = stream
        self.folder = stream_folder(run_folder / HELD_FOLDER, stream)
        self.definitions = StreamReader(self.folder / KEPT_FOLDER)
        self._ring = StreamReader(self.folder)
        self._target = stream_folder(run_folder, stream)
        self._state = _State()
        self._lock: StreamLock | None = None
        self._buffer = bytearray()
        self._index = 0
        self._asked: Sequence[Window] = ()
        self._marked = (0, 0)
        self._written_at = float("-inf")
        self._end: EndReason | None = None
        if segment_indexes(self._target):
            self._take_up()

    @property
    def sent(self) -> int:
        """Where the newest segment begins: what lies before need not be looked at."""
        indexes = segment_indexes(self.folder)
        return indexes[-1] * self._ring.segment_bytes if indexes else 0

    @property
    def is_alive(self) -> bool:
        """True while its rank lives."""
        return is_alive(self.folder)

    def has_sent(self, end: int) -> bool:
        """True: nothing is ever waited for."""
        return True

    @property
    def is_done(self) -> bool:
        """The copy is whole."""
        return self._state.is_done

    def ending(self) -> EndReason:
        """Say how a rank ended that does not live any more."""
        if self._end is None:
            begin = self.sent
            end = self._ring.committed(begin)
            self._end = self._ring.end_reason(end) or EndReason.LOST
            self._ring.close()
        return self._end

    def untold(self) -> list[Happening]:
        """Return what its rank saw happen and could not tell anybody."""
        return [
            Happening.read(entry["entry"])
            for chunk in self.definitions.chunks()
            for entry in records(chunk, is_verified=True).definitions()
            if entry["kind"] == "untold"
        ]

    def last_step(self) -> tuple[Mode, int]:
        """Return the step that began last; eval steps count where it has not trained."""
        last = Mode.TRAIN, 0
        for index in reversed(segment_indexes(self.folder)):
            with contextlib.suppress(SpoolError):
                begun = self._steps_begun(index * self._ring.segment_bytes)
                if Mode.TRAIN in begun:
                    return Mode.TRAIN, begun[Mode.TRAIN]
                if Mode.EVAL in begun and last[0] is Mode.TRAIN:
                    last = Mode.EVAL, begun[Mode.EVAL]
        return last

    def _steps_begun(self, offset: int) -> dict[Mode, int]:
        begun: dict[Mode, int] = {}
        end = offset + self._ring.segment_bytes
        while offset < end and (chunk := self._ring.read_from(offset, _READ_BYTES)):
            rows = records(chunk, is_verified=True).columns(RecordKind.STEP)[1]
            for row in rows[rows["event"] == int(StepEvent.BEGIN)]:
                begun[Mode(int(row["mode"]))] = int(row["step"])
            offset += len(chunk)
        return begun

    def copy(self, windows: Sequence[Window], *, is_final: bool) -> bool:
        """Copy what is there of the steps asked for; True where more is there already. `windows`
        are all of this life, in their order; `is_final`: the rank has ended, and nothing more will
        be asked for. Raise SpoolError or OSError where the disk takes or gives nothing."""
        if self._state.is_done or not (windows or is_final):
            return False
        if windows:
            if not self._state.kept:  # its first record says whose it is (`spool.recordformat`)
                self._copy_kept()
                if not (self._state.kept or is_final):
                    return False
            if len(windows) > self._state.windows:
                self._begin_anew(windows)
            if self._copy_some(windows):
                return True
        if is_final:
            self._finish(windows)
        elif self._buffer and time.monotonic() - self._written_at > _SEGMENT_PAUSE_S:
            self._write_segment()
        else:
            self._tell_rank()
        return False

    def _begin_anew(self, windows: Sequence[Window]) -> None:
        state = self._state
        is_behind = any(
            not _has(state.copied, window.mode, step)
            for window in windows[state.windows :]
            for step in range(max(0, window.first), min(state.step, window.last) + 1)
        )
        lowest = self._ring.lowest()
        if is_behind or state.ring < lowest:
            state.high = max(state.high, state.ring)
            state.ring, state.step, state.calls = lowest, -1, []
            state.mode = int(Mode.EVAL)
            state.hole, state.dropping = 0 if lowest else -1, []
        after = deepcopy(self._state)
        asked = b""
        for window in windows[state.windows :]:
            first, last = window.asked
            fields = {"event": window.trigger.word, "mode": window.mode.word, "text": window.text}
            asked += _defined(after, "asked", **fields, first=first, last=last)
        after.windows = len(windows)
        self._add(asked, after)

    def _copy_some(self, windows: Sequence[Window]) -> bool:
        state, looked_at = self._state, 0
        self._asked = windows
        while looked_at < _LOOK_BYTES:
            if self._is_past(windows):
                return False
            to_high = state.high - state.ring
            size = min(_READ_BYTES, to_high) if to_high > 0 else _READ_BYTES
            try:
                chunk = self._ring.read_from(state.ring, size)
            except SpoolError:
                lowest = self._ring.lowest()
                if lowest <= state.ring:
                    raise
                log(f"{self.stream.name}: bytes {state.ring} to {lowest} were let go too early")
                state.torn = _with(state.torn, state.mode, max(0, state.step), state.step)
                state.hole = max(state.hole, state.step + 1)
                state.ring, state.step = lowest, -1
                continue
            if not chunk:
                return False
            self._copy_kept()  # after the chunk was read: what it names is there
            chosen, after = self._chosen(records(chunk, is_verified=True), windows)
            after.ring = state.ring + len(chunk)
            self._add(chosen, after)
            state = self._state
            looked_at += len(chunk)
        return True

    def _is_past(self, windows: Sequence[Window]) -> bool:
        """True where no record that follows is asked for by now."""
        # eval steps are asked for by themselves before the first train step alone
        state = self._state
        last = max((w.last for w in windows if w.mode == state.mode), default=-1)
        is_last_mode = state.mode == Mode.TRAIN or all(w.mode is Mode.EVAL for w in windows)
        # an accelerator hands out values in the step that follows
        return bool(windows) and is_last_mode and state.step > last + 1

    def _copy_kept(self) -> None:
        while chunk := self.definitions.read_from(self._state.kept, _READ_BYTES):
            chunk_records = records(chunk, is_verified=True)
            is_end = np.isin(chunk_records.kind, (RecordKind.END, RecordKind.FILLER))
            after = deepcopy(self._state)
            after.kept += len(chunk)
            self._add(_cells(chunk_records, ~is_end), after)

    def _chosen(self, held_records: Records, windows: Sequence[Window]) -> tuple[bytes, _State]:
        after = deepcopy(self._state)
        is_known = after.ring < after.high  # it was read before: what was copied is not again
        positions, rows = held_records.columns(RecordKind.STEP)
        begins = rows["event"] == int(StepEvent.BEGIN)
        is_train = rows["mode"] == int(Mode.TRAIN)
        has_trained = np.logical_or.accumulate(is_train & begins) | (after.mode == Mode.TRAIN)
        begins &= is_train | ~has_trained  # eval steps between train steps come along
        bounds = [0, *positions[begins].tolist(), len(held_records)]
        steps = [after.step, *rows["step"][begins].tolist()]
        modes = [after.mode, *rows["mode"][begins].tolist()]
        if after.hole >= 0 and len(steps) > 1:
            self._note_gone(after, modes, steps)
        is_chosen = np.zeros(len(held_records), bool)
        sequences = call_sequences(held_records)
        for number, (begin, end, step) in enumerate(zip(bounds, bounds[1:], steps)):
            if number or step < 0:  # else it goes on with the step of the piece before
                after.step, after.mode = int(step), int(modes[number])
                is_asked = any(
                    (w.mode == after.mode and w.first <= step <= w.last)
                    or (w.mode is Mode.TRAIN and after.mode == Mode.EVAL and w.first < 0)
                    for w in windows
                )
                is_there = is_known and (step < 0 or _has(after.copied, after.mode, step))
                after.is_taken = is_asked and not is_there
            if not after.is_taken:
                continue
            is_chosen[begin:end] = True
            after.copied = _with(after.copied, after.mode, max(0, after.step), after.step)
            entered = sequences[begin:end][held_records.kind[begin:end] == RecordKind.ENTER]
            if len(entered):
                after.calls.append([int(entered.min()), int(entered.max())])
        of_copied = np.zeros(len(held_records), bool)
        for low, high in after.calls:
            of_copied |= (sequences >= low) & (sequences <= high)
        after.calls = _merged(after.calls)
        has_call = sequences != NO_SEQUENCE
        chosen = np.where(has_call, of_copied & (is_chosen | (not is_known)), is_chosen)
        chosen |= held_records.kind == RecordKind.DEFINITION
        chosen &= ~np.isin(held_records.kind, (RecordKind.END, RecordKind.FILLER, RecordKind.GAP))
        if not is_known:
            chosen |= _gaps(held_records, windows)
        _note_dropped(after, held_records)
        notes = self._notes(after, windows)
        return _cells(held_records, chosen) + notes, after

    def _note_gone(self, after: _State, modes: Sequence[int], steps: Sequence[int]) -> None:
        """Note in `after` which steps were let go before the first ones that begin here; `modes`
        and `steps` are of the step that goes on, and of those that begin."""
        if modes[1] == Mode.EVAL:  # the next train step says what is gone of those
            after.gone = _with(after.gone, Mode.EVAL, after.hole, steps[1] - 1)
        elif modes[0] == Mode.EVAL:
            after.gone = _with(after.gone, Mode.EVAL, after.hole, TO_ITS_END)
        if Mode.TRAIN in modes[1:]:
            first = steps[modes.index(Mode.TRAIN, 1)]
            least = after.hole if modes[0] == Mode.TRAIN else 0
            after.gone = _with(after.gone, Mode.TRAIN, least, first - 1)
            after.hole = -1

    def _notes(self, after: _State, windows: Sequence[Window]) -> bytes:
        """Return what happened, noted on the step at which it did, once that is copied."""
        notes = b""
        while after.noted < len(windows):
            window = windows[after.noted]
            if not _has(after.copied, window.mode, window.step):
                break
            after.noted += 1
            number = _LAST_NUMBER - after.numbers
            notes += _defined(after, "text", text=f"{BLACK_BOX}{window.text}")
            note = (time.monotonic_ns(), window.step, window.mode, int(StepEvent.NOTE), number)
            notes += _record(RecordKind.STEP, STEP.pack(*note))
        return notes

    def _add(self, cells: bytes, after: _State) -> None:
        if len(self._buffer) + len(cells) + _NOTE_ROOM_BYTES > _SEGMENT_BYTES:
            self._write_segment()
        self._buffer += cells
        self._state = after

    def _finish(self, windows: Sequence[Window]) -> None:
        """Write the last segment: with the END record, unless the rank left without one."""
        self._take_lock()
        reason = self.ending()
        if windows:
            self._copy_kept()
        else:  # nothing happened in this life
            self._buffer[:] = first_record(self.definitions.read_from(0, _READ_BYTES))
        earlier, state = self._state, deepcopy(self._state)
        if state.hole >= 0 and windows:
            for mode in {int(window.mode) for window in windows}:
                least = state.hole if mode == state.mode else 0
                state.gone = _with(state.gone, mode, least, TO_ITS_END)
        if state.dropping:
            mode, step = state.dropping
            state.torn = _with(state.torn, mode, step, TO_ITS_END)
        state.is_done = True
        self._state = state
        end = b""
        if reason is not EndReason.LOST:
            code = END_REASONS.index(reason)
            end = _record(RecordKind.END, END.pack(time.monotonic_ns(), 0, 0, 0, code))
        try:
            self._write_segment(end)
        except (OSError, SpoolError):  # it is tried again
            self._state = earlier
            raise
        self.close()

    def _write_segment(self, end: bytes = b"") -> None:
        self._take_lock()
        draft = self._target / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        segment = Segment(draft, self._index, _SEGMENT_BYTES)
        try:
            segment.map[: len(self._buffer)] = bytes(self._buffer)
            segment.at = len(self._buffer)
            number = _LAST_NUMBER - self._state.numbers - 1
            fields = {"id": number, "kind": _COPIED_KIND, **asdict(self._state)}
            packed = msgpack.packb(fields)
            put(segment, RecordKind.DEFINITION, DEFINITION_LENGTH.pack(len(packed)) + packed)
            if end:
                segment.map[segment.at : segment.at + len(end)] = end
            elif not self._state.is_done:
                free_cells = (segment.end - segment.at) // CELL_BYTES
                put(segment, RecordKind.FILLER, bytes(free_cells * PAYLOAD_BYTES))
        finally:
            segment.unmap()
        # the only step that a reader can see: before it the copy ends one segment earlier, note and
        # all
        os.rename(segment.path, segment_path(self._target, self._index))
        draft.rmdir()
        self._index += 1
        self._buffer.clear()
        self._written_at = time.monotonic()
        self._tell_rank()

    def _tell_rank(self) -> None:
        """Mark beside the ring how far the copy goes, so that its rank may let go of that."""
        is_past, ring = self._is_past(self._asked), self._state.ring
        mark = self._state.windows, _BEYOND_ALL_BYTES if is_past else max(0, ring)
        if mark != self._marked and not self._buffer:
            with contextlib.suppress(OSError):  # a full disk: the rank holds more than it needs to
                mark_copied(self.folder, *mark)
                self._marked = mark

    def _take_lock(self) -> None:
        """Hold the lock of the copy: it tells readers whether more will come."""
        if self._lock is None:
            self._target.mkdir(mode=0o700, exist_ok=True)
            self._lock = StreamLock(self._target)

    def _take_up(self) -> None:
        self._take_lock()
        self._index = segment_indexes(self._target)[-1] + 1
        state: _State | None = None
        with StreamReader(self._target) as reader:
            for chunk in reader.chunks((self._index - 1) * reader.segment_bytes):
                for entry in records(chunk, is_verified=True).definitions():
                    if entry["kind"] == _COPIED_KIND:
                        del entry["id"], entry["kind"]
                        state = _State(**entry)
        if state is None:
            raise SpoolError(f"{self._target}: its last segment does not say how far it goes")
        self._state = state
        if self._state.is_done:
            self.close()

    def close(self) -> None:
        """Give up the copy as it is, and close what is open."""
        self.definitions.close()
        self._ring.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _cells(held_records: Records, chosen: NDArray[np.bool_]) -> bytes:
    return held_records.cells_of(np.flatnonzero(chosen)).tobytes()


def _merged(runs: list[list[int]]) -> list[list[int]]:
    """Join runs that follow on each other: [first, last], or [mode, first, last]."""
    joined: list[list[int]] = []
    for *of, low, high in sorted(runs):
        if joined and joined[-1][:-2] == of and low <= joined[-1][-1] + 1:
            joined[-1][-1] = max(joined[-1][-1], high)
        else:
            joined.append([*of, low, high])
    return joined


def _with(runs: _Runs, mode: int, first: int, last: int) -> _Runs:
    """Return the runs with these steps too; none where `last` comes before `first`."""
    return _merged([*runs, [int(mode), first, last]]) if first <= last else runs


def _has(runs: _Runs, mode: int, step: int) -> bool:
    return any(run[0] == int(mode) and run[1] <= step <= run[2] for run in runs)


def _note_dropped(state: _State, held_records: Records) -> None:
    for row in held_records.columns(RecordKind.GAP)[1]:
        mode, first, last = int(row["mode"]), int(row["first_step"]), int(row["last_step"])
        if last == TO_ITS_END and not row["records"]:
            state.dropping = [mode, first]
            continue
        state.dropping = []
        if row["records"]:
            state.torn = _with(state.torn, mode, first, last)


def _gaps(held_records: Records, windows: Sequence[Window]) -> NDArray[np.bool_]:
    chosen = np.zeros(len(held_records), bool)
    positions, rows = held_records.columns(RecordKind.GAP)
    for window in windows:
        is_of = (rows["mode"] == int(window.mode)) & (rows["first_step"] <= window.last)
        chosen[positions[is_of & (rows["last_step"] >= max(0, window.first))]] = True
    return chosen


def _defined(state: _State, kind: str, **fields: object) -> bytes:
    number = _LAST_NUMBER - state.numbers
    state.numbers += 1
    packed = msgpack.packb(
        {"id": number, "kind": kind, **fields}, unicode_errors="backslashreplace"
    )
    return _record(RecordKind.DEFINITION, DEFINITION_LENGTH.pack(len(packed)) + packed)


def _record(kind: RecordKind, payload: bytes) -> bytes:
    outside = Closed()  # of any segment
    outside.map = bytearray((-(-len(payload) // PAYLOAD_BYTES) or 1) * CELL_BYTES)
    put(outside, kind, payload)
    return bytes(outside.map)
