"""From the ranks' records to a trace: `build` in a trace folder, `recover` from any folders.

streams --read--> columns per rank --number--> tables --merge--> nodes --write--> trace.json
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rankscope.errors import FolderError, TraceError, TraceVersionError, os_errors_as
from rankscope.run.files import Place, Reach, Removable, may_remove, replacing
from rankscope.run.folders import (
    INDEX_NAME,
    REPLICA_FOLDER,
    STATUS_NAME,
    STEPS_FOLDER,
    TENSOR_FOLDER,
    TRACE_FORMAT,
    TRACE_NAME,
    TREE_NAME,
    Progress,
)
from rankscope.run.jobstatus import JobEnd, carry_stalls, job_end
from rankscope.run.prepare import command_text
from rankscope.spool.recordformat import Decoded
from rankscope.tree.assembly.header import completeness, how_ended, run_header, step_notes
from rankscope.tree.assembly.interning import build_vocabulary
from rankscope.tree.assembly.rankstreams import RankStream, StreamBytes, read_stream
from rankscope.tree.assembly.sources import carry_chunks, find_streams, finish_kept, with_places
from rankscope.tree.assembly.steprecords import StepRecords
from rankscope.tree.document import Document
from rankscope.tree.growingtree import GrowingTree, grown_in, step_name
from rankscope.tree.jsontext import json_text, write_tree
from rankscope.tree.step import StepName
from rankscope.tree.views import Trace

if TYPE_CHECKING:
    from rankscope.tree.document import Document

_MOST_FAULTS = 20
_MOST_WAIT_S = 30.0
_LOOK_S = 0.05


def assemble(
    sources: Iterable[StreamBytes],
    *,
    settle: Callable[[list[RankStream]], list[RankStream]] | None = None,
    written: Collection[StepName] = (),
    progress: Progress | None = None,
    decoded: Decoded | None = None,
    began_ns: int | None = None,
    end: JobEnd | None = None,
) -> Document:
    """Return the trace that streams make together, in memory.

    Args:
        settle: looks over the streams once all are read, before anything is made of them.
        written: steps to leave out, which stand in the tree.
        decoded: definitions, as of `read_stream`; given where streams are assembled more than once.
        began_ns: wall clock of the earliest call known, where it may not be among these.
        end: how the job ended, as far as files beside the records say it.

    Raises:
        TraceError: no record, or records of different runs.
        TraceVersionError: every rank wrote a newer record format.
    """
    say = progress or (lambda _words, _part: None)
    pending = sorted(sources, key=lambda s: s.stream, reverse=True)
    streams: list[RankStream] = []
    count = len(pending)
    decoded = {} if decoded is None else decoded
    newer: list[TraceVersionError] = []
    while pending:
        say("reading records", len(streams) / count)
        streams.append(_read(pending.pop(), decoded, newer))  # whose bytes may go
    if len(newer) == count:
        raise newer[0]
    if not any(stream.received for stream in streams):
        why = next((n for s in streams for n in s.notes), "no rank has written anything yet")
        raise TraceError(f"not one record was found: {why}")
    _refuse_mixture(streams)
    if settle is not None:
        streams = settle(streams)
    streams = [with_places(stream) for stream in streams]
    say("merging ranks", 0.0)
    vocabulary = build_vocabulary(streams)
    of_steps = StepRecords(streams, vocabulary, written)
    run = run_header(streams)
    end = end or JobEnd()
    ended = how_ended(streams, end)
    if end.killed:
        run["killed"] = [{"rank": rank, "by": name} for rank, name in end.killed.items()]
    if ended is not None:
        run["ended"] = ended
    begins = [s.enters["time_ns"].min() + s.clock_offset_ns for s in streams if len(s.enters)]
    starts = [int(begin) for begin in begins] + ([] if began_ns is None else [began_ns])
    return Document(
        began_ns=min(starts, default=0),
        run=run,
        completeness=completeness(streams, of_steps.orphans, has_ended=ended is not None),
        streams=streams,
        records=of_steps,
        vocabulary=vocabulary,
        notes=step_notes(streams),
    )


def _read(source: StreamBytes, decoded: Decoded, newer: list[TraceVersionError]) -> RankStream:
    """Return the records of a stream; none of one of a newer format, whose error is added."""
    try:
        return read_stream(source, decoded)
    except TraceVersionError as error:
        newer.append(error)
        return read_stream(replace(source, data=b"", notes=(*source.notes, str(error))))


def build(
    out: Path,
    *,
    keep_spool: bool = False,
    tree_mode: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Turn the replicas (or moved segments) in `out`/spool into step files, tree.json and
    trace.json.

    The replicas and the index of freed steps are removed afterwards, unless they are to be kept, or
    something is missing (full tensors too) or was set aside: then `rankscope recover` can join them
    with the spools that hosts still hold. TraceError: no records were found; FolderError: the trace
    cannot be written.
    """
    tree = _tree_to_finish(out)
    document = assemble(
        find_streams([out]),
        settle=lambda streams: [finish_kept(out, stream) for stream in told_of_lost(streams, tree)],
        written=tree.written,
        progress=progress,
        began_ns=tree.began_ns,
        end=job_end([out]),
    )
    write_trace(document, out, tree=tree, tree_mode=tree_mode, progress=progress)
    tree.close()
    (out / REPLICA_FOLDER / STATUS_NAME).unlink(missing_ok=True)
    has_all = (
        document.took_all
        and not document.completeness["missing"]
        and all(
            rank["committed"] == rank["received"] and not rank["notes"]
            for rank in document.completeness["ranks"]
        )
    )
    place = Place(reach=Reach.DURABLE if has_all else Reach.BEGUN)
    if not keep_spool and may_remove(Removable.REPLICA, place):
        shutil.rmtree(out / REPLICA_FOLDER, ignore_errors=True)
    if not (out / REPLICA_FOLDER).exists() or not tree.written:
        tree.forget_index()  # beside records it says which steps these lack


