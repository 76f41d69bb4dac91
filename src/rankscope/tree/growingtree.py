"""Steps in files: of a finished trace, and of a tree that grows while its job runs.

    <trace>/steps/000007.safetensors    some steps: a part
    <trace>/steps/index.jsonl           a line for each part, appended once its file is whole

At the end the rest is written behind them, and trace.json takes the place of the index.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rankscope.errors import TraceError, TraceVersionError
from rankscope.record.call import Mode
from rankscope.record.ranks import MAX_RANKS
from rankscope.run.files import new_file, own_subfolder, sync_by_name
from rankscope.run.folders import (
    INDEX_FORMAT,
    INDEX_NAME,
    REPLICA_FOLDER,
    STEPS_FOLDER,
    TRACE_NAME,
    Progress,
)
from rankscope.tree.older import OlderTrace, is_older
from rankscope.tree.step import StepColumns, StepHead, StepName
from rankscope.tree.stepfile import StepFiles, known_entries, write_steps
from rankscope.tree.tracejson import check_json, load_json
from rankscope.tree.views import Trace, TraceSource

if TYPE_CHECKING:
    from rankscope.record.ranks import StreamId
    from rankscope.spool.chunks.tensorfiles import TensorRecords
    from rankscope.tree.document import Document

_Place: TypeAlias = "Mapping[str, Any] | tuple[Document | OlderTrace, int]"
"""The entry of a step, or who holds it and which of its steps it is."""


class WrittenSteps:
    """Steps that lie in step files, and others in memory behind them."""

    def __init__(
        self,
        folder: Path,
        head: Mapping[str, Any],
        entries: Sequence[Mapping[str, Any]],
        began_ns: int,
        holders: Sequence[Document | OlderTrace] = (),
    ) -> None:
        """Open no file yet. `head`: {"run", "completeness"}; `began_ns`: wall clock of the first
        call of the run; `holders` hold steps that are not written. KeyError, TypeError, ValueError:
        a damaged entry."""
        self.head, self._folder, self._began_ns, self._others = head, folder, began_ns, holders
        self._files = StepFiles(folder, int(head["run"]["world_size"]))
        written, self.passed_over = known_entries(entries)
        listed: list[tuple[StepHead, _Place]] = [*written]
        listed += [(step, (holder, i)) for holder in holders for i, step in enumerate(holder.heads)]
        if holders:  # what is finished is in order
            listed.sort(key=lambda row: (not row[0].is_setup, row[0].name))
        self.heads: Sequence[StepHead] = [step for step, _ in listed]
        self._places = [place for _, place in listed]

    def file(self, group: int) -> Path:
        """Return what a step is read from."""
        place = self._places[group]
        return self._folder if isinstance(place, tuple) else self._files.path(place)

    def step(self, group: int) -> StepColumns:
        """Return a step; TraceError: its file is damaged, or not there."""
        place = self._places[group]
        if isinstance(place, tuple):
            return place[0].step(place[1])
        return self._files.step(place, self.heads[group], self._began_ns)

    @property
    def tensors(self) -> Mapping[StreamId, TensorRecords]:
        """Records of the chunks that are still written."""
        return {key: records for holder in self._others for key, records in holder.tensors.items()}

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with each file that steps lie in."""
        yield from self._files.faults([p for p in self._places if not isinstance(p, tuple)])
        for holder in self._others:
            yield from holder.faults()


def trace_of(document: Document, folder: Path, **more: Any) -> Trace:
    """Return what a document holds as if it were opened from a folder; `more` as of `Trace`."""
    source = WrittenSteps(folder, document.head, (), document.began_ns, [document])
    return Trace(source, folder, is_written=False, **more)


def trace_files(folder: Path) -> TraceSource:
    """Open a finished trace folder of any format; errors as of `load_json`."""
    head = load_json(folder / TRACE_NAME, "trace")
    if is_older(head):
        return OlderTrace.of(folder, head)
    return WrittenSteps(folder, head, [*head["setup"], *head["steps"]], int(head["began_ns"]))


_PART_BYTES: Final = 4 << 20
"""Of one file, where that is more than one step."""
_BYTES: Final = {"values.rank": 220, "calls.rank": 60, "samples.sketch": 32}
"""Of a row in a file, by a column of its table."""


_OLDER_FORMAT: Final = "rankscope.index/1"
_NO_HEAD: Final[Mapping[str, Any]] = {"run": {"world_size": MAX_RANKS, "meshes": []}}


def _is_older(line: Mapping[str, Any]) -> bool:
    return bool(line["format"] == _OLDER_FORMAT)


