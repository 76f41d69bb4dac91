"""Writes what hooks saw into the spool: definitions once, then records that refer to them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import msgpack  # type: ignore[import-untyped]  # ships no types

from rankscope.agent.hooks.modules import ModuleInfo, ModuleTable, Root
from rankscope.capture.describe import Described
from rankscope.capture.measuring import ValueNumbers
from rankscope.layout.placement import Mesh
from rankscope.record.call import CallStatus, Mode
from rankscope.record.notes import Note
from rankscope.record.phases import Phase
from rankscope.record.ranks import Collective, ProcessGroup
from rankscope.record.value import ValueFlag
from rankscope.spool.chunks.writing import ChunkEntry
from rankscope.spool.recordcolumns import Records
from rankscope.spool.recordformat import (
    ENTER,
    ERROR,
    EXIT,
    NO_MICRO_BATCH,
    NO_SEQUENCE,
    SAMPLES,
    STEP,
    TENSOR,
    VALUE,
    VALUE_HEAD,
    RecordKind,
    StepEvent,
)
from rankscope.spool.ringwriter import RingWriter
from rankscope.spool.writer import SpoolWriter

_MAX_TEXTS = 10_000
"""Distinct reprs and error texts interned per rank; later ones are replaced by a fixed text."""
_ENTER, _EXIT, _VALUE = int(RecordKind.ENTER), int(RecordKind.EXIT), int(RecordKind.VALUE)
_SAMPLES, _TENSOR = int(RecordKind.SAMPLES), int(RecordKind.TENSOR)
# plain ints: an IntFlag's own `|` costs a microsecond
_STRUCTURE = int(ValueFlag.STRUCTURE_ONLY)
_FIRST, _SKETCH = ValueNumbers._fields.index("hash") + 1, ValueNumbers._fields.index("sketch")
"""Between them stand the statistics, in the order of a spool's record."""
_HAS_SAMPLES, _REUSED = int(ValueFlag.HAS_SAMPLES), int(ValueFlag.REUSED)
_SETUP = Phase.SETUP
_GROWING = ("meta", "collective")
"""Kinds of definitions whose number may grow with the steps: one per shape or message."""


