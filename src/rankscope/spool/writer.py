"""The write side, inside the training process: no thread, no socket, no lock to wait on for ever.

A write fills cells at the committed end of the mapped segment and then moves that end. Whatever
goes wrong in between (a kill, an exception of a signal handler) leaves the end where it was; a
write nested in a handler is dropped. `WriteLock` says who may write.

When the spool is full, records are dropped to the end of the step, and then whole steps until there
is room again; a GAP record says which and how many. Definitions are never dropped: those that find
no room wait, and are written before the next record that could name them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from _thread import get_ident
from binascii import crc32
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rankscope.errors import SpoolError, os_errors_as
from rankscope.record.ranks import MINIMUM_LIMIT_BYTES, EndReason
from rankscope.run.processes import StreamLock, forget_in_children
from rankscope.spool.recordcolumns import Records, records
from rankscope.spool.recordformat import (
    CELL_BYTES,
    DEFINITION_LENGTH,
    END,
    END_REASONS,
    GAP,
    MAX_RECORD_CELLS,
    PAYLOAD_BYTES,
    STAMP,
    STEP,
    TO_ITS_END,
    UNKNOWN,
    RecordKind,
    StepEvent,
    origin_of,
)
from rankscope.spool.segments import (
    CLOSED,
    FOUR,
    QUAD,
    SINGLE,
    Closed,
    Segment,
    WriteLock,
    first_segment,
    pack_cell,
    put,
    put_four,
    whole_record,
)

_MOST_WAITING_BYTES: Final = 64 << 20


class _Backlog:
    """Unwritten parts of one stream: definitions that wait for room, and a gap for each mode: first
    step, last step, records, bytes. The writer's lock guards all of it but `outside`."""

    def __init__(self) -> None:
        self.step, self.mode = 0, 0
        self.definitions: list[bytes] = []
        self._bytes = 0
        self._gaps: dict[int, list[int]] = {}
        self._has_begun = False
        """A GAP record says that dropping began, and none yet how many were dropped."""
        self.dropped = 0
        self.outside: list[int] = []
        """Bytes of records dropped without the lock: nested in a write, or after too long a
        wait."""

    @property
    def cells(self) -> int:
        return sum(-(-len(payload) // PAYLOAD_BYTES) + 1 for payload in self.definitions)

    def keep(self, definition: bytes) -> bool:
        """Keep a definition until there is room; False if too many are waiting."""
        # never dropped, and so bounded: a program that defines without end must not take its own
        # memory away
        if self._bytes + len(definition) > _MOST_WAITING_BYTES:
            return False
        self.definitions.append(definition)
        self._bytes += len(definition)
        return True

    def count(self, size: int) -> None:
        self.dropped += 1
        gap = self._gaps.setdefault(self.mode, [self.step, self.step, 0, 0])
        # one gap for all that is dropped until there is room again: a record for each would need
        # room too
        gap[0] = min(gap[0], self.step)
        gap[1] = max(gap[1], self.step)
        gap[2] += 1
        gap[3] += size

    def begin(self, write: Callable[[RecordKind, bytes], bool]) -> None:
        if not self._has_begun:
            packed = GAP.pack(time.monotonic_ns(), 0, 0, self.step, TO_ITS_END, self.mode)
            self._has_begun = write(RecordKind.GAP, packed)

    def settle(self, write: Callable[[RecordKind, bytes], bool]) -> bool:
        """Write the waiting records, definitions first; False if a definition found no room."""
        # written before it is taken off: what finds no room stays the first in the queue
        while self.definitions and write(RecordKind.DEFINITION, self.definitions[0]):
            self._bytes -= len(self.definitions.pop(0))
        while self.outside:
            self.count(self.outside.pop())
        if self._has_begun and not self._gaps:  # only definitions had to wait
            self._gaps[self.mode] = [self.step, self.step, 0, 0]
        for mode in list(self._gaps):
            first, last, records, lost = self._gaps[mode]
            packed = GAP.pack(time.monotonic_ns(), records, lost, first, last, mode)
            # kept: the gap is told with the next room, never forgotten
            if not write(RecordKind.GAP, packed):
                break
            del self._gaps[mode]
            self._has_begun = False
        return not self.definitions


DEFAULT_SEGMENT_BYTES: Final = 16 << 20
_SEGMENTS_PER_LIMIT: Final = 8
_LAST_WORDS_BYTES: Final = 8 * CELL_BYTES
"""End of each segment that is kept for GAP and END: the next segment may not be available."""


class SpoolWriter:
    """One rank's stream of records in `folder`; every method may be called from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        retire: Callable[[Path, int], None] | None = None,
    ) -> None:
        """Make the folder (0700), take its lock and preallocate the first segment.

        Raises SpoolError where `folder` holds records of an earlier process, the limit is too
        small, the stream is taken, or the disk has no room.

        Args:
            limit_bytes: unfreed bytes the stream may occupy before steps are dropped.
            segment_bytes: size of one file; at most an eighth of the limit.
            retire: called with a full segment's path and its offset in the stream, to move it away;
                without it the relay frees segments.
        """
        if limit_bytes < MINIMUM_LIMIT_BYTES:
            raise SpoolError(
                f"{folder}: a spool of {limit_bytes} bytes is too small; "
                f"--rs-spool-bytes must be at least {MINIMUM_LIMIT_BYTES}"
            )
        # eight at least: room comes back a segment at a time, and half of the last one is kept for
        # definitions
        size = min(segment_bytes, limit_bytes // _SEGMENTS_PER_LIMIT)
        self.folder = folder
        self.segment_bytes = size - size % CELL_BYTES
        self._segments_allowed = limit_bytes // self.segment_bytes
        self._retire = retire
        self._writing = WriteLock()
        self.holder = self._writing.holder
        self._is_half_done = False
        """An exception of the program (KeyboardInterrupt) interrupted a write."""
        self._backlog = _Backlog()
        self._origin = UNKNOWN
        self.is_dropping = False
        self._records: dict[int, int] = {}
        """Records in each segment left behind, by its index, so that none is counted twice."""
        self._segments: list[Segment] = []
        self._segment: Segment | Closed = CLOSED
        self.observers: list[Callable[[Records], None]] = []
        """Observers that `hand_on` hands the records, in batches."""
        self._full: list[Segment] = []
        self._handing = threading.Lock()
        """Never waited for: a thread that finds it taken has nothing to do."""
        self._lock = _claim(folder)
        try:
            first = first_segment(folder, self.segment_bytes)
            # GAP and END have to find room where everything else is refused
            first.data_end = first.end - _LAST_WORDS_BYTES
            self._segment, self._segments = first, [first]
        except SpoolError:
            self._lock.release()
            raise
        forget_in_children(self)

    @property
    def dropped_records(self) -> int:
        """Records dropped so far."""
        return self._backlog.dropped + len(self._backlog.outside)

    @property
    def is_closed(self) -> bool:
        """True after `close`, and in a forked child."""
        return self._segment is CLOSED

    @property
    def committed_bytes(self) -> int:
        """Length of the stream so far."""
        segment = self._segment
        if not isinstance(segment, Segment):
            return 0
        return segment.index * self.segment_bytes + segment.at

    def write(self, kind: int, payload: bytes) -> bool:
        """Commit one record; False where it was dropped (full, closed, or nested in another write).

        A STEP record also tells the writer where steps begin and end. A DEFINITION is never dropped
        while the writer is open: where there is no room it is kept and written first later. Raises
        SpoolError: the record is larger than a segment, or definitions pile up in a full spool.
        """
        token, holder = (get_ident(),), self.holder
        try:
            if holder.setdefault(0, token) is not token and not self._writing.wait(token):
                # `list.append` is one step to the interpreter: counted without the lock, which is
                # not held here
                self._backlog.outside.append(len(payload))
                return False
            if self._is_half_done:
                self._repair()
            segment = self._segment
            at = segment.at
            size = len(payload)
            single = SINGLE[kind]
            # by size and likelihood: a call is one cell, a digest four; `data_end` 0 sends all of
            # it the slow way
            if size <= PAYLOAD_BYTES and at < segment.data_end and single is not None:
                if size < PAYLOAD_BYTES:
                    payload = payload.ljust(PAYLOAD_BYTES, b"\0")
                pack_cell(segment.map, at, crc32(payload, single[1]), single[0], payload)
                segment.at = at + CELL_BYTES
                written = True
            elif size == QUAD.size and at + 4 * CELL_BYTES <= segment.data_end:
                put_four(segment, at, FOUR[kind], payload)
                written = True
            # 56 bytes of payload take a cell of 64: 8/7 of its size, and the last cell may be part
            # empty
            elif size > PAYLOAD_BYTES and at + size + size // 7 + CELL_BYTES < segment.data_end:
                put(segment, kind, payload)
                written = True
            else:
                written = self._write_slowly(kind, payload)
                if self._full:
                    del holder[0]
                    self.hand_on()
                    return written
            del holder[0]
            return written
        finally:
            if 0 in holder and holder[0] is token:  # an exception of the program's came in between
                self._is_half_done = True
                del holder[0]

    def define(self, packed: bytes) -> bool:
        """Commit one definition, already packed as msgpack."""
        return self.write(RecordKind.DEFINITION, DEFINITION_LENGTH.pack(len(packed)) + packed)

    def hand_on(self) -> bool:
        """Hand the observers what was committed since they were last handed something: a view of
        the mapped cells, which they must not keep. False where another thread is doing that, or an
        observer asks.

        Called when a segment is full, where a step begins or ends, and at the end, outside of every
        write, because an observer may write records.
        """
        if not self.observers:
            return True
        # whoever has it hands on these records too; to wait could deadlock with an observer that
        # records
        if not self._handing.acquire(blocking=False):
            return False
        try:
            while self._full:
                self._show(self._full[0])
                self._full.pop(0).unmap()
            if isinstance(self._segment, Segment):
                self._show(self._segment)
        finally:
            self._handing.release()
        return True

    def _show(self, segment: Segment) -> None:
        begin = segment.observed_bytes
        cells = segment.cells(begin)
        # at once: records at which an observer raised are not handed on again
        segment.observed_bytes = begin + cells.size
        if len(cells):
            batch = records(cells, is_verified=True)
            for observer in self.observers:
                observer(batch)

    def close(self, reason: EndReason = EndReason.EXIT) -> None:
        """Write END, give up lock and mapping; nothing twice, in a child, or inside a write."""
        self.hand_on()
        token, holder = (get_ident(),), self.holder
        try:
            if holder.setdefault(0, token) is not token and not self._writing.wait(token):
                return
            if self._is_half_done:
                self._repair()
            if isinstance(self._segment, Segment):
                self._end_stream(reason)
            del holder[0]
        finally:
            if 0 in holder and holder[0] is token:
                self._is_half_done = True
                del holder[0]

    def _end_stream(self, reason: EndReason) -> None:
        self._backlog.settle(self._put_where_room)
        self._count_records()
        committed = sum(self._records.values())
        code = END_REASONS.index(reason) if reason in END_REASONS else 0
        # counted by reading the segments, not while writing: a counter would be one more thing to
        # keep right on the hot path
        end = END.pack(time.monotonic_ns(), committed, self._backlog.dropped, 0, code)
        self._put_where_room(RecordKind.END, end)
        last, self._segment = self._segment, CLOSED
        if isinstance(last, Segment):
            last.unmap()
        self._lock.release()

    def _repair(self) -> None:
        """Go on behind a write that an exception interrupted; a whole record may be sent
        already."""
        self._is_half_done = False
        segment = self._segment
        # the relay may have read it as soon as its first cell was valid: cut off here, it would be
        # there twice
        cells = whole_record(segment)
        if cells:
            segment.at += cells * CELL_BYTES
        elif isinstance(segment, Segment):
            self._backlog.count(0)

    # ---- the slow way -----------------------------------------------------------------------

    def _write_slowly(self, kind: int, payload: bytes) -> bool:
        if not isinstance(self._segment, Segment):
            return False
        if kind == RecordKind.STEP:
            self._note_step(payload)
        cells = max(1, -(-len(payload) // PAYLOAD_BYTES))
        if cells * CELL_BYTES > self.segment_bytes // 2 or cells > MAX_RECORD_CELLS:
            # given back here: a token that an exception leaves behind would call this write half
            # done
            del self.holder[0]
            raise SpoolError(
                f"{self.folder}: a record of {len(payload)} bytes does not fit in a segment of "
                f"{self.segment_bytes} bytes; raise --rs-spool-bytes"
            )
        if kind == RecordKind.DEFINITION:
            return self._write_definition(payload)
        if not self.is_dropping and self._backlog.definitions:
            self._settle()
        if not self.is_dropping and self._put_where_room(kind, payload):
            return True
        self._start_dropping()
        self._backlog.count(len(payload))
        return False

    def _write_definition(self, payload: bytes) -> bool:
        if not self._backlog.definitions and self._put_where_room(RecordKind.DEFINITION, payload):
            return True
        if not self._backlog.keep(payload):
            del self.holder[0]
            raise SpoolError(
                f"{self.folder}: the spool is full and {len(self._backlog.definitions)} "
                f"definitions wait for room; raise --rs-spool-bytes, or see in the log of the "
                f"companion why nothing is sent"
            )
        self._start_dropping()
        return True

    def _note_step(self, payload: bytes) -> None:
        _, step, mode, event, _ = STEP.unpack(payload)
        if event != StepEvent.BEGIN:
            return
        self._backlog.step, self._backlog.mode = step, mode
        if self.is_dropping and self._has_room_again():
            self.is_dropping = False
        if not self.is_dropping:
            self._settle()

    def _has_room_again(self) -> bool:
        # half a segment, or dropping would begin again with the next records: gaps of whole steps
        half = self.segment_bytes // 2 // CELL_BYTES
        self._refresh_data_end()
        segment = self._segment
        if segment.data_end - segment.at >= (half + self._backlog.cells) * CELL_BYTES:
            return True
        # a smaller rest is never written to: the step would break off in the middle
        segment.data_end = 0
        return self._roll_over()

    def _settle(self) -> None:
        if not self._backlog.settle(self._put_where_room):
            self._start_dropping()

    def _put_where_room(self, kind: int, payload: bytes) -> bool:
        has_room = self._make_room(max(1, -(-len(payload) // PAYLOAD_BYTES)), kind)
        if has_room:
            put(self._segment, kind, payload)
        return has_room

    def _start_dropping(self) -> None:
        if not self.is_dropping:
            self._backlog.begin(self._put_where_room)
        self.is_dropping = True
        segment = self._segment
        if isinstance(segment, Segment):
            segment.data_end = 0

    # ---- segments ---------------------------------------------------------------------------

    def _make_room(self, cells: int, kind: int) -> bool:
        segment = self._segment
        if not self.is_dropping:
            self._refresh_data_end()
        needed = segment.at + cells * CELL_BYTES
        if kind in (RecordKind.GAP, RecordKind.END):
            end = segment.end
        elif kind == RecordKind.DEFINITION:
            end = segment.end - _LAST_WORDS_BYTES
        else:
            end = segment.data_end
        return needed <= end or self._roll_over()

    def _refresh_data_end(self) -> None:
        """Allow data up to the last words, or to the middle of the last segment allowed."""
        segment = self._segment
        # the relay frees a segment by removing its file: that is all it says to the rank
        self._segments = [s for s in self._segments if s is segment or s.exists()]
        is_last = len(self._segments) >= self._segments_allowed
        # the rest is for definitions: without them what was recorded before could not be read
        middle = segment.end // 2 // CELL_BYTES * CELL_BYTES
        segment.data_end = middle if is_last else segment.end - _LAST_WORDS_BYTES

    def _roll_over(self) -> bool:
        old = self._segment
        self._segments = [s for s in self._segments if s is old or s.exists()]
        if not isinstance(old, Segment) or len(self._segments) >= self._segments_allowed:
            return False
        try:
            # the new one first: where the disk has no room the old one stays as it is
            new = Segment(self.folder, old.index + 1, self.segment_bytes)
        except OSError:
            return False
        self._count_records()
        unused_cells = (old.end - old.at) // CELL_BYTES
        if unused_cells:
            # full to the last cell: offsets of the stream are those of its segments, one behind the
            # other
            put(old, RecordKind.FILLER, bytes(unused_cells * PAYLOAD_BYTES))
        self._origin = self._origin or origin_of(old.map)
        put(new, RecordKind.FILLER, STAMP.pack(self._origin, new.index))
        self._segments = [*(s for s in self._segments if s.index != new.index), new]
        self._segment = new
        if not self.is_dropping:
            self._refresh_data_end()
        if self.observers:
            self._full.append(old)
        else:
            old.unmap()
        self._hand_over()
        return True

    def _hand_over(self) -> None:
        """Retire every full segment still here: the last time may have been interrupted."""
        if self._retire is None:
            return
        for full in self._segments[:-1]:
            with contextlib.suppress(OSError):  # of a full disk: asked again with the next segment
                if full.exists():
                    self._retire(full.path, full.index * self.segment_bytes)

    def _count_records(self) -> None:
        segment = self._segment
        if isinstance(segment, Segment):
            # by index: a segment that is counted again (a roll-over that failed) counts once
            self._records[segment.index] = segment.count_records()

    def forget_in_child(self) -> None:
        """Write nothing: the stream is the parent's."""
        self._segment = CLOSED
        self._is_half_done = False
        self._full.clear()
        self.holder.clear()


def _claim(folder: Path) -> StreamLock:
    with os_errors_as(SpoolError, f"{folder}: cannot be made", "choose another with --rs-spool"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return StreamLock(folder)
