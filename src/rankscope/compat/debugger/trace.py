"""The one trace behind all debugger blocks that are open in a process.

The first block begins it and the last one ends it. A block that ends before looks at what has been
recorded until then; the calls of others go on meanwhile. The calls of a block's model are told by
the model's path in the trace and by the time at which the block began.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from torch import nn

from rankscope.agent.activation import current_session, hold
from rankscope.agent.guard import attempt, say, text_of
from rankscope.agent.hooks.calls import CallOptions
from rankscope.agent.recorder import Recorder
from rankscope.agent.session import Session
from rankscope.block import OwnParts, begin_rank_block
from rankscope.capture.pytree import plain_text_of, without_addresses
from rankscope.compat.debugger.kept import DebuggerStore
from rankscope.compat.debugger.layers import LayerWatch
from rankscope.compat.debugger.treefiles import Files, write_rank
from rankscope.compat.debugger.values import LocalValues
from rankscope.tree.assembly.interning import join_path, name_roots, roots_of
from rankscope.tree.assembly.rankstreams import RankStream, StreamBytes
from rankscope.tree.build import assemble
from rankscope.tree.growingtree import trace_of
from rankscope.tree.views import Node

_log = logging.getLogger(__name__)
_SETTINGS: Final = {
    "steps": "all", "ranks": "all", "paths": "*", "phases": "forward", "digest": "none",
    "slots": "input*,output*,returned*,form:*", "tensors": "**",
    "compile": "opaque", "keep_spool": "0",
}  # fmt: skip
_NEW: Final = ".rankscope-debugger-"
_TRACED: Final = (
    "the module debugger writes no files for this block: this process is traced already "
    "(rankscope.trace, rankscope.attach or RANKSCOPE). Open the block where nothing else traces, "
    "or keep tensors in that trace (tensors='**') and take the files from it: "
    "rankscope export FOLDER --format hf"
)
_is_ours = threading.RLock()
"""Held while a block joins or leaves: never while a forward runs."""
_shared: _SharedTrace | None = None
_quiet = 0
"""Open blocks for whose ranks no repr may run."""


class DebuggerBlock:
    """One block's part in the trace; used by one thread.

    `folder` takes the files, and may hold the trace while it lasts; None for a rank that writes
    none. `runs_reprs`: code of the program may run to say what an argument is. `forwards`: how many
    of the model's (or of what holds it) are looked at; None for all.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path | None,
        files: Files,
        *,
        rank: int,
        runs_reprs: bool,
        forwards: int | None,
    ) -> None:
        self.model = model
        self.files = files
        self._folder = folder
        self._rank = rank
        self._runs_reprs = runs_reprs
        self._forwards = forwards
        self._begun = 0
        self._holds = weakref.WeakKeyDictionary[nn.Module, bool]()
        self._pid = os.getpid()
        self._began_ns = 0
        self._in: _SharedTrace | None = None

    def begin(self) -> Session | None:
        """Join the trace, or begin it; return what is to be told of calls that torch tells no hook
        of. Raises ValueError where the folder cannot be written."""
        global _quiet
        with _is_ours:
            if self._folder is not None:
                self._in = _joined(self, self._folder)
            _quiet += not self._runs_reprs
            self._began_ns = time.monotonic_ns()
            return None if self._folder is None else current_session()

    def end(self) -> None:
        """Leave the trace and write the files. What fails is said, not raised."""
        global _quiet
        if self._pid != os.getpid():
            return  # a forked child leaves the block: the files are its parent's
        with _is_ours:
            _quiet -= not self._runs_reprs
            shared, self._in = self._in, None
            if shared is not None:
                shared.leave(self)
                if self._forwards is not None and self._begun > self._forwards:
                    say(
                        f"the module debugger wrote the first {self._forwards} of {self._begun} "
                        f"forwards of {type(self.model).__name__}: forwards=None writes all"
                    )

    def counts(self, module: nn.Module) -> bool | None:
        """Count a call of a module that begins outside all others, and return whether it is looked
        at; None where the model is not in it."""
        holds = self._holds.get(module)
        if holds is None:
            holds = self._holds[module] = any(each is self.model for each in module.modules())
        if not holds:
            return None
        self._begun += 1
        return self._forwards is None or self._begun <= self._forwards

    def write(self, shared: _SharedTrace, source: StreamBytes) -> None:
        """Write what was recorded of the model since the block began."""
        assert self._folder is not None  # else it is in no trace
        streams: list[RankStream] = []

        def settle(found: list[RankStream]) -> list[RankStream]:
            streams.extend(found)
            if shared.layers is None:
                return found
            return [shared.layers.without_dropped(stream) for stream in found]

        document = assemble([source], settle=settle)
        trace = trace_of(document, shared.folder)
        find, as_text = shared.store.find, self.files.as_text
        values = LocalValues(trace, self._rank, as_text=as_text, find=find)
        is_root = None
        if shared.was_joined:
            first_ns = document.began_ns - streams[0].clock_offset_ns
            is_root = self._root_in(streams[0], shared.session, first_ns)
        names = write_rank(
            self._folder, trace.steps, values, self.files, rank=self._rank, is_root=is_root
        )
        for name in names[::2]:  # each stands before the same without values
            _log.info("Wrote model trace at %s", (self._folder / name).absolute())

    def _root_in(
        self, stream: RankStream, session: Session, first_ns: int
    ) -> Callable[[Node], bool]:
        root, below = session.place_of(self.model)
        path = join_path(name_roots([roots_of(stream.definitions)])[0].get(root, ""), below)
        began_us = (self._began_ns - first_ns) / 1000
        return lambda node: root > 0 and node.path == path and node.time.start_us >= began_us