class Recorder:
    """One rank's pen: numbers definitions and calls, packs records, hands them to the spool."""

    def __init__(self, writer: SpoolWriter) -> None:
        self.batch_dim = 0
        self.slots: dict[str, int] = {}
        self.modules: dict[int, str] | None = None
        """Number of a module's definition -> its path, where an observer puts a table here."""
        self._writer = writer
        self._ring = writer if isinstance(writer, RingWriter) else None
        self._lasting_writer = writer if self._ring is None else self._ring.lasting_stream
        self._keeps_all = self._ring is None
        """Every record written now is kept."""
        self._write = writer.write
        self._sequence = itertools.count()
        # from 1: 0 stands for "none" in every record, and for a miss in the tables below
        self._numbers = itertools.count(1)
        # re-entrant: `_intern` holds it while it calls `define`
        self._defining = threading.RLock()
        self._texts: dict[str, int] = {}
        self._meshes: dict[Mesh, int] = {}
        self._groups: dict[ProcessGroup, int] = {}
        self._collectives: dict[Collective, int] = {}
        self._metas: dict[Described, int] = {}
        self._kept_tables: tuple[dict[Described, int], dict[Collective, int]] = ({}, {})
        self._threads: dict[int, int] = {}

    def native_parts(self) -> tuple[SpoolWriter, dict[int, Any], Iterator[int]]:
        """Return the writer, what says that a write is under way, and the numbers of calls."""
        return self._writer, self._writer.holder, self._sequence

    def define(self, kind: str, **fields: object) -> int:
        """Commit a definition and return its number; a ring lets go of _GROWING kinds alone."""
        # what grows with the steps goes when its steps go: the lasting stream would be full in days
        writer = self._writer if kind in _GROWING and not self._keeps_all else self._lasting_writer
        with self._defining:
            number = next(self._numbers)
            packed = msgpack.packb(
                {"id": number, "kind": kind, **fields},
                unicode_errors="backslashreplace",  # file names and keys may hold lone surrogates
            )
            writer.define(packed)
        if kind == "module" and self.modules is not None:
            self.modules[number] = str(fields["path"])
        return number

    def observe(self, observer: Callable[[Records], None]) -> None:
        """Hand an observer the records of steps, in batches (`SpoolWriter.hand_on`)."""
        self._writer.observers.append(observer)

    def hand_on(self) -> bool:
        """Hand the observers what was recorded since they last looked, as `SpoolWriter.hand_on`."""
        return self._writer.hand_on()

    @contextlib.contextmanager
    def never_let_go(self) -> Iterator[None]:
        """Write what is needed however long the job runs: the setup of a root."""
        if self._keeps_all:
            yield
            return
        before = self._write, self._metas, self._collectives
        self._keeps_all = True
        self._write = self._lasting_writer.write
        self._metas, self._collectives = self._kept_tables
        try:
            yield
        finally:
            self._write, self._metas, self._collectives = before
            self._keeps_all = False

    def slot(self, name: str) -> int:
        """Return the number of a slot name, defining it on first sight."""
        return self.slots.get(name) or self._intern(self.slots, name, "slot", {"name": name})

    def text(self, note: Note | str) -> int:
        """Return the number of a text or note, defining it on first sight."""
        text, fact = str(note), note.fact if isinstance(note, Note) else None
        if text not in self._texts and len(self._texts) >= _MAX_TEXTS:
            text, fact = "(further texts are not kept)", None
        fields: dict[str, object] = {"text": text} if fact is None else {"text": text, "fact": fact}
        return self._texts.get(text) or self._intern(self._texts, text, "text", fields)

    def mesh(self, mesh: Mesh) -> int:
        """Return the number of a mesh, defining it on first sight."""
        number = self._meshes.get(mesh)
        return number or self._intern(self._meshes, mesh, "mesh", asdict(mesh) | {"device": ""})

    def group(self, group: ProcessGroup) -> int:
        """Return the number of a process group, defining it on first sight."""
        number = self._groups.get(group)
        return number or self._intern(self._groups, group, "group", asdict(group))

    def collective(self, collective: Collective) -> int:
        """Return the number of a kind of collective, defining it on first sight."""
        table = self._collectives
        number = table.get(collective)
        return number or self._intern(table, collective, "collective", collective.as_fields())

    def meta(self, described: Described) -> int:
        """Return the number of a value's description, defining it (and its mesh) on first sight."""
        number = self._metas.get(described)
        if number:
            return number
        meta = described.meta
        mesh = self.mesh(meta.layout.mesh) if meta.layout.mesh else 0
        fields: dict[str, object] = {
            "dtype": meta.dtype,
            "device": meta.device,
            "shape": meta.shape,
            "global_shape": meta.global_shape,
            "source": meta.layout.source.value,
            "mesh": mesh,
            "placements": [str(p) for p in meta.layout.placements],
            "ranges": meta.ranges,
            "note": meta.note,
            "requires_grad": described.requires_grad,
        }
        return self._intern(self._metas, described, "meta", fields)

    def _intern(self, table: dict, key: object, kind: str, fields: dict[str, object]) -> int:  # type: ignore[type-arg]  # one of the tables above
        with self._defining:
            # again under the lock: another thread may have defined it since the caller looked
            number = table.get(key)
            if number is None:
                number = table[key] = self.define(kind, **fields)
            return int(number)

    def enter(
        self,
        module: int,
        root: int,
        parent: int | None,
        mode: Mode,
        step: int,
        micro_batch: int | None,
        phase: Phase,
        ordinal: int,
        time_ns: int = 0,
        collective: int = 0,
        number: int = 0,
    ) -> int:
        """Record that a call began; return its sequence number. (By position: hot path.)

        Args:
            module: definition of what is called, or issues a collective.
            time_ns: when it began on the monotonic clock, 0 for now.
            collective: definition of a collective that is about to be issued; 0 for none.
            number: how many of its channel came before in this step.
        """
        sequence = next(self._sequence)
        # monotonic time below: a wall clock that is set back would begin a call before its parent;
        # the first record of the stream ties both clocks
        ident = threading.get_ident()
        self._write(
            _ENTER,
            ENTER.pack(
                sequence,
                NO_SEQUENCE if parent is None else parent,
                time_ns or time.monotonic_ns(),
                module,
                step,
                NO_MICRO_BATCH if micro_batch is None else micro_batch,
                ordinal,
                phase,
                mode,
                self._threads.get(ident) or self._thread(ident),
                root,
                collective,
                number,
            ),
        )
        return sequence

    def _thread(self, ident: int) -> int:
        return self._threads.setdefault(ident, min(len(self._threads) + 1, 0xFFFF))

    def exit(
        self,
        sequence: int,
        status: CallStatus = CallStatus.RETURNED,
        text: str = "",
        time_ns: int = 0,
        issued: int = 0,
    ) -> None:
        """Record that a call ended; `time_ns` as for `enter`, `issued` of `EXIT`."""
        number = self.text(text) if text else 0
        ended_ns = time_ns or time.monotonic_ns()
        self._write(_EXIT, EXIT.pack(sequence, ended_ns, number, status, issued))

    def value(
        self,
        sequence: int,
        slot: str,
        described: Described,
        reading: ValueNumbers | None,
        phase: Phase,
        ordinal: int,
        flags: int,
        reference: int = 0,
    ) -> None:
        """Record one tensor in one slot, or its description alone. (By position: hot path.)"""
        if not self._keeps_all and phase is _SETUP:  # an accelerator hands it out behind its call
            with self.never_let_go():
                self.value(sequence, slot, described, reading, phase, ordinal, flags, reference)
            return
        slot_id = self.slots.get(slot) or self.slot(slot)
        meta = self._metas.get(described) or self.meta(described)
        now = time.monotonic_ns()
        if reading is None:
            flags |= _STRUCTURE
            self._write(
                _VALUE,
                VALUE_HEAD.pack(
                    sequence, now, slot_id, meta, flags, phase, ordinal, 0, 0, reference
                ),
            )
            return
        samples = reading.samples
        if samples is not None:
            flags |= _HAS_SAMPLES
        if reading.reused:
            flags |= _REUSED
        self._write(
            _VALUE,
            VALUE.pack(
                sequence, now, slot_id, meta, flags, phase, ordinal, reading.count,
                reading.hash, reference, *reading[_FIRST:_SKETCH], *reading.sketch, *reading.added,
            ),
        )  # fmt: skip
        if samples is not None:
            rows, size = samples.shape
            batch_dim = self.batch_dim
            if batch_dim < 0:  # counted from the back
                batch_dim += len(described.meta.shape)
            head = SAMPLES.pack(sequence, slot_id, ordinal, phase, rows, size, batch_dim, 0, 0, 0)
            self._write(_SAMPLES, head + samples.tobytes())

    def tensor(self, reference: int, entry: ChunkEntry, described: Described) -> bool:
        """Record that the bytes of a tensor are whole in a chunk; False where there is no room."""
        meta = self._metas.get(described) or self.meta(described)
        return self._write(
            _TENSOR,
            TENSOR.pack(
                reference, entry.chunk, entry.index, entry.begin, entry.nbytes, entry.checksum, meta
            ),
        )

    def not_kept(self, reason: str, text: str) -> None:
        """Note why full tensors are not kept; a later note of a reason replaces an earlier one."""
        self.define("not_kept", reason=reason, text=text)

    def step(self, event: StepEvent, mode: Mode, step: int, note: Note | None = None) -> None:
        """Record that a traced step began or ended, and hand the observers what is of it."""
        number = 0 if note is None else self.text(note)
        self._write(RecordKind.STEP, STEP.pack(time.monotonic_ns(), step, mode, event, number))
        if (
            self._ring is not None
            and event is StepEvent.BEGIN
            and self._ring.begin_step(mode, step)
        ):
            self._metas, self._collectives = {}, {}  # the ring may let go of these definitions
        self._writer.hand_on()

    def error(self, sequence: int | None, note: Note | str) -> None:
        """Record that rankscope itself failed while it watched a call."""
        call = NO_SEQUENCE if sequence is None else sequence
        packed = ERROR.pack(call, time.monotonic_ns(), self.text(note), 0)
        self._write(RecordKind.ERROR, packed)


