"""Writes a trace folder: values.safetensors, steps/ where the tree is large, trace.json by rename
last."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.errors import FolderError
from rankscope.run.filenames import (
    GROWN_FORMAT,
    STEPS_FOLDER,
    TENSOR_FOLDER,
    TRACE_FORMAT,
    TRACE_NAME,
    VALUES_NAME,
    Progress,
)
from rankscope.run.outfolder import typed
from rankscope.run.ownership import own_subfolder
from rankscope.run.replacing import replacing
from rankscope.tree.growingtree import step_name
from rankscope.tree.jsontext import json_text
from rankscope.tree.stepfiles import write_nodes

if TYPE_CHECKING:
    from rankscope.tree.document import Document
    from rankscope.tree.growingtree import GrowingTree

__all__ = [
    "INLINE_LIMIT_BYTES",
    "TRACE_FORMAT",
    "TRACE_NAME",
    "Progress",
    "write_trace",
]

INLINE_LIMIT_BYTES = 32 << 20
"""A larger trace.json is not written: per-rank numbers then stand in the columns alone."""


def write_trace(
    document: Document,
    out: Path,
    *,
    inline_limit_bytes: int = INLINE_LIMIT_BYTES,
    progress: Progress | None = None,
    tree: GrowingTree | None = None,
) -> None:
    """Write the files of a trace; trace.json appears last, by rename.

    Args:
        document: the trace, or what is left of it beside the parts of `tree`.
        out: the trace folder.
        inline_limit_bytes: as `INLINE_LIMIT_BYTES`.
        progress: told how far it is.
        tree: what was written while the job ran, where anything was.

    Raises:
        FolderError: a file cannot be written; names the folder.
    """
    from rankscope.tree.columns import columns_of, write_columns  # numpy: readers do without

    say = progress or (lambda _what, _part: None)
    try:
        say("writing values", 0.0)
        if tree is not None and tree.written:
            _write_grown(document, tree)
            say("writing nodes", 1.0)
            return
        write_columns(out / VALUES_NAME, columns_of(document))
        text = _inline(document, inline_limit_bytes, say)
        if text is None:
            text = _split(document, out / STEPS_FOLDER, say)
        _write(out / TRACE_NAME, text)
        say("writing nodes", 1.0)
    except OSError as error:
        raise FolderError(
            f"{out}: the trace cannot be written ({error.strerror}); the ranks' records are still "
            f"in {out / 'spool'}: make room and run {typed('recover', out, out='NEW')}"
        ) from error


def _head(document: Document, *, is_inline: bool) -> dict[str, Any]:
    storage = {"values": VALUES_NAME, "numbers": "inline" if is_inline else "columns"}
    return {
        "format": TRACE_FORMAT,
        "run": document.run,
        "completeness": document.completeness,
        "storage": storage | ({"tensors": TENSOR_FOLDER} if document.tensors else {}),
    }


def _write_grown(document: Document, tree: GrowingTree) -> None:
    parts = [*tree.parts(), tree.add_rest(document)]
    head = _head(document, is_inline=False)
    storage = {**head["storage"], "values": [dict(part.values) for part in parts]}
    heads = [each for part in parts for each in part.steps]
    body = {
        "setup": [each for each in heads if "mode" not in each],
        "steps": sorted((each for each in heads if "mode" in each), key=step_name),
    }
    _write(
        tree.out / TRACE_NAME,
        json_text({**head, "format": GROWN_FORMAT, "storage": storage, **body}),
    )


def _inline(document: Document, limit: int, say: Progress) -> list[str] | None:
    """Return the whole tree with every rank's numbers, None where that is larger than the limit."""
    if document.json_bytes_estimate() > 2 * limit:
        return None
    body: dict[str, list[dict[str, Any]]] = {"setup": [], "steps": []}
    heads = document.heads()
    for group, head in enumerate(heads):
        say("writing nodes", group / len(heads))
        body["setup" if document.is_setup(group) else "steps"].append(
            head | {"nodes": document.nodes(group)}
        )
    text = json_text(_head(document, is_inline=True) | body)
    return text if sum(map(len, text)) <= limit else None


def _split(document: Document, folder: Path, say: Progress) -> list[str]:
    """Write one nodes file per group; return trace.json's text, which names them."""
    own_subfolder(folder)
    body: dict[str, list[dict[str, Any]]] = {"setup": [], "steps": []}
    heads = document.heads()
    for group, head in enumerate(heads):
        say("writing nodes", group / len(heads))
        kind = "setup" if document.is_setup(group) else "steps"
        nodes = document.nodes(group, is_compact=True)
        body[kind].append(write_nodes(folder.parent, group, head, nodes))
    return json_text(_head(document, is_inline=False) | body)


def _write(path: Path, pieces: Iterable[str]) -> None:
    with replacing(path) as file:
        remaining = iter(pieces)
        while block := list(itertools.islice(remaining, 4096)):
            file.write("".join(block).encode(errors="backslashreplace"))
