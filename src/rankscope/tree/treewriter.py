"""Writes a trace folder: step files, tree.json where it is not too large, trace.json by rename
last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rankscope.errors import FolderError, TraceError
from rankscope.run.filenames import (
    STEPS_FOLDER,
    TENSOR_FOLDER,
    TRACE_FORMAT,
    TRACE_NAME,
    TREE_FORMAT,
    TREE_NAME,
    Progress,
)
from rankscope.run.files import replacing
from rankscope.run.prepare import command_text
from rankscope.tree.growingtree import GrowingTree, step_name
from rankscope.tree.jsontext import encoded, json_text
from rankscope.tree.nodestext import Write, write_nodes
from rankscope.tree.stepfile import entry_of
from rankscope.tree.views import Step, Trace

if TYPE_CHECKING:
    from rankscope.tree.document import Document

TREE_LIMIT_BYTES: Final = 100 << 20
"""A larger tree.json is not written unless it is asked for."""


def write_trace(
    document: Document,
    out: Path,
    *,
    tree: GrowingTree | None = None,
    wanted: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the files of a trace; trace.json appears last, by rename.

    Args:
        document: the trace, or what is left of it beside the steps of `tree`; closed here.
        tree: what was written while the job ran, where anything was.
        wanted: whether tree.json is: "always", "never", or "auto", where it is not too large;
            default as the job was told.

    Raises:
        FolderError: a file cannot be written; names the folder.
    """
    wanted = wanted or str(document.run["settings"].get("tree", "auto"))
    say = progress or (lambda _what, _part: None)
    tree = tree or GrowingTree(out)
    try:
        say("writing steps", 0.0)
        storage: dict[str, Any] = {"steps": STEPS_FOLDER, "at_end": tree.next_file}
        entries = [*tree.entries(), *tree.add_rest(document, say)]
        document.close()
        say("writing the tree", 0.0)
        head = document.head
        body = _by_kind(entries)
        began_ns = document.began_ns if tree.began_ns is None else tree.began_ns
        trace = tree.trace(head, [*body["setup"], *body["steps"]], began_ns)
        limit = None if wanted == "always" else TREE_LIMIT_BYTES
        if wanted == "never":
            absent = f"it was not asked for (--rs-tree never); {_command(out)}"
        elif limit is not None and _is_larger(entries, int(document.run["world_size"]), 2 * limit):
            absent = _too_large(out, limit)
        else:
            absent = _write_tree(trace, out, limit, say)
        if absent:  # of an earlier writing
            (out / TREE_NAME).unlink(missing_ok=True)
        storage |= {"no_tree": absent} if absent else {"tree": TREE_NAME}
        storage |= {"tensors": TENSOR_FOLDER} if document.tensors else {}
        whole = {"format": TRACE_FORMAT, **head, "storage": storage, "began_ns": began_ns, **body}
        with replacing(out / TRACE_NAME) as file:
            file.write("".join(json_text(whole)).encode(errors="backslashreplace"))
        say("writing the tree", 1.0)
    except OSError as error:
        raise FolderError(
            f"{out}: the trace cannot be written ({error.strerror}); the ranks' records are still "
            f"in {out / 'spool'}: make room and run {command_text('recover', out, out='NEW')}"
        ) from error


def write_tree(trace: Trace, steps: Sequence[Step], say: Progress, write: Write) -> None:
    """Write a tree.json: header, completeness, and every node of some steps of a trace."""
    head = {"format": TREE_FORMAT, "run": trace.run, "completeness": trace.completeness}
    write("".join(json_text(head)).rstrip().removesuffix("}").rstrip())
    done = 0
    for name in ("setup", "steps"):
        write(f',\n "{name}": [')
        own = [step for step in steps if step.is_setup == (name == "setup")]
        for place, step in enumerate(own):
            entry = encoded(entry_of(step.head)).removesuffix("}")
            write(f'{"," if place else ""}\n  {entry},\n   "nodes": ')
            write_nodes(step, "\n    ", write)
            write("}")
            done += 1
            say("writing the tree", done / len(steps))
        write("]")
    write("}\n")


def _by_kind(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    return {
        "setup": [each for each in entries if "mode" not in each],
        "steps": sorted((each for each in entries if "mode" in each), key=step_name),
    }


def _too_large(out: Path, limit: int | None) -> str:
    return f"it would take more than {(limit or 0) >> 20} MB; {_command(out)}"


def _command(out: Path) -> str:
    return f"to have it: {command_text('export', out, out='FILE')} --format json"


def _write_tree(trace: Trace, out: Path, limit: int | None, say: Progress) -> str:
    """Write tree.json; return why it is not there, "" where it is."""
    written = 0
    try:
        with replacing(out / TREE_NAME) as file:

            def write(text: str) -> None:
                nonlocal written
                data = text.encode(errors="backslashreplace")
                written += len(data)
                if limit is not None and written > limit:
                    raise _TooLargeError
                file.write(data)

            write_tree(trace, [*trace.setup, *trace.steps], say, write)
    except _TooLargeError:
        return _too_large(out, limit)
    except TraceError as error:
        return f"a step cannot be read: {error}"
    return ""


def _is_larger(entries: Sequence[Mapping[str, Any]], ranks: int, limit: int) -> bool:
    """True where nodes alone, and values that all ranks share, take more than a limit as JSON."""
    rows = {
        table: sum(end - begin for begin, end in (each["rows"][table] for each in entries))
        for table in ("nodes", "values")
    }
    return bool(250 * rows["nodes"] + 650 * rows["values"] // ranks > limit)


class _TooLargeError(Exception):
    pass
