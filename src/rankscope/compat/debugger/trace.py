"""The one trace behind all debugger blocks that are open in a process.

The first block begins it and the last one ends it. A block that ends before looks at what has been
recorded until then; the calls of others go on meanwhile. Which calls are those of a block's model
is told by the model's path in the trace and by the time at which the block began.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import nn

from rankscope.agent.activation import current_session, hold
from rankscope.agent.guard import Guard, say, text_of
from rankscope.agent.hooks.callvalues import CallOptions
from rankscope.agent.session import Session
from rankscope.assembly.interning import roots_of
from rankscope.assembly.rankstreams import RankStream, StreamBytes, read_stream
from rankscope.assembly.rootnames import join_path, name_roots
from rankscope.assembly.skeleton import forward_calls, without_calls
from rankscope.block import RankBlock, begin_rank_block
from rankscope.capture.describe import dtype_name
from rankscope.capture.forms import plain_text_of, without_addresses
from rankscope.compat.debugger.calltree import pruned_calls
from rankscope.compat.debugger.layers import LayerRecorder
from rankscope.compat.debugger.text import Arena, Glimpse, Squares, glimpse_of
from rankscope.compat.debugger.values import UnwrittenTensor, kernel_squares, laid_out
from rankscope.spool.writer import SpoolWriter
from rankscope.tree.build import assemble
from rankscope.tree.finishedtrace import trace_of
from rankscope.tree.views import Node, Trace

__all__ = ["DebuggerBlock", "Recorded"]

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
_running: _Running | None = None
_open: list[DebuggerBlock] = []
"""Blocks that are in it."""
_quiet = 0
"""Open blocks for whose ranks no repr may run."""


class Recorded:
    """What was recorded until a block ended."""

    def __init__(
        self,
        trace: Trace,
        held: Mapping[int, UnwrittenTensor],
        is_root: Callable[[Node], bool],
        *,
        has_files: bool,
    ) -> None:
        self.trace = trace
        self.held = held
        """Its tensors by reference, but for those in its files."""
        self.has_files = has_files
        """There may be such."""
        self.is_root = is_root
        """True for a call of the block's model, in the block."""


class DebuggerBlock:
    """One block's part in the trace; used by one thread."""

    def __init__(
        self,
        model: nn.Module,
        folder: Path | None,
        *,
        runs_reprs: bool,
        prunes: bool,
        all_outputs: bool,
        as_text: bool,
        forwards: int | None,
    ) -> None:
        """Prepare; nothing is made before `begin`.

        Args:
            model: whose calls are wanted.
            folder: may hold the trace while it lasts; None for a rank that writes none.
            runs_reprs: code of the program may run to say what an argument is.
            prunes: of a list of layers the first and the last are all that is looked at.
            all_outputs: what modules that hold others hand out is looked at too.
            as_text: of tensors their text and statistics are all that is wanted.
            forwards: how many of the model's are looked at; None for all.
        """
        self._model = model
        self._forwards = forwards
        self._begun = 0
        """Forwards of the model, or of what holds it, since the block began."""
        self._holds = weakref.WeakKeyDictionary[nn.Module, bool]()
        """Of modules that were called: the model is one of theirs."""
        self.as_text = as_text
        self._folder = folder
        self._runs_reprs = runs_reprs
        self.prunes = prunes
        self.all_outputs = all_outputs
        self._pid = os.getpid()
        self._began_ns = 0
        self._in: _Running | None = None

    def begin(self) -> Session | None:
        """Join the trace, or begin it; return what is to be told of calls that torch tells no hook
        of, None for nothing.
        """
        global _quiet
        with _is_ours:
            _quiet += not self._runs_reprs
            if self._folder is None:
                return None
            self._in = _joined(self._model, self._folder, self)
            if self._in is not None:
                _open.append(self)
            self._began_ns = time.monotonic_ns()
            return current_session() if self._in is None else self._in.session

    def end(self, write: Callable[[Recorded], None]) -> None:
        """Leave the trace. What fails is said, not raised.

        Args:
            write: told what was recorded; not called where there is nothing.
        """
        global _quiet
        if self._pid != os.getpid():
            return  # a forked child leaves the block: the files are its parent's
        with _is_ours:
            _quiet -= not self._runs_reprs
            running, self._in = self._in, None
            if running is not None:
                _open.remove(self)
                running.leave(lambda source: write(self._recorded(running, source)))
                self._say_left_out()

    def counts(self, module: nn.Module) -> bool | None:
        """Count a call of a module that begins outside all others. Return whether it is looked at;
        None where the model is not in it.
        """
        holds = self._holds.get(module)
        if holds is None:
            holds = self._holds[module] = any(each is self._model for each in module.modules())
        if not holds:
            return None
        self._begun += 1
        return self._forwards is None or self._begun <= self._forwards

    def _say_left_out(self) -> None:
        if self._forwards is not None and self._begun > self._forwards:
            say(
                f"the module debugger wrote the first {self._forwards} of {self._begun} forwards "
                f"of {type(self._model).__name__}: forwards=None writes all"
            )

    def _recorded(self, running: _Running, source: StreamBytes) -> Recorded:
        is_alone = not running.is_shared
        document = assemble([source], settle=_pruned if self.prunes and is_alone else None)
        trace = trace_of(document, running.folder)
        held = running.held()
        if is_alone:
            return Recorded(trace, held, lambda node: not node.path, has_files=running.has_files)
        stream = read_stream(source)
        root, below = running.session.place_of(self._model)
        path = join_path(name_roots([roots_of(stream.definitions)])[0].get(root, ""), below)
        began_us = (self._began_ns + stream.clock_offset_ns - document.began_ns) / 1000
        return Recorded(
            trace,
            held,
            lambda node: root > 0 and node.path == path and node.time.start_us >= began_us,
            has_files=running.has_files,
        )


