"""The one trace behind all debugger blocks that are open in a process.

The first block begins it and the last one ends it. A block that ends before looks at what has been
recorded until then; the calls of others go on meanwhile. The calls of a block's model are told by
the model's path in the trace and by the time at which the block began.

A layer is a call of a module with a number for a name (`layers.3`) in which a module below it was
called. Once another layer of its list has come to that, a layer that is not the first is between
the two for good: its calls are left out of the tree, and what was kept in it alone is let go.
`treefiles` leaves the same calls out of the files, from the whole tree; none that stays there is
let go here. There, calls of modules that the model does not hold are passed over and those of held
ones in them count as made outside; here, what a call of another root makes is and makes no layer.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
from torch import nn

from rankscope.agent.activation import current_session, hold
from rankscope.agent.guard import attempt, say, text_of
from rankscope.agent.hooks.calls import CallOptions
from rankscope.agent.recorder import Recorder
from rankscope.agent.session import Session
from rankscope.block import OwnParts, begin_rank_block
from rankscope.capture.pytree import plain_text_of, without_addresses
from rankscope.compat.debugger.kept import DebuggerStore
from rankscope.compat.debugger.treefiles import Files, write_rank
from rankscope.compat.debugger.values import LocalValues
from rankscope.record.phases import Phase
from rankscope.spool.recordcolumns import Records
from rankscope.spool.recordformat import NO_SEQUENCE, RecordKind, StepEvent
from rankscope.tree.assembly.interning import join_path, name_roots, roots_of
from rankscope.tree.assembly.rankstreams import RankStream, StreamBytes
from rankscope.tree.build import assemble
from rankscope.tree.growingtree import trace_of
from rankscope.tree.views import Node

# ---- layers between the first and the last -------------------------------------------------------


_NUMBERED: Final = re.compile(r"(.*)\.(\d+)")
_LOOSE: Final = ".@"
"""Begins the path of a module that no root holds."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call of this step's forwards; `top` is the root of the outermost call, `references` are
    those of its values. A layer has a call of a module below in it."""

    sequence: int
    path: str
    """Of the module, a dot before every name; "" where the outermost call's root does not hold
    it."""
    parent: _Call | None
    top: int
    inside: list[_Call] = field(default_factory=list)
    references: list[int] = field(default_factory=list)
    layers: dict[str, list[_Call]] = field(default_factory=dict)
    """Of each list of layers called in it the first and the latest."""
    is_layer: bool = False


class LayerWatch:
    """Says what layers between others kept, and nothing else did.

    Only while one thread calls modules: what another has just found to be equal to something kept
    must not be let go before its value is written down.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._paths = recorder.modules = {}
        self._lets_go = True
        self._threads: set[int] = set()
        self._calls: dict[int, _Call] = {}
        self._uses = Counter[int]()
        self._passed: list[_Call] = []
        """Layers between others, not let go of yet."""
        self._dropped: list[int] = []
        recorder.observe(self._note_forwards)

    def let_go_no_more(self) -> None:
        """Keep from now on what any layer keeps."""
        self._lets_go = False

    def unneeded(self) -> list[int]:
        """Return the references that only layers between others have, each once.

        Asked by the store while no other thread uses it: a thread that has found something equal to
        what is kept has begun a call before, so that call is among those looked at here.
        """
        if not self._recorder.hand_on() or not self._lets_go or len(self._threads) > 1:
            return []
        passed, self._passed = self._passed, []
        return [reference for call in passed for reference in self._drop(call)]

    def without_dropped(self, stream: RankStream) -> RankStream:
        """Return the records without the calls of layers that were let go, and their values: of a
        deep model most of the work would go into them."""
        self.unneeded()
        dropped = np.array(self._dropped, np.uint64)
        if not len(dropped):
            return stream
        is_kept = ~np.isin(stream.values["sequence"], dropped)
        return replace(
            stream,
            enters=stream.enters[~np.isin(stream.enters["sequence"], dropped)],
            exits=stream.exits[~np.isin(stream.exits["sequence"], dropped)],
            values=stream.values.chosen(is_kept),
        )

    def _note_forwards(self, batch: Records) -> None:
        if not self._lets_go:
            return
        _, calls = batch.columns(RecordKind.ENTER)
        self._threads.update(calls["thread"].tolist())
        calls = calls[calls["phase"] == Phase.FORWARD]
        columns = (calls[name].tolist() for name in ("sequence", "module", "root", "parent"))
        for sequence, module, root, parent in zip(*columns):
            path = f".{self._paths.get(module, '')}"
            around = self._calls.get(parent)
            if around is not None:
                self._place(sequence, around, root, path)
            elif parent == NO_SEQUENCE:
                self._calls[sequence] = _Call(sequence, path, None, root)
        _, values = batch.values()
        values = values.chosen(values["reference"] > 0)
        for sequence, reference in zip(values["sequence"].tolist(), values["reference"].tolist()):
            self._uses[reference] += 1
            if (call := self._calls.get(sequence)) is not None:
                call.references.append(reference)
        _, marks = batch.columns(RecordKind.STEP)
        if (marks["event"] == StepEvent.END).any():
            self._calls.clear()

    def _place(self, sequence: int, around: _Call, root: int, path: str) -> None:
        is_held = root == around.top and not path.startswith(_LOOSE)
        call = _Call(sequence, path if is_held else "", around, around.top)
        self._calls[sequence] = call
        around.inside.append(call)
        if around.is_layer or around.parent is None:
            return
        match = _NUMBERED.fullmatch(around.path)
        if match and f".{match[2]}." in call.path:
            around.is_layer = True
            layers = around.parent.layers.setdefault(match[1], [])
            if len(layers) > 1:
                self._passed.append(layers.pop())
            layers.append(around)

    def _drop(self, call: _Call) -> Iterator[int]:
        """Let go of a layer and all in it; yield the references that nothing else has."""
        self._dropped.append(call.sequence)
        for reference in call.references:
            self._uses[reference] -= 1
            if not self._uses[reference]:
                del self._uses[reference]
                yield reference
        for inner in call.inside:
            yield from self._drop(inner)
        call.inside, call.references = [], []


