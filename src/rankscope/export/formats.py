"""The formats a trace can be exported to, what of a trace is exported, and the one way to write it.

A format is a module with a function

    write(trace, selection, place, progress, **options) -> Sequence[str]

that writes what the selection takes of the trace to `place.target`, a file or a folder as its row
of the table says, and returns lines for the person who asked: first what is in it, then what is
not. To add one: its file, and its row here; from another package, an entry point of the group
`rankscope.exports` that names such a row.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, NamedTuple

from rankscope.errors import FolderError, SelectionError, SettingError
from rankscope.globs import glob_matches
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_text
from rankscope.run.filenames import Progress
from rankscope.run.files import free_place, sync_by_name
from rankscope.tree.selection import (
    nothing_matched,
    parse_mode,
    parse_path,
    parse_phases,
    parse_ranges,
)
from rankscope.tree.views import Node, Step, Trace

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
        raise SettingError(f"--format {name}: {entries[name].value} is no Format")
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