class _Outputs:
    """Of which modules the outputs are recorded: of those that hold no others, where every block
    asks for these alone."""

    def __init__(self, *, are_all_wanted: bool) -> None:
        self.are_all_wanted = are_all_wanted

    def is_wanted(self, module: nn.Module, is_root: bool) -> bool:
        """True where the output of a call that begins is to be recorded."""
        if is_root or self.are_all_wanted:
            return True
        return all(child is None for child in module._modules.values())


class _Running:
    """A trace that lasts as long as any block does."""

    def __init__(
        self, folder: Path, block: RankBlock, recorder: LayerRecorder, outputs: _Outputs
    ) -> None:
        self.folder = folder
        """Lasts as long; holds tensors where they do not fit elsewhere."""
        self._block = block
        self._recorder = recorder
        self._outputs = outputs
        self.session = block.session
        self.blocks = 1
        self.is_shared = False
        """There was ever more than one block in it."""

    @property
    def is_alive(self) -> bool:
        """True where it is what this process traces into."""
        return current_session() is self.session

    @property
    def has_files(self) -> bool:
        """Tensors are in files."""
        return self._block.has_chunks

    def held(self) -> dict[int, UnwrittenTensor]:
        """Return the tensors by reference, but for those in files."""
        found = {
            reference: UnwrittenTensor(dtype=described.dtype, shape=described.shape, data=data)
            for reference, (described, data) in self._block.held().items()
        }
        for reference, glance in self._block.made().items():
            seen = glance.made
            assert isinstance(seen, Glimpse)  # `_look` made it
            found[reference] = UnwrittenTensor(
                dtype=dtype_name(seen.dtype), shape=seen.shape, data=None,
                glimpse=seen, origin=(glance.checksum, seen.dtype, seen.shape),
            )  # fmt: skip
        return found

    def join(self, model: nn.Module, wanted: DebuggerBlock) -> None:
        """Take one more model."""
        self.blocks += 1
        self.is_shared = True
        if not wanted.as_text:
            self._block.keep_bytes()
        self._recorder.let_go(None)
        self._outputs.are_all_wanted = True
        Guard(lambda error: say(f"the debugger: {text_of(error)}")).hook(self.session.prefer)(model)

    def leave(self, write: Callable[[StreamBytes], None]) -> None:
        """Have a block written that ends; the last one ends the trace."""
        global _running
        self.blocks -= 1
        if self.blocks:
            _unwritten.hook(lambda: write(self._block.look()))()
            return
        if _running is self:
            _running = None
        try:
            _unwritten.hook(lambda: write(self._block.end()))()
        finally:
            self._block.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def _forget() -> None:
    """Leave a forked child without its parent's trace and blocks, and without a lock that another
    thread held.
    """
    global _running, _quiet, _is_ours
    _is_ours = threading.RLock()
    if _running is not None and _running.is_alive:
        hold(None)
    _running, _quiet = None, 0
    _open.clear()


os.register_at_fork(after_in_child=_forget)
_unwritten = Guard(lambda error: say(f"the debugger's files were not written: {text_of(error)}"))


def _joined(model: nn.Module, folder: Path, wanted: DebuggerBlock) -> _Running | None:
    """Return the trace a new block is in, None where there can be none, and why was said."""
    global _running
    if _running is not None and _running.is_alive:
        _running.join(model, wanted)
        return _running
    if current_session() is not None:
        say(_TRACED)
        return None
    try:
        own = Path(tempfile.mkdtemp(prefix=_NEW, dir=folder))
    except OSError as error:
        raise ValueError(f"debug_path={folder} cannot be written: {error.strerror}") from error
    outputs = _Outputs(are_all_wanted=wanted.all_outputs)
    options = CallOptions(
        say_leaf=_text_of_argument,
        is_output_wanted=outputs.is_wanted,
        is_forward_wanted=_is_forward_wanted,
    )
    look = None
    if wanted.as_text:
        look = functools.partial(_look, squares=kernel_squares(), arena=Arena())
    recorders: list[LayerRecorder] = []

    def recorder(writer: SpoolWriter) -> LayerRecorder:
        recorders.append(LayerRecorder(writer))
        return recorders[-1]

    block = begin_rank_block(model, {**_SETTINGS, "out": own}, options, recorder, look)
    if block is None:
        shutil.rmtree(own, ignore_errors=True)
        return None
    if wanted.prunes:
        recorders[-1].let_go(block.release)
    _running = _Running(own, block, recorders[-1], outputs)
    return _running


def _look(
    tensor: torch.Tensor, stride: tuple[int, ...], squares: Squares | None, arena: Arena
) -> Glimpse:
    """Return all that is written of a tensor as text."""
    return glimpse_of(laid_out(tensor, stride), squares, arena=arena)


def _is_forward_wanted(module: nn.Module) -> bool:
    """True where a block looks at a call that begins, or none holds its model in that."""
    counted = [block.counts(module) for block in [*_open]]
    return True in counted or False not in counted


def _pruned(streams: list[RankStream]) -> list[RankStream]:
    """Leave out what no file will show: of a deep model most of the work would go into it."""
    return [
        without_calls(stream, [c for top in forward_calls(stream) for c in pruned_calls(top)])
        for stream in streams
    ]


def _text_of_argument(value: object) -> str:
    """Return the repr of an argument, as transformers writes it; its class where that raises, or
    may not be asked for.
    """
    if _quiet:
        return plain_text_of(value)
    texts: list[str] = []
    guard = Guard(lambda _error: texts.append(plain_text_of(value)))
    guard.hook(lambda: texts.append(without_addresses(repr(value))))()
    return texts[0] if texts else plain_text_of(value)
