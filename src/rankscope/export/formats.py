"""The formats a trace can be exported to, and the one way to write any of them.

A format is a module with a function

    write(trace, selection, place, progress, **options) -> Sequence[str]

that writes what the selection takes of the trace to `place.target`, a file or a folder as its row
of the table says, and returns lines for the person who asked: first what is in it, then what is
not. To add one: its file, and its row here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rankscope.errors import FolderError, SettingError
from rankscope.export.place import claimed
from rankscope.export.subset import Selection
from rankscope.run.filenames import Progress
from rankscope.tree.views import Trace

__all__ = ["FORMATS", "Format", "export", "format_named"]


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
    """Return a format.

    Raises:
        SettingError: there is none of that name; lists what there is.
    """
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
) -> Sequence[str]:
    """Write a trace to `out`, which appears when it is whole; return what to say about it.

    Args:
        trace: an open trace.
        name: of the format.
        out: what to make.
        selection: what of the trace.
        progress: told how far it is.
        options: what this format alone takes; None and False are the same as not given.

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
        with claimed(out, is_folder=kind.is_folder) as place:
            lines: Sequence[str] = writer.write(trace, selection, place, progress, **given)
    except OSError as error:
        reason = error.strerror or str(error)
        raise FolderError(
            f"{out}: cannot be written ({reason}); nothing was left there: make room, or give "
            "another place with --out"
        ) from error
    return lines
