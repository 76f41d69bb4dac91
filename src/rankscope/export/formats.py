"""The formats a trace can be exported to, what of a trace is exported, and the one way to write it.

A format is a module with a function

    write(trace, selection, place, progress, **options) -> Sequence[str]

that writes what the selection takes of the trace to `place.target`, a file or a folder as its row
of the table says, and returns lines for the person who asked: first what is in it, then what is
not. To add one: its file, and its row here; from another package, an entry point of the group
`rankscope.exports` that names such a row.

`ExportedStep` has the values and calls of a step as a table, for `jsonl` and `parquet`: what a call
and a tensor are is told once for each, and rows name it.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankscope.errors import FolderError, SelectionError, SettingError
from rankscope.globs import glob_matches
from rankscope.layout.placement import LayoutSource
from rankscope.record.call import CallStatus, Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_text
from rankscope.record.stepcolumns import Column, Told, exported_columns
from rankscope.record.value import TensorFacts, is_form
from rankscope.run.files import free_place, sync_by_name
from rankscope.run.folders import Progress
from rankscope.tree.selection import (
    nothing_matched,
    parse_mode,
    parse_path,
    parse_phases,
    parse_ranges,
)
from rankscope.tree.slotview import flag_words
from rankscope.tree.views import Node, Step, Trace

Array = NDArray[Any]

_SHOWN = 1000
"""Ranks of a range that an error repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Steps, modules, phases and ranks."""

    path: str = "*"
    steps: tuple[range, ...] = ()
    """() for all."""
    mode: Mode | None = None
    phases: frozenset[Phase] = frozenset(Phase)
    wanted_ranks: tuple[range, ...] = ()
    """() for all."""
    with_setup: bool = True

    @classmethod
    def parse(cls, *, path: str, step: str, mode: str, phase: str, rank: str) -> Selection:
        """Read the options of `rankscope export`, empty where not given; SelectionError: a wrong
        one."""
        named = parse_phases(phase) if phase else None
        return cls(
            path=parse_path(path),
            steps=parse_ranges("step", step),
            mode=parse_mode(mode) if mode else None,
            phases=frozenset(Phase) if named is None else named,
            wanted_ranks=parse_ranges("rank", rank),
            with_setup=Phase.SETUP in named if named is not None else not (step or mode),
        )

    def ranks(self, trace: Trace) -> frozenset[int]:
        """Return the ranks that are asked for; SelectionError: the trace holds none of them."""
        traced = {int(rank["rank"]) for rank in trace.run["ranks"]}
        if not self.wanted_ranks:
            return frozenset(traced)
        chosen = frozenset(r for r in traced if any(r in span for span in self.wanted_ranks))
        if not chosen:
            asked = ranks_text(rank for span in self.wanted_ranks for rank in span[:_SHOWN])
            raise SelectionError(f"--rank {asked}: the trace holds ranks {ranks_text(traced)}")
        return chosen

    def groups(self, trace: Trace) -> list[Step]:
        """Return the setups and steps asked for; SelectionError: the trace holds none of them."""
        setup = list(trace.setup) if self.with_setup else []
        steps = [
            step
            for step in trace.steps
            if self.phases != {Phase.SETUP}
            and (self.mode is None or step.mode is self.mode)
            and (not self.steps or any(step.step in span for span in self.steps))
        ]
        if not setup and not steps:
            listed = ", ".join(s.head.label for s in (*trace.setup, *trace.steps)[:20]) or "nothing"
            raise SelectionError(f"the trace holds no such step; it holds {listed}")
        return [*setup, *steps]

    def walk(
        self, trace: Trace, progress: Progress, words: str
    ) -> Iterator[tuple[Step, list[Node]]]:
        """Yield every group with the nodes that are asked for, in the order of the tree; `progress`
        is told `words` is done. SelectionError: no node has such a path; lists near ones."""
        paths: set[str] = set()
        groups = self.groups(trace)
        for done, step in enumerate(groups):
            progress(words, done / len(groups))
            nodes = []
            for node in step.passing():
                path = node.path
                paths.add(path)
                if glob_matches(self.path, path) and node.phase in self.phases:
                    nodes.append(node)
            yield step, nodes
        if not any(glob_matches(self.path, path) for path in paths):
            raise nothing_matched("--path", self.path, paths)


_GROUP: Final = "rankscope.exports"


class Format(NamedTuple):
    """One row of the table."""

    module: str
    """Imported when it is asked for: some need packages that are not always there."""
    is_folder: bool
    summary: str
    options: frozenset[str] = frozenset()
    """Keywords of its `write` beyond those of all."""


FORMATS = {
    "json": Format("rankscope.export.jsontree", False, "the tree, as tree.json has it: for jq"),
    "jsonl": Format("rankscope.export.jsonl", False, "one JSON object a line: a value on a rank"),
    "perfetto": Format(
        "rankscope.export.perfetto", False, "a ZIP for ui.perfetto.dev: calls of all ranks in time"
    ),
    "parquet": Format(
        "rankscope.export.parquet", True, "tables for DuckDB, Spark, Ray: values, samples, calls"
    ),
    "hf": Format(
        "rankscope.compat.debugger.treefiles",
        True,
        "the files of transformers' module debugger: calls, their tensors",
        frozenset({"is_global", "layout", "all_layers", "all_outputs", "safetensors"}),
    ),
}
"""In the order the help lists them."""


def format_named(name: str) -> Format:
    """Return a format of ours, else of another package: an entry point of `rankscope.exports`.
    SettingError: an unknown name, or an entry point that cannot be loaded."""
    if name in FORMATS:
        return FORMATS[name]
    entries = {entry.name: entry for entry in entry_points(group=_GROUP)}
    if name not in entries:
        listed = [f"{format_name} ({row.summary})" for format_name, row in FORMATS.items()]
        listed += [f"{other_name} ({entries[other_name].module})" for other_name in sorted(entries)]
        raise SettingError(f"--format: no format {name!r}; choose from {'; '.join(listed)}")
    try:
        row = entries[name].load()
    except (ImportError, AttributeError) as error:
        raise SettingError(f"--format {name}: {entries[name].value}: {error}") from error
    if not isinstance(row, Format):
        raise SettingError(f"--format {name}: {entries[name].value} is not a Format")
    return row


def export(
    trace: Trace,
    name: str,
    out: Path,
    selection: Selection,
    progress: Progress,
    options: Mapping[str, object] | None = None,
    *,
    is_forced: bool = False,
) -> Sequence[str]:
    """Write a trace to `out`, which appears when it is whole; return what to say about it.

    `options` are what this format alone takes; None and False are the same as not given.
    `is_forced`: a file that is there is replaced. SettingError: no such format, an option that is
    not of it, or a package it needs is missing; FolderError: `out` exists, or cannot be written;
    SelectionError: the trace holds nothing of what is asked for.
    """
    kind = format_named(name)
    set_options = {key: value for key, value in (options or {}).items() if value}
    for key in sorted(set_options.keys() - kind.options):
        option = "--" + key.removeprefix("is_").replace("_", "-")
        raise SettingError(f"{option}: not an option of --format {name}")
    writer = importlib.import_module(kind.module)
    try:
        with claimed(out, is_folder=kind.is_folder, is_forced=is_forced) as place:
            lines: Sequence[str] = writer.write(trace, selection, place, progress, **set_options)
    except OSError as error:
        reason = error.strerror or str(error)
        raise FolderError(
            f"{out}: cannot be written ({reason}); nothing was left there: make room, or give "
            "another place with --out"
        ) from error
    return lines


@dataclass(frozen=True, slots=True)
class ExportPlace:
    """A hidden folder beside the export's name, removed in the end."""

    target: Path
    """The file or folder to write; becomes the export."""
    scratch: Path
    """Folder for whatever else is needed meanwhile."""


