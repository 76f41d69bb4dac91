"""What may be removed of a host's run folder, and when: nothing that is not somewhere else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from rankscope.companion.heldstream import HeldStream
from rankscope.errors import ChunkError, SpoolError
from rankscope.record.ranks import StreamId
from rankscope.run import folders as names
from rankscope.run.files import Place, Reach, Removable, may_remove
from rankscope.run.folders import remove_run_folder, stream_folder, streams
from rankscope.run.jobstatus import remove_stalls
from rankscope.run.processes import is_alive
from rankscope.spool.chunks.chunkfiles import chunk_folder, chunk_numbers
from rankscope.spool.recordcolumns import StreamReader
from rankscope.spool.recordformat import origin_text


def remove_run(
    run_folder: Path, is_elsewhere: Callable[[StreamId], bool], *, is_quiet: bool = False
) -> StreamId | None:
    """Remove a run folder; where it has to stay, return why, as of `kept_stream`."""
    if (undelivered := kept_stream(run_folder, is_elsewhere, is_quiet=is_quiet)) is not None:
        return undelivered
    for stream in streams(run_folder):
        shutil.rmtree(stream_folder(run_folder, stream), ignore_errors=True)
    shutil.rmtree(run_folder / names.TENSOR_FOLDER, ignore_errors=True)
    shutil.rmtree(run_folder / names.HELD_FOLDER, ignore_errors=True)
    for name in (names.STEP_TRIGGER_FOLDER, names.EVENT_FOLDER, names.ORDER_FOLDER):
        for folder in run_folder.glob(f"{name}.*"):
            shutil.rmtree(folder, ignore_errors=True)
    remove_stalls(run_folder)
    for name in names.OF_A_RUN:
        (run_folder / name).unlink(missing_ok=True)
    remove_run_folder(run_folder)
    return None


def kept_stream(
    run_folder: Path, is_elsewhere: Callable[[StreamId], bool], *, is_quiet: bool = False
) -> StreamId | None:
    """Return the first stream for which a run folder has to stay, None where it may go.

    `is_elsewhere`: true for a stream that is on another disk, with its end; `is_quiet`: no host
    asks for steps that ranks held back. SpoolError: a missing folder.
    """
    sent = streams(run_folder)
    held_folder = run_folder / names.HELD_FOLDER
    for stream in streams(held_folder) if held_folder.is_dir() else ():
        place = Place(
            reach=_reach_of_copy(run_folder, stream),
            is_asked=not is_quiet,
            has_writer=is_alive(stream_folder(held_folder, stream)),
        )
        if not may_remove(Removable.HELD, place):
            return stream
    for stream in sent:
        reach = Reach.DURABLE if is_elsewhere(stream) else Reach.BEGUN
        place = Place(reach=reach, has_writer=is_alive(stream_folder(run_folder, stream)))
        if not may_remove(Removable.STREAM, place):
            return stream
    return None


def _reach_of_copy(run_folder: Path, stream: StreamId) -> Reach:
    try:
        copy = HeldStream(run_folder, stream)
    except SpoolError:
        return Reach.BEGUN  # by another process, or it cannot be read
    copy.close()
    return Reach.COPIED if copy.is_done else Reach.BEGUN


def is_in_tree(run_folder: Path, stream: StreamId, tree: Path) -> bool:
    """True where a finished tree has all records of a dead rank's spool, and its full tensors."""
    if is_alive(stream_folder(run_folder, stream)):
        return False
    try:
        ranks = json.loads(tree.read_bytes())["completeness"]["ranks"]
        rows = {(r["rank"], r["origin"]): r for r in ranks}
        with StreamReader(stream_folder(run_folder, stream)) as reader:
            row = rows.get((stream.rank, origin_text(reader.origin())))
            # by origin: another process may have been the same rank and life
            if row is None or int(row["received"]) < reader.committed():
                return False
        place = StreamId(rank=stream.rank, incarnation=int(row["incarnation"]))
        return {*_chunks(run_folder, stream)} <= {*_chunks(tree.parent, place)}
    except (OSError, ValueError, KeyError, TypeError, SpoolError):
        return False


def _chunks(folder: Path, stream: StreamId) -> list[int]:
    try:
        return chunk_numbers(chunk_folder(folder, stream))
    except ChunkError:
        return []
