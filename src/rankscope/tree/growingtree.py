"""Steps that stand in the tree before their job is over.

    <trace>/steps/000007.json           nodes of one step
    <trace>/steps/000007.safetensors    values of that step and of those written with it: a part
    <trace>/steps/index.jsonl           a line for each part, appended once its files are whole

Rows are counted through all parts. At the end the rest becomes the last part, trace.json takes the
place of the index, and says in which files the values lie.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rankscope.errors import TraceError, TraceVersionError
from rankscope.record.call import Mode
from rankscope.record.streams import MAX_RANKS
from rankscope.run.filenames import INDEX_FORMAT, INDEX_NAME, REPLICA_FOLDER, STEPS_FOLDER
from rankscope.run.ownership import own_subfolder
from rankscope.run.replacing import new_file, sync_by_name
from rankscope.tree.finishedtrace import file_faults
from rankscope.tree.schemacheck import check_json
from rankscope.tree.stepfiles import nodes_path, values_path, write_nodes

if TYPE_CHECKING:
    from rankscope.tree.document import Document

__all__ = ["GrowingTree", "StepName", "TreePart", "grown_in", "step_name", "steps_of_parts"]

_COUNTED: Final = ("values", "samples", "calls")


class StepName(NamedTuple):
    """Which step of which life of the job; in the order of the tree."""

    incarnation: int
    mode: int
    step: int


def step_name(head: Mapping[str, Any]) -> StepName:
    """Return the name of a step from its head in trace.json.

    Raises:
        KeyError: it has none, as setup.
    """
    mode = Mode[str(head["mode"]).upper()]
    return StepName(int(head["incarnation"]), int(mode), int(head["step"]))


def steps_of_parts(head: Mapping[str, Any]) -> set[StepName]:
    """Return the steps of a finished trace that were written while its job ran.

    Args:
        head: of its trace.json.
    """
    values = head["storage"]["values"]
    if isinstance(values, str):
        return set()
    rest = int(Path(values[-1]["file"]).stem)
    return {step_name(each) for each in head["steps"] if int(Path(each["nodes_file"]).stem) < rest}


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePart:
    """Steps that were written together."""

    steps: tuple[dict[str, Any], ...]
    """Head of each, with its nodes file."""
    values: Mapping[str, Any]
    """The values file and its rows: {"file", "values", "samples", "calls"}."""
    began_ns: int
    """Wall clock of the first call of the run."""

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of its line in the index."""
        return {
            "format": INDEX_FORMAT,
            "began_ns": self.began_ns,
            "values": self.values,
            "steps": self.steps,
        }

    @classmethod
    def read(cls, line: str) -> TreePart:
        """Return the part of a line.

        Raises:
            ValueError, KeyError, TypeError, RecursionError, TraceError: it is none.
        """
        fields = json.loads(line)
        if fields["format"] != INDEX_FORMAT:
            raise ValueError(f"format {fields['format']}")
        check_json(fields, "index", Path(INDEX_NAME))
        part = cls(
            steps=tuple(fields["steps"]), values=fields["values"], began_ns=int(fields["began_ns"])
        )
        for head in part.steps:
            step_name(head)
        return part