class _SharedTrace:
    """A trace that lasts as long as any block does."""

    store: DebuggerStore
    layers: LayerWatch | None = None

    def __init__(self, block: DebuggerBlock, folder: Path) -> None:
        self.folder = folder
        self.was_joined = False
        self._blocks = [block]
        parts = OwnParts(
            options=CallOptions(
                say_leaf=_text_of_argument,
                is_output_wanted=self._is_output_wanted,
                is_forward_wanted=self._is_forward_wanted,
            ),
            store=self._make_store,
        )
        self._traced = begin_rank_block(block.model, {**_SETTINGS, "out": folder}, parts)

    @property
    def session(self) -> Session:
        assert self._traced is not None
        return self._traced.session

    @property
    def is_alive(self) -> bool:
        return self._traced is not None and current_session() is self._traced.session

    def _make_store(self, recorder: Recorder, limit_bytes: int) -> DebuggerStore:
        files = self._blocks[0].files
        self.store = DebuggerStore(
            recorder.tensor, limit_bytes, self.folder, keeps_bytes=not files.as_text
        )
        if files.prunes:
            self.layers = LayerWatch(recorder)
            self.store.unneeded = self.layers.unneeded
        return self.store

    def _is_output_wanted(self, module: nn.Module, is_root: bool) -> bool:
        """True where the output of a call that begins is to be recorded: of modules that hold
        others only where a block asks for it, or may see a root in what is none for another."""
        if is_root or self.was_joined or any(block.files.all_outputs for block in self._blocks):
            return True
        return all(child is None for child in module._modules.values())

    def _is_forward_wanted(self, module: nn.Module) -> bool:
        """True where a block looks at a call that begins, or none holds its model in that."""
        counted = [block.counts(module) for block in [*self._blocks]]
        return True in counted or False not in counted

    def join(self, block: DebuggerBlock) -> None:
        self.was_joined = True
        if not block.files.as_text:
            self.store.keep_bytes()
        if self.layers is not None:
            self.layers.let_go_no_more()
        error = attempt(self.session.prefer, block.model)
        if error is not None:
            say(f"the debugger: {text_of(error)}")
        self._blocks.append(block)

    def leave(self, block: DebuggerBlock) -> None:
        global _shared
        assert self._traced is not None
        left = [each for each in self._blocks if each is not block]
        read = self._traced.look if left else self._traced.end
        if left:
            self._blocks = left
        elif _shared is self:
            _shared = None
        try:
            error = attempt(lambda: block.write(self, read()))
            if error is not None:
                say(f"the debugger's files were not written: {text_of(error)}")
        finally:
            if not left:
                # the session knows this, and this the session: who waits for a collection of such
                # rings must not keep the program's model
                self._blocks, self._traced = [], None
                self.store.close()
                shutil.rmtree(self.folder, ignore_errors=True)


def _joined(block: DebuggerBlock, folder: Path) -> _SharedTrace | None:
    """Return the trace a new block is in; None where there can be none, and why was said."""
    global _shared
    if _shared is not None and _shared.is_alive:
        _shared.join(block)
        return _shared
    if current_session() is not None:
        say(_TRACED)
        return None
    try:
        own = Path(tempfile.mkdtemp(prefix=_NEW, dir=folder))
    except OSError as error:
        raise ValueError(f"debug_path={folder} cannot be written: {error.strerror}") from error
    begun = _SharedTrace(block, own)
    if not begun.is_alive:
        shutil.rmtree(own, ignore_errors=True)
        return None
    _shared = begun
    return begun


def _forget() -> None:
    """Leave a forked child without its parent's trace and blocks, and with a lock nobody holds."""
    global _shared, _quiet, _is_ours
    _is_ours = threading.RLock()
    if _shared is not None:
        _shared.store.close()
        if _shared.is_alive:
            hold(None)
    _shared, _quiet = None, 0


os.register_at_fork(after_in_child=_forget)


def _text_of_argument(value: object) -> str:
    """Return the repr of an argument; its class where the repr raises, or may not be asked for."""
    texts: list[str] = []
    if not _quiet:
        attempt(lambda: texts.append(without_addresses(repr(value))))
    return texts[0] if texts else plain_text_of(value)
