"""The formats a trace can be exported to, and the one way to write any of them.

A format is a module with a function

    write(trace, selection, place, progress, **options) -> Sequence[str]

that writes what the selection takes of the trace to `place.target`, a file or a folder as its row
of the table says, and returns lines for the person who asked: first what is in it, then what is
not. To add one: its file, and its row here.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rankscope.errors import FolderError, SettingError
from rankscope.export.subset import Selection
from rankscope.run.filenames import Progress
from rankscope.run.files import free_place, sync_by_name
from rankscope.tree.views import Trace


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
    """Return a format; SettingError: there is none of that name; lists what there is."""
    if name not in FORMATS:
        listed = "; ".join(f"{known} ({row.summary})" for known, row in FORMATS.items())
        raise SettingError(f"--format: no format {name!r}; choose from {listed}")
    return FORMATS[name]


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
    `is_forced`: a file that is there is replaced.

    Raises:
        SettingError: no such format, an option that is not of it, or a package it needs is missing.
        FolderError: `out` exists, or cannot be written.
        SelectionError: the trace holds nothing of what is asked for.
    """
    kind = format_named(name)
    given = {key: value for key, value in (options or {}).items() if value}
    for key in sorted(given.keys() - kind.options):
        option = "--" + key.removeprefix("is_").replace("_", "-")
        raise SettingError(f"{option}: not an option of --format {name}")
    writer = importlib.import_module(kind.module)
    try:
        with claimed(out, is_folder=kind.is_folder, is_forced=is_forced) as place:
            lines: Sequence[str] = writer.write(trace, selection, place, progress, **given)
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
    folder `.NAME.PID.new` beside it.

    Raises:
        FolderError: `out` exists (an empty folder is taken for a format that makes one).
        OSError: it cannot be written.
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
    """Make it readable by its owner alone, as the trace is, whatever wrote it, and have it on the
    disk before it gets its name."""
    for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
        each.chmod(0o700 if each.is_dir() else 0o600)
        sync_by_name(each)