@contextmanager
def claimed(out: Path, *, is_folder: bool, is_forced: bool = False) -> Iterator[ExportPlace]:
    """Give a place to write an export; what stands there at the end gets its name by rename.

    However the export ends, nothing half stands under its name, and only SIGKILL leaves the hidden
    folder `.NAME.PID.new` beside it. FolderError: `out` exists (an empty folder is taken for a
    format that makes one); OSError: it cannot be written.
    """
    name = free_place(out, is_folder=is_folder, is_forced=is_forced)
    draft = name.parent / f".{name.name}.{os.getpid()}.new"
    # beside the target, on its disk: the last rename must not become a copy
    draft.mkdir(mode=0o700)
    try:
        place = ExportPlace(target=draft / "export", scratch=draft / "scratch")
        place.scratch.mkdir()
        if is_folder:
            place.target.mkdir()
        yield place
        _settle(place.target)
        # somebody else may have been quicker
        free_place(out, is_folder=is_folder, is_forced=is_forced)
        os.replace(place.target, name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _settle(path: Path) -> None:
    """Make it readable by its owner alone, and have it on the disk before it gets its name."""
    for entry in [path, *path.rglob("*")] if path.is_dir() else [path]:
        entry.chmod(0o700 if entry.is_dir() else 0o600)
        sync_by_name(entry)


_SOURCES = frozenset(source.value for source in LayoutSource)


class Cells(NamedTuple):
    """A column of a table."""

    items: Any
    """What stands in it: an array with an item for each row, or a list."""
    place: Array | None = None
    """Of a list: which item is a row's."""
    is_known: Array | None = None
    """Of an array: False in rows that have null; None where no row has."""

    def listed(self) -> list[Any]:
        """Return the rows as Python objects."""
        if self.place is not None:
            return [self.items[place] for place in self.place.tolist()]
        rows: list[Any] = self.items.tolist()
        if self.is_known is not None:
            for row in np.flatnonzero(~self.is_known).tolist():
                rows[row] = None
        return rows


def mode_word(step: Step) -> str:
    """Return train, eval, or setup for what is before the first step."""
    return "setup" if step.is_setup else step.mode.word


class ExportedStep:
    """One step, or some nodes of it on some ranks."""

    def __init__(self, step: Step, nodes: Iterable[Node] | None, ranks: frozenset[int]) -> None:
        """Choose nodes of a step, None for all, and the ranks whose calls and values count."""
        chosen = None if nodes is None else [*nodes]
        self.columns = chosen[0].step if chosen else step.columns()
        count = len(self.columns["nodes.id"])
        rows = range(count) if chosen is None else [node.row for node in chosen]
        self._nodes = np.array(rows, np.int64)
        self._step = step
        self._ranks = np.array(sorted(ranks), np.int64)

    def calls(self) -> Array:
        """Return the rows of the calls, in the order of the tree."""
        return self._chosen("calls")

    def values(self) -> Array:
        """Return the rows of the values, in the order of the tree: the forms of calls are none."""
        rows = self._chosen("values")
        slots, place = np.unique(self.columns["values.slot"][rows], return_inverse=True)
        is_value = [not is_form(self._text(number)) for number in slots.tolist()]
        return rows[np.array(is_value, np.bool_)[place]]

    def in_order(self, table: str, rows: Array) -> Array:
        """Return rows by path, phase, of values slot, micro-batch, ordinal, rank."""
        columns = self.columns
        node = columns[f"{table}.node"][rows]
        texts = [columns[f"nodes.{name}"][node] for name in ("path", "phase")]
        if table == "values":
            texts.append(columns["values.slot"][rows])
        # numbers of texts are in order of first sight, which differs between traces
        turns = (columns[f"nodes.{name}"][node] for name in ("micro_batch", "ordinal", "id"))
        keys = [*map(self._alphabetic, texts), *turns, columns[f"{table}.rank"][rows]]
        return rows[np.lexsort(keys[::-1])]

    def call_cells(self, rows: Array) -> dict[str, Cells]:
        """Return the columns of calls."""
        codes = self.columns["calls.status"][rows]
        status = self._once(codes, lambda code: {"status": CallStatus.word_of(code)})
        return {**self.shared_cells("calls", rows), **self._told("calls", rows), **status}

    def value_cells(self, rows: Array) -> dict[str, Cells]:
        """Return the columns of values."""
        columns = self.columns
        tensors = self._once(columns["values.tensor"][rows], self._tensor)
        bits = columns["values.flags"][rows]
        flags = self._once(bits, lambda flag_bits: {"flags": [*flag_words(flag_bits)]})
        shared, told_cells = self.shared_cells("values", rows), self._told("values", rows)
        return {**shared, **tensors, **flags, **told_cells}

    def shared_cells(self, table: str, rows: Array) -> dict[str, Cells]:
        """Return which call a row is of, of values which slot, and the rank."""
        columns = self.columns
        cells = self._once(columns[f"{table}.node"][rows], self._call)
        if table == "values":
            slots = columns["values.slot"][rows]
            cells |= self._once(slots, lambda number: {"slot": self._text(number)})
        return cells | {"rank": Cells(columns[f"{table}.rank"][rows])}

    def _chosen(self, table: str) -> Array:
        node, ranks = self.columns[f"{table}.node"], self.columns[f"{table}.rank"]
        bounds = np.searchsorted(node, [self._nodes, self._nodes + 1]).T.tolist()
        rows = np.concatenate([np.empty(0, np.int64), *(np.arange(*bound) for bound in bounds)])
        return rows[np.isin(ranks[rows], self._ranks)]

    def _once(self, column: Array, fields: Callable[[int], dict[str, Any]]) -> dict[str, Cells]:
        """Return the fields of each number in a column, made once."""
        numbers, place = np.unique(column, return_inverse=True)
        records = [fields(number) for number in numbers.tolist()]
        return {name: Cells([record[name] for record in records], place) for name in records[0]}

    def _call(self, row: int) -> dict[str, Any]:
        step, columns, lists = self._step, self.columns, self.columns.lists
        micro_batch = lists.micro_batch[row]
        return {
            "mode": mode_word(step),
            "step": step.step,
            "incarnation": step.incarnation,
            "micro_batch": None if micro_batch < 0 else micro_batch,
            "phase": self._text(lists.phase[row]),
            "path": self._text(lists.path[row]),
            "class": columns.texts.module(lists.module[row]).class_name,
            "ordinal": lists.ordinal[row],
            "node": f"{int(columns['nodes.id'][row]):016x}",
        }

    def _tensor(self, number: int) -> dict[str, Any]:
        facts: TensorFacts = self.columns.texts.tensor(number)
        has_layout = facts.source in _SOURCES  # a newer rankscope may have one more
        placements = dict(facts.placements) if has_layout else {}
        return {
            "dtype": facts.dtype,
            "device": facts.device,
            "shape": [*facts.shape],
            "global_shape": None if facts.global_shape is None else [*facts.global_shape],
            "layout": facts.source if has_layout else LayoutSource.UNKNOWN.value,
            "mesh": (has_layout and facts.mesh) or None,
            "placement": ",".join(f"{axis}={text}" for axis, text in placements.items()) or None,
            "placements": placements or None,
            "requires_grad": facts.requires_grad,
            "note": facts.note,
        }

    def _told(self, table: str, rows: Array) -> dict[str, Cells]:
        is_digested = self.columns["values.digested"][rows] if table == "values" else None
        return {
            column.own_name: _cells(column, self.columns[column.name][rows], is_digested)
            for column in exported_columns(table)
        }

    def _text(self, number: int) -> str:
        return self.columns.texts.text(number)

    def _alphabetic(self, numbers: Array) -> Array:
        """Return numbers of texts as numbers that sort as the texts do."""
        used, place = np.unique(numbers, return_inverse=True)
        words = [self._text(number) for number in used.tolist()]
        order = {word: turn for turn, word in enumerate(sorted({*words}))}
        turns: Array = np.array([order[word] for word in words], np.int64)[place]
        return turns


def _cells(column: Column, numbers: Array, is_digested: Array | None) -> Cells:
    is_known = np.ones(len(numbers), np.bool_)
    if column.told is Told.DIGEST and is_digested is not None:
        is_known &= is_digested
    if column.none is not None:
        is_known &= numbers != column.none
    if numbers.dtype.kind == "f" and numbers.ndim == 1:
        is_known &= ~np.isnan(numbers)
    if not column.is_hex:
        return Cells(numbers, None, None if is_known.all() else is_known)
    digits = numbers.astype(">u8").tobytes().hex()
    texts = [digits[16 * row : 16 * row + 16] if k else None for row, k in enumerate(is_known)]
    return Cells(texts, np.arange(len(numbers)))