class GrowingTree:
    """The parts of one trace folder."""

    def __init__(self, out: Path) -> None:
        """Read the index that is there.

        Raises:
            TraceError: it cannot be read, or is damaged.
            TraceVersionError: it is of a newer format.
        """
        self.out = out
        self.written: set[StepName] = set()
        self.began_ns: int | None = None
        """Wall clock of the first call of the run, None before a part is written."""
        self.rows: Counter[str] = Counter()
        """How many rows of "values", "samples" and "calls" are written."""
        self._index = out / STEPS_FOLDER / INDEX_NAME
        self._unsynced: list[Path] = []
        self._lock = -1
        raw = self._read()
        self._size = raw.rfind(b"\n") + 1
        """Bytes of the index that are known."""
        for part in self._understood(raw):
            self._count(part)

    @classmethod
    def to_write(cls, out: Path) -> GrowingTree | None:
        """Return the tree of a folder for the one process that may write it, None while another
        does.

        Raises:
            OSError: it cannot be written.
            TraceError, TraceVersionError: as for the tree.
        """
        own_subfolder(out / STEPS_FOLDER)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.ExitStack() as closing:
            descriptor = os.open(out / STEPS_FOLDER / INDEX_NAME, flags, 0o600)
            closing.callback(os.close, descriptor)
            try:
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

    def parts(self) -> Iterator[TreePart]:
        """Yield the parts that are known, as the index names them; which step is in which is not
        remembered: there may be a hundred thousand.

        Raises:
            TraceError, TraceVersionError: as for the tree.
        """
        yield from self._understood(self._read())

    def add(self, document: Document) -> None:
        """Write the steps of a document as a part: readers see all of them or none. Only of a tree
        `to_write`.

        What it holds of setup is left out; it stands in the rest, which is written last.

        Raises:
            OSError: a file cannot be written.
        """
        steps = [i for i in range(len(document.merged.groups)) if not document.is_setup(i)]
        if not steps:
            return
        first_node = int(document.merged.group.searchsorted(steps[0]))
        part = self._write(document, steps, first_node)
        self.sync()  # before a line says that they are there
        line = f"{json.dumps(part.as_fields())}\n".encode()
        if os.write(self._lock, line) < len(line):
            os.ftruncate(self._lock, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._index))
        self._size += len(line)
        self._unsynced.append(self._index)
        self._count(part)

    def sync(self) -> None:
        """See that what was written is on disk: whatever it was made from may go after this.

        Raises:
            OSError: it cannot be.
        """
        if self._unsynced:
            for path in (*self._unsynced, self._index.parent, self.out):  # the last two for names
                sync_by_name(path)
        self._unsynced = []

    def add_rest(self, document: Document) -> TreePart:
        """Write what no part holds, setup too, and return it: it does not stand in the index.

        Raises:
            OSError: a file cannot be written.
        """
        own_subfolder(self.out / STEPS_FOLDER)
        part = self._write(document, [*range(len(document.merged.groups))], 0)
        self.sync()
        return part

    def carry_to(self, out: Path) -> list[str]:
        """Put every part into a new trace folder, as hard links where that can be, and go on there.

        Returns:
            which files of the parts are damaged or not there.

        Raises:
            OSError: a file cannot be read or written.
        """
        folder = out / STEPS_FOLDER
        if self.written:
            folder.mkdir(mode=0o700, exist_ok=True)
            known = self._read()[: self._size]  # another process may write on
            with new_file(folder / INDEX_NAME) as file:
                file.write(known)
        faults: list[str] = []
        for part in self.parts():
            faults += file_faults(self.out, part.steps, [part.values], MAX_RANKS)
            for source in (
                values_path(self.out, part.values),
                *(nodes_path(self.out, head) for head in part.steps),
            ):
                if not source.exists():
                    continue
                try:
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

    def _write(self, document: Document, groups: Sequence[int], first_node: int) -> TreePart:
        from rankscope.tree.columns import columns_of, write_columns  # numpy: readers do without

        merged, folder = document.merged, self.out / STEPS_FOLDER
        first = int(merged.node_entries[first_node])
        document.first_row = self.rows["values"] - int(merged.entry_start[first])
        document.first_sample = self.rows["samples"]
        number = len(self.written)
        heads, all_heads = [], document.heads()
        for place, group in enumerate(groups, number):
            nodes = document.nodes(group, is_compact=True)
            heads.append(write_nodes(self.out, place, all_heads[group], nodes, is_synced=False))
            self._unsynced.append(nodes_path(self.out, heads[-1]))
        columns = columns_of(document, first_node)
        values = folder / f"{number:06d}.safetensors"
        write_columns(values, columns)
        return TreePart(
            steps=tuple(heads),
            values={
                "file": f"{STEPS_FOLDER}/{values.name}",
                "values": len(merged.order) - int(merged.entry_start[first]),
                "samples": len(document.tables.samples),
                "calls": len(merged.calls) - int(merged.call_start[first_node]),
            },
            began_ns=document.began_ns,
        )

    def _count(self, part: TreePart) -> None:
        self.began_ns = part.began_ns if self.began_ns is None else self.began_ns
        self.rows.update({kind: int(part.values[kind]) for kind in _COUNTED})
        self.written.update(map(step_name, part.steps))

    def _read(self) -> bytes:
        try:
            return self._index.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise TraceError(f"{self._index}: cannot be read: {error.strerror}") from error

    def _understood(self, raw: bytes) -> Iterator[TreePart]:
        """Yield the parts of the lines that are known: others may come while somebody reads."""
        for line in raw[: self._size].decode(errors="replace").splitlines():
            try:
                yield TreePart.read(line)
            except (ValueError, KeyError, TypeError, RecursionError, TraceError) as error:
                if f'"{INDEX_FORMAT}"' not in line and '"rankscope.index/' in line:
                    raise TraceVersionError(
                        f"{self._index}: written by a newer rankscope; use that, or a newer one"
                    ) from error
                raise TraceError(
                    f"{self._index}: a line is damaged ({type(error).__name__} {error})"
                ) from error


def grown_in(folders: Sequence[Path]) -> GrowingTree:
    """Return the tree of the folder that has the most of one, a tree without a part where none has.

    Of a folder of replicas it is the one of the trace folder that it lies in.

    Raises:
        TraceError, TraceVersionError: as `GrowingTree`.
    """
    whole = [f.resolve() for f in folders]
    places = [f.parent if f.name == REPLICA_FOLDER else f for f in whole]
    return max((GrowingTree(place) for place in places), key=lambda tree: len(tree.written))