def _tree_to_finish(out: Path) -> GrowingTree:
    """Return the tree so far, once nobody else writes it; FolderError: somebody does for long."""
    if not (out / STEPS_FOLDER / INDEX_NAME).exists():
        return GrowingTree(out)
    deadline = time.monotonic() + _MOST_WAIT_S
    while True:
        with os_errors_as(FolderError, f"{out}: cannot be written"):
            tree = GrowingTree.to_write(out)
        if tree is not None:
            return tree
        if time.monotonic() > deadline:
            raise FolderError(
                f"{out}: another process writes its steps; end it, and run "
                f"{command_text('recover', out, out='NEW')}"
            )
        time.sleep(_LOOK_S)


def recover(folders: Sequence[Path], out: Path, *, progress: Progress | None = None) -> Document:
    """Build the trace of all streams found in trace and spool folders, into the new folder `out`.
    FolderError: a folder does not exist, holds no records, or `out` is not empty; TraceError: the
    records say nothing, or belong to different runs."""
    sources = find_streams(folders)
    if not sources:
        listed = ", ".join(map(str, folders))
        is_written = any((folder / TRACE_NAME).exists() for folder in folders)
        hint = "give a trace folder with spool/ inside, or a host's spool folder"
        raise FolderError(
            f"{listed}: no records; {'the tree is already written' if is_written else hint}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FolderError(f"{out}: exists and is not an empty folder; give a new one with --out")

    tree = grown_in(folders)

    def settle(streams: list[RankStream]) -> list[RankStream]:
        with os_errors_as(FolderError, f"{out}: cannot be made"):
            out.mkdir(mode=0o700, parents=True, exist_ok=True)
            lives = {(s.stream.rank, s.origin): s.stream for s in streams}
            carry_chunks(folders, out, lives)
            carry_stalls(folders, out)
            faults = tree.carry_to(out)
        named = tuple(f"written while the job ran, and damaged since: {fault}" for fault in faults)
        streams = [replace(s, notes=(*s.notes, *named[:_MOST_FAULTS])) for s in streams]
        return [finish_kept(out, s) for s in told_of_lost(streams, tree)]

    document = assemble(
        sources,
        settle=settle,
        written=tree.written,
        progress=progress,
        began_ns=tree.began_ns,
        end=job_end(folders),
    )
    write_trace(document, out, tree=tree, progress=progress)
    tree.forget_index()
    return document


def told_of_lost(streams: Iterable[RankStream], tree: GrowingTree) -> list[RankStream]:
    """Return streams with a note where records are gone and no step of the tree has them."""
    lives = {name.incarnation for name in tree.written}
    return [
        stream
        if not stream.hidden_bytes or stream.stream.incarnation in lives
        else replace(stream, notes=(*stream.notes, _lost(stream.hidden_bytes)))
        for stream in streams
    ]


def _lost(hidden_bytes: int) -> str:
    return (
        f"{hidden_bytes} bytes of its records were freed when their steps were written into the "
        f"tree, and {STEPS_FOLDER}/{INDEX_NAME}, which names these steps, is not there"
    )


def _refuse_mixture(streams: Iterable[RankStream]) -> None:
    run_ids = sorted({str(s.identity.get("run_id", "")) for s in streams if s.identity})
    if len(run_ids) > 1:
        raise TraceError(
            f"these are records of {len(run_ids)} different runs, recover one at a time: "
            f"{', '.join(run_ids)}"
        )


TREE_LIMIT_BYTES: Final = 100 << 20
"""A larger tree.json is not written unless it is asked for."""


def write_trace(
    document: Document,
    out: Path,
    *,
    tree: GrowingTree | None = None,
    tree_mode: str | None = None,
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
    tree_mode = tree_mode or str(document.run["settings"].get("tree", "auto"))
    say = progress or (lambda _words, _part: None)
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
        limit = None if tree_mode == "always" else TREE_LIMIT_BYTES
        if tree_mode == "never":
            absent = f"it was not asked for (--rs-tree never); {_command(out)}"
        elif limit is not None and _is_larger(entries, int(document.run["world_size"]), 2 * limit):
            absent = _too_large(out, limit)
        else:
            absent = _write_tree(trace, out, limit, say)
        if absent:  # of an earlier writing
            (out / TREE_NAME).unlink(missing_ok=True)
        storage |= {"no_tree": absent} if absent else {"tree": TREE_NAME}
        storage |= {"tensors": TENSOR_FOLDER} if document.tensors else {}
        content = {"format": TRACE_FORMAT, **head, "storage": storage, "began_ns": began_ns, **body}
        with replacing(out / TRACE_NAME) as file:
            file.write("".join(json_text(content)).encode(errors="backslashreplace"))
        say("writing the tree", 1.0)
    except OSError as error:
        raise FolderError(
            f"{out}: the trace cannot be written ({error.strerror}); the ranks' records are still "
            f"in {out / 'spool'}: make room and run {command_text('recover', out, out='NEW')}"
        ) from error


def _by_kind(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    return {
        "setup": [entry for entry in entries if "mode" not in entry],
        "steps": sorted((entry for entry in entries if "mode" in entry), key=step_name),
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
        table: sum(end - begin for begin, end in (entry["rows"][table] for entry in entries))
        for table in ("nodes", "values")
    }
    return bool(250 * rows["nodes"] + 650 * rows["values"] // ranks > limit)


class _TooLargeError(Exception):
    pass