def step_name(entry: Mapping[str, Any]) -> StepName:
    """Return the name of a step from its entry in trace.json; KeyError: it has none, as setup."""
    mode = Mode[str(entry["mode"]).upper()]
    return StepName(int(entry["incarnation"]), int(mode), int(entry["step"]))


class GrowingTree:
    """The parts of one trace folder."""

    def __init__(self, out: Path) -> None:
        """Read the index. TraceError: unreadable or damaged; TraceVersionError: of a newer
        format."""
        self.out = out
        self.written: set[StepName] = set()
        self.began_ns: int | None = None
        """Wall clock of the first call of the run, None before a part is written."""
        self._index = out / STEPS_FOLDER / INDEX_NAME
        self.next_file = 0
        self._unsynced: list[Path] = []
        self._older_lines: list[dict[str, Any]] = []
        self._lock = -1
        raw = self._read()
        self._size = raw.rfind(b"\n") + 1
        for line in self._understood(raw):
            self._note_written(line)
        self._begun = out
        """Folder of the steps that an older rankscope wrote."""

    @classmethod
    def to_write(cls, out: Path) -> GrowingTree | None:
        """Return the tree of a folder for the one process that may write it, None while another
        does. OSError: it cannot be written; other errors as of the tree."""
        own_subfolder(out / STEPS_FOLDER)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.ExitStack() as closing:
            descriptor = os.open(out / STEPS_FOLDER / INDEX_NAME, flags, 0o600)
            closing.callback(os.close, descriptor)
            try:
                # on the index itself: whoever holds it is the only one that appends lines
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            tree = cls(out)
            os.ftruncate(descriptor, tree._size)  # a kill may have left a line unfinished
            tree._lock = descriptor
            closing.pop_all()
            return tree

    def close(self) -> None:
        """Let another process write."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield the entries of written steps. Not remembered: there may be a hundred thousand."""
        for line in self._understood(self._read()):
            if not _is_older(line):
                yield from line["steps"]

    def trace(
        self,
        head: Mapping[str, Any],
        entries: Sequence[Mapping[str, Any]],
        began_ns: int,
        *,
        unwritten: Document | None = None,
        **more: Any,
    ) -> Trace:
        """Return the trace of written steps and those of `unwritten`; `more` as of `Trace`."""
        holders: list[Document | OlderTrace] = []
        if unwritten is not None:
            holders += [*self._older(head), unwritten]
        return Trace(WrittenSteps(self.out, head, entries, began_ns, holders), self.out, **more)

    def _older(self, head: Mapping[str, Any]) -> list[OlderTrace]:
        """Return the steps that an older rankscope wrote."""
        groups = [group for line in self._older_lines for group in line["steps"]]
        values = [line["values"] for line in self._older_lines]
        return [OlderTrace(self._begun, head, groups, values)] if groups else []

    def add(self, document: Document) -> None:
        """Write the steps of a document as a part: readers see all of them or none. Only of a tree
        `to_write`. Setup is left out: it stands in the rest, which is written last. OSError: a file
        cannot be written."""
        steps = [i for i, head in enumerate(document.heads) if not head.is_setup]
        if not steps:
            return
        entries = self._write([document.step(i) for i in steps])
        self.sync()  # before a line says that they are there
        fields = {"format": INDEX_FORMAT, "began_ns": document.began_ns, "steps": entries}
        line = f"{json.dumps(fields)}\n".encode()
        # half a line would be damage to every reader: on a full disk the index stays as it was
        if os.write(self._lock, line) < len(line):
            os.ftruncate(self._lock, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._index))
        self._size += len(line)
        self._unsynced.append(self._index)
        self._note_written(fields)

    def sync(self) -> None:
        """Bring what was written to disk, so that its records may go. OSError: it cannot be."""
        if self._unsynced:
            for path in (*self._unsynced, self._index.parent, self.out):  # the last two for names
                sync_by_name(path)
        self._unsynced = []

    def add_rest(self, document: Document, say: Progress) -> list[dict[str, Any]]:
        """Write what no part holds, setup too, and return its entries: they do not stand in the
        index. OSError: a file cannot be written."""
        own_subfolder(self.out / STEPS_FOLDER)
        entries: list[dict[str, Any]] = []
        part: list[StepColumns] = []
        size = 0
        for older in self._older(document.head):  # each has texts of its own
            entries += [e for i in range(len(older.heads)) for e in self._write([older.step(i)])]
        for i in range(len(document.heads)):
            say("writing steps", i / len(document.heads))
            step = document.step(i)
            step_bytes = sum(row_bytes * len(step[name]) for name, row_bytes in _BYTES.items())
            if part and size + step_bytes > _PART_BYTES:
                entries += self._write(part)
                part, size = [], 0
            part.append(step)
            size += step_bytes
        entries += self._write(part) if part else []
        self.sync()
        return entries

    def carry_to(self, out: Path) -> list[str]:
        """Put every part into a new trace folder, as hard links where that can be, and go on there;
        return which files are damaged or not there. OSError: one cannot be read or written."""
        folder = out / STEPS_FOLDER
        if self.written:
            folder.mkdir(mode=0o700, exist_ok=True)
            index = self._read()[: self._size]  # another process may write on
            with new_file(folder / INDEX_NAME) as file:
                file.write(index)
        entries = [*self.entries()]
        files = StepFiles(self.out, MAX_RANKS)
        faults = [*files.faults(entries)]
        for older in self._older(_NO_HEAD):
            faults += older.faults()
        for source in dict.fromkeys(map(files.path, entries)):
            if not source.exists():
                continue
            try:
                # a second name and no copy: a step file is never changed once it has its name
                os.link(source, folder / source.name)
            except OSError:  # another disk, or one without hard links
                shutil.copy(source, folder / source.name)
        self.out, self._index = out, folder / INDEX_NAME
        return faults

    def forget_index(self) -> None:
        """Remove the index: trace.json says it all now."""
        with contextlib.suppress(OSError):
            self._index.unlink()
            self._index.parent.rmdir()  # where nothing else is in it

    def _write(self, steps: Sequence[StepColumns]) -> list[dict[str, Any]]:
        entries = write_steps(self.out, self.next_file, steps, is_synced=False)
        self._unsynced.append(self.out / entries[0]["file"])
        self.next_file += 1
        return entries

    def _note_written(self, line: Mapping[str, Any]) -> None:
        self.began_ns = line["began_ns"] if self.began_ns is None else self.began_ns
        self.written.update(map(step_name, line["steps"]))
        names = [entry["file"] for entry in line["steps"] if "file" in entry]
        if _is_older(line):
            self._older_lines.append(dict(line))
            names = [line["values"]["file"], *(entry["nodes_file"] for entry in line["steps"])]
        numbers = (int(Path(name).stem) for name in names)
        self.next_file = max(self.next_file, 1 + max(numbers, default=-1))

    def _read(self) -> bytes:
        try:
            return self._index.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise TraceError(f"{self._index}: cannot be read: {error.strerror}") from error

    def _understood(self, raw: bytes) -> Iterator[dict[str, Any]]:
        """Yield the lines that are known: others may come while somebody reads."""
        # up to the last whole line: what follows is being written, or was left by a kill
        for line in raw[: self._size].decode(errors="replace").splitlines():
            try:
                fields = json.loads(line)
                if fields["format"] not in (INDEX_FORMAT, _OLDER_FORMAT):
                    raise ValueError(f"format {fields['format']}")
                kind = "older_index" if _is_older(fields) else "index"
                check_json(fields, kind, Path(INDEX_NAME))
                for entry in fields["steps"]:
                    step_name(entry)
                yield fields
            except (ValueError, KeyError, TypeError, RecursionError, TraceError) as error:
                is_known = f'"{INDEX_FORMAT}"' in line or f'"{_OLDER_FORMAT}"' in line
                if not is_known and '"rankscope.index/' in line:
                    raise TraceVersionError(
                        f"{self._index}: written by a newer rankscope; use that, or a newer one"
                    ) from error
                raise TraceError(
                    f"{self._index}: a line is damaged ({type(error).__name__} {error})"
                ) from error


def grown_steps(folder: Path) -> set[StepName]:
    """Return the steps that were written while the job ran; errors as of `load_json`."""
    head = load_json(folder / TRACE_NAME, "trace")
    at_end = int(head["storage"]["at_end"])
    return {step_name(entry) for entry in head["steps"] if int(Path(entry["file"]).stem) < at_end}


def grown_in(folders: Sequence[Path]) -> GrowingTree:
    """Return the tree of the folder that has the most of one, a tree without a part where none has;
    a folder of replicas has that of the trace folder around it. Errors as of `GrowingTree`."""
    resolved = [f.resolve() for f in folders]
    places = [f.parent if f.name == REPLICA_FOLDER else f for f in resolved]
    return max((GrowingTree(place) for place in places), key=lambda tree: len(tree.written))