# ---- the trace of all blocks ---------------------------------------------------------------------


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
        """Join the trace, or begin it; return the session, for calls that torch shows no hook.
        Raises ValueError where the folder cannot be written."""
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
            holds = self._holds[module] = any(inner is self.model for inner in module.modules())
        if not holds:
            return None
        self._begun += 1
        return self._forwards is None or self._begun <= self._forwards

    def write(self, shared: _SharedTrace, source: StreamBytes) -> None:
        """Write what was recorded of the model since the block began."""
        assert self._folder is not None  # else it is in no trace
        streams: list[RankStream] = []

        def settle(parts: list[RankStream]) -> list[RankStream]:
            streams.extend(parts)
            if shared.layers is None:
                return parts
            return [shared.layers.without_dropped(stream) for stream in parts]

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
        others only where a block asks for it, or may see a root where another sees a module."""
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
        blocks = [other_block for other_block in self._blocks if other_block is not block]
        read = self._traced.look if blocks else self._traced.end
        if blocks:
            self._blocks = blocks
        elif _shared is self:
            _shared = None
        try:
            error = attempt(lambda: block.write(self, read()))
            if error is not None:
                say(f"the debugger's files were not written: {text_of(error)}")
        finally:
            if not blocks:
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
        temporary = Path(tempfile.mkdtemp(prefix=_NEW, dir=folder))
    except OSError as error:
        raise ValueError(f"debug_path={folder} cannot be written: {error.strerror}") from error
    begun = _SharedTrace(block, temporary)
    if not begun.is_alive:
        shutil.rmtree(temporary, ignore_errors=True)
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
