"""`with rankscope.trace(...)`: one process, its own spool, and the tree in place when the block
ends.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import nn

from rankscope.agent.activation import arm, close, current_session, hold
from rankscope.agent.guard import attempt, say, text_of
from rankscope.agent.hooks.calls import CallOptions
from rankscope.agent.join import define_rank, settings_here, who_am_i
from rankscope.agent.recorder import Recorder
from rankscope.agent.session import OpenedSpool, Session
from rankscope.agent.values.tensorstore import Store, make_tensor_store
from rankscope.capture.kernel import prepare as prepare_kernel
from rankscope.errors import RankscopeError, SettingError, SpoolError
from rankscope.record.ranks import EndReason
from rankscope.run.folders import run_key, stream_folder
from rankscope.run.messages import progress
from rankscope.run.prepare import Collection, RunRequest, prepare_run, recover_command
from rankscope.settings import Settings, as_keywords
from rankscope.spool.recordcolumns import StreamReader
from rankscope.spool.replicas import StreamEnd, replica_path, write_end
from rankscope.spool.writer import SpoolWriter
from rankscope.tree.assembly.rankstreams import StreamBytes

_MadeT = TypeVar("_MadeT")
_TRACED_ALREADY = "not tracing this block: this process is traced already"
_UNNAMED = (
    "several ranks trace into one folder: give all of them the same out= to open it from here"
)
_MOST_LOOKS = 5
"""Most attempts to read records whose segments are moved away meanwhile."""


class Begun(NamedTuple):
    """How a block began."""

    out: Path | None
    problem: str
    """Why `out` is None."""
    end: Callable[[], object] = lambda: None
    """Ends the trace; never raises."""


def begin_block(model: nn.Module | None, keywords: Mapping[str, object]) -> Begun:
    """Trace from here on. Never raises: failures are reported on stderr."""
    begun, problem = _guarded(lambda: _begin(model, keywords))
    return begun or Begun(None, problem)


def _begin(model: nn.Module | None, keywords: Mapping[str, object]) -> Begun:
    if model is not None and not isinstance(model, nn.Module):
        raise SettingError(
            f"the first argument of trace() is a model, and this is a {type(model).__name__}; "
            "name the folder with trace(out=...)"
        )
    if current_session() is not None:
        say(_TRACED_ALREADY)
        return Begun(None, _TRACED_ALREADY)
    if who_am_i().world_size > 1:
        out = keywords.get("out")
        folder = Path(str(out)).absolute() if out else None
        arm(keywords)
        end = functools.partial(attempt, close, EndReason.CLOSED)
        return Begun(folder, "" if folder else _UNNAMED, end)
    block = RankBlock(model, _settings(keywords))
    return Begun(block.out, "", block.finish)


def _guarded(begin: Callable[[], _MadeT]) -> tuple[_MadeT | None, str]:
    """Return the result of `begin` and "", or after a failure None and its text, which is printed
    once: nothing before a block runs may be raised into the program."""
    results: list[_MadeT] = []
    error = attempt(lambda: results.append(begin()))
    if error is None:
        return next(iter(results), None), ""
    text = str(error) if isinstance(error, RankscopeError) else text_of(error)
    problem = as_keywords(f"not tracing: {text}")
    attempt(say, problem)
    return None, problem


def _settings(keywords: Mapping[str, object]) -> Settings:
    settings = settings_here({k: v for k, v in keywords.items() if v is not None})
    if settings.steps.last:
        raise SettingError("steps: last:N is for a whole job; a block has an end of its own")
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnParts:
    """Parts from a caller that takes the block's records itself, so that no tree is built."""

    options: CallOptions
    """Options for calls, beyond the settings."""
    store: Callable[[Recorder, int], Store]
    """Makes the store of full tensors from the bytes of disk that they may take."""


def begin_rank_block(
    model: nn.Module, keywords: Mapping[str, object], parts: OwnParts
) -> RankBlock | None:
    """Begin to trace this process alone; None if that failed, and the reason was printed. `model`:
    the root whose path is ""; `out` of `keywords` is of this rank alone."""
    return _guarded(lambda: RankBlock(model, _settings(keywords), parts))[0]