_MOST_DEFINITIONS = 1 << 16


class DefinitionWriter:
    """Writes definitions of modules and roots, on first sight."""

    def __init__(self, recorder: Recorder, table: ModuleTable) -> None:
        self._recorder = recorder
        self.table = table
        self._rootless: dict[tuple[object, ...], int] = {}

    def of(self, info: ModuleInfo) -> int:
        """Return the number of a module in the spool, defining it (and its root) on first sight."""
        if not info.definition:
            root = info.root
            if root is not None and not root.definition:
                self._define_root(root)
            fields: dict[str, object] = {
                "root": root.definition if root is not None else 0,
                "path": info.path,
                "raw_path": info.raw_path,
                "class": info.class_name,
                "wrappers": info.wrappers,
                "opaque": info.is_opaque,
            }
            numbers = root.definitions if root is not None else self._rootless
            kind = tuple(fields.values())  # a module that this one replaced may have defined it
            if len(numbers) >= _MOST_DEFINITIONS:
                # written twice a definition costs bytes; kept for ever the table costs the program
                # its memory
                numbers.clear()
            if kind not in numbers:
                numbers[kind] = self._recorder.define("module", **fields)
            info.definition = numbers[kind]
        return info.definition

    def _define_root(self, root: Root) -> None:
        root.definition = self._recorder.define(
            "root",
            **{"class": root.class_name},
            parameters=root.parameter_count,
            preferred=root.is_preferred,
        )

    def write_root(self, root: Root) -> None:
        """Define every module of a root, and which roots were found inside others."""
        for info, _ in self.table.of_root(root):
            self.of(info)
        self.write_contained()

    def write_contained(self) -> None:
        """Write down which roots were found inside others since the last time."""
        for inner, outer, path in self.table.contained:
            for root in (inner, outer):
                if not root.definition:  # it was named before any call of it
                    self._define_root(root)
            self._recorder.define(
                "inside", root=inner.definition, **{"in": outer.definition}, path=path
            )
        self.table.contained.clear()
