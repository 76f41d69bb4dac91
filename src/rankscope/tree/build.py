"""From the ranks' records to a trace: `build` in a trace folder, `recover` from any folders.

streams --read--> columns per rank --number--> tables --merge--> nodes --write--> trace.json
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rankscope.errors import FolderError, TraceError, TraceVersionError
from rankscope.run.filenames import (
    INDEX_NAME,
    REPLICA_FOLDER,
    STATUS_NAME,
    STEPS_FOLDER,
    TRACE_NAME,
    Progress,
)
from rankscope.run.files import Place, Reach, Removable, may_remove
from rankscope.run.jobend import JobEnd, carry_stalls, job_end
from rankscope.run.prepare import command_text
from rankscope.spool.definitions import Decoded
from rankscope.tree.assembly.interning import build_vocabulary
from rankscope.tree.assembly.keptchunks import carry_chunks, finish_kept, with_places
from rankscope.tree.assembly.rankstreams import RankStream, StreamBytes, read_stream
from rankscope.tree.assembly.sources import find_streams
from rankscope.tree.assembly.steprecords import StepRecords
from rankscope.tree.document import Document
from rankscope.tree.growingtree import GrowingTree, grown_in
from rankscope.tree.header import completeness, how_ended, run_header, step_notes
from rankscope.tree.step import StepName
from rankscope.tree.treewriter import write_trace

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
        end: what is known of the job's end beside the records.

    Raises:
        TraceError: there is not one record in them, or they belong to different runs.
        TraceVersionError: every rank wrote a newer record format.
    """
    say = progress or (lambda _what, _part: None)
    wanted = sorted(sources, key=lambda s: s.stream, reverse=True)
    streams: list[RankStream] = []
    count = len(wanted)
    decoded = {} if decoded is None else decoded
    newer: list[TraceVersionError] = []
    while wanted:
        say("reading records", len(streams) / count)
        streams.append(_read(wanted.pop(), decoded, newer))  # whose bytes may go
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
    known = [int(each) for each in begins] + ([] if began_ns is None else [began_ns])
    return Document(
        began_ns=min(known, default=0),
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
    wanted_tree: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Turn the replicas (or moved segments) in `out`/spool into step files, tree.json and
    trace.json.

    The replicas, and the index of what they lack, are removed afterwards, unless they are to be
    kept, or something is still missing (full tensors too) or was set aside: then `rankscope
    recover` can join them with what hosts still hold.

    Raises:
        TraceError: no records were found.
        FolderError: the trace cannot be written.
    """
    tree = _to_finish(out)
    document = assemble(
        find_streams([out]),
        settle=lambda streams: [finish_kept(out, each) for each in told_of_lost(streams, tree)],
        written=tree.written,
        progress=progress,
        began_ns=tree.began_ns,
        end=job_end([out]),
    )
    write_trace(document, out, tree=tree, wanted=wanted_tree, progress=progress)
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


def _to_finish(out: Path) -> GrowingTree:
    """Return what was written of a tree while its job ran, once nobody writes it any more;
    FolderError: somebody does for long."""
    if not (out / STEPS_FOLDER / INDEX_NAME).exists():
        return GrowingTree(out)
    deadline = time.monotonic() + _MOST_WAIT_S
    while True:
        try:
            tree = GrowingTree.to_write(out)
        except OSError as error:
            raise FolderError(f"{out}: cannot be written: {error.strerror}") from error
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

    Raises:
        FolderError: a folder does not exist, holds no records, or `out` is not empty.
        TraceError: the records say nothing, or belong to different runs.
    """
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
        try:
            out.mkdir(mode=0o700, parents=True, exist_ok=True)
            lives = {(s.stream.rank, s.origin): s.stream for s in streams}
            carry_chunks(folders, out, lives)
            carry_stalls(folders, out)
            faults = tree.carry_to(out)
        except OSError as error:
            raise FolderError(f"{out}: cannot be made: {error.strerror}") from error
        named = tuple(f"written while the job ran, and damaged since: {one}" for one in faults)
        streams = [replace(each, notes=(*each.notes, *named[:_MOST_FAULTS])) for each in streams]
        return [finish_kept(out, each) for each in told_of_lost(streams, tree)]

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
    """Return streams with a note where records of them are gone, and no step of the tree says
    which."""
    lives = {name.incarnation for name in tree.written}
    return [
        each
        if not each.hidden_bytes or each.stream.incarnation in lives
        else replace(each, notes=(*each.notes, _lost(each.hidden_bytes)))
        for each in streams
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