class RankBlock:
    """Traces this process alone, whatever other ranks there are. The trace ends by `finish`, which
    builds its tree, or by `end`, which returns its records instead."""

    def __init__(
        self, model: nn.Module | None, settings: Settings, parts: OwnParts | None = None
    ) -> None:
        prepare_kernel(say)
        with ExitStack() as undo:  # undone where anything in here fails
            identity = who_am_i()
            run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            request = RunRequest(
                run_id=run_id,
                key=run_key(f"{run_id}:{time.monotonic_ns()}"),
                collection=Collection(""),
                world_size=1,
                local_ranks=1,
                settings=settings,
                has_relay=False,
            )
            prepared = prepare_run(request)
            undo.callback(prepared.remove)
            self.out, self._run_folder = prepared.out, prepared.run_folder
            self._stream = identity.stream
            self._replica = replica_path(self.out, self._stream)
            if parts is None:
                self._replica.parent.mkdir(mode=0o700)  # others may look in
                undo.callback(shutil.rmtree, self._replica.parent, ignore_errors=True)
            self._replica_bytes = 0
            """Bytes of the spool in whole segments."""
            writer = SpoolWriter(
                stream_folder(self._run_folder, self._stream),
                limit_bytes=settings.spool_bytes,
                retire=self._take_segment,
            )
            undo.callback(writer.close)
            recorder = Recorder(writer)
            define_rank(recorder, identity, run_id, settings)
            make_store = None if parts is None else parts.store
            tensor_store = (
                make_tensor_store(settings, recorder, self.out, self._stream, 1, make_store)
                if settings.tensors
                else None
            )
            opened = OpenedSpool(
                identity=identity,
                writer=writer,
                recorder=recorder,
                make_tensor_store=lambda: tensor_store,
            )
            self._keep_spool = settings.keep_spool
            options = None if parts is None else parts.options
            self.session = Session(settings, lambda: opened, preferred_root=model, options=options)
            hold(self.session)
            undo.pop_all()
        if self.out != settings.out:
            say(prepared.announcement)

    def _take_segment(self, path: Path, offset: int) -> None:
        """Move a full segment behind the records already in the trace folder."""
        if offset != self._replica_bytes:
            return  # the one before it waits for room: the writer asks again
        self._replica.parent.mkdir(mode=0o700, exist_ok=True)
        with self._replica.open("ab") as replica, path.open("rb") as segment:
            replica.truncate(offset)  # of a try before this one, which a full disk cut short
            shutil.copyfileobj(segment, replica, 1 << 20)
        self._replica_bytes = self._replica.stat().st_size
        path.unlink()

    def look(self) -> StreamBytes:
        """Return what `end` would if it came now; errors as of `end`."""
        self.session.settle()
        for _ in range(_MOST_LOOKS - 1):
            try:
                return self._records(None)
            except SpoolError:
                continue  # a segment was moved away meanwhile
        return self._records(None)

    def end(self) -> StreamBytes:
        """End the trace and return its records. The store of its tensors stays as it is. Raises
        SpoolError if the records cannot be read, OSError if moved ones cannot be."""
        hold(None)
        try:
            self.session.close(EndReason.CLOSED)
            return self._records(EndReason.CLOSED)
        finally:
            shutil.rmtree(self._run_folder, ignore_errors=True)

    def _records(self, end: EndReason | None) -> StreamBytes:
        moved_bytes, pieces = self._replica_bytes, list[bytes]()
        if moved_bytes:
            with self._replica.open("rb") as replica:
                pieces.append(replica.read(moved_bytes))
        with StreamReader(stream_folder(self._run_folder, self._stream)) as reader:
            pieces += reader.chunks(moved_bytes)
        data = b"".join(pieces)
        return StreamBytes(
            stream=self._stream,
            data=data,
            is_verified=not moved_bytes,
            committed=None if end is None else len(data),
            end=end,
        )

    def finish(self) -> None:
        """Close the spool and build the tree; a failure is reported, and the records stay."""
        if (error := attempt(self._finish)) is not None:
            attempt(self._say_unfinished, error)

    def _finish(self) -> None:
        from rankscope.tree.build import build

        hold(None)
        self.session.close(EndReason.CLOSED)
        self._take_rest()
        with progress() as say_how_far:
            build(self.out, keep_spool=self._keep_spool, progress=say_how_far)
        shutil.rmtree(self._run_folder, ignore_errors=True)

    def _say_unfinished(self, error: Exception) -> None:
        say(
            f"the tree could not be built ({type(error).__name__}: {error}); the records are kept: "
            + recover_command(self._run_folder, self.out, out=self.out)
        )

    def _take_rest(self) -> None:
        """Append what the last segments hold, and mark the stream as ended."""
        folder = stream_folder(self._run_folder, self._stream)
        with StreamReader(folder) as reader, self._replica.open("ab") as replica:
            replica.truncate(self._replica_bytes)
            for chunk in reader.chunks(self._replica_bytes):
                replica.write(chunk)
        committed = self._replica.stat().st_size
        write_end(self._replica, StreamEnd(committed=committed, end=EndReason.CLOSED))
