"""`model_addition_debugger_context`: the files of transformers' module debugger, from a trace.

    with model_addition_debugger_context(model, debug_path="trace"):
        model(**inputs)                    # or model.forward(**inputs)

The block is traced as `rankscope.trace` would, every rank for itself, full tensors kept; at its end
`treefiles` writes the files from that trace, which is removed with the last open block.
docs/compat.md says what is the same as in transformers 5.23 and what is not.

torch runs no hook for `model.forward(x)`, which is how the debugger of transformers is used in its
own documentation. So for the length of a block every module has an instance attribute `forward` in
front of its own; a call that comes from torch's `__call__` goes straight through. Blocks that share
a module share what stands in front of it, and may end in any order.

One trace is behind all blocks that are open in a process: the first begins it and the last ends it.
A block that ends before looks at what has been recorded until then; the calls of others go on
meanwhile. The calls of a block's model are told by the model's path in the trace and by the time at
which the block began.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import operator
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from rankscope.agent.activation import current_session, hold
from rankscope.agent.guard import attempt, say, text_of
from rankscope.agent.hooks.calls import CallOptions
from rankscope.agent.hooks.modules import wrapper_of
from rankscope.agent.join import who_am_i
from rankscope.agent.recorder import Recorder
from rankscope.agent.session import Session
from rankscope.block import OwnParts, begin_rank_block
from rankscope.capture.pytree import plain_text_of, without_addresses
from rankscope.capture.torch_internals.compiling import is_compiled_in_place, is_compiling
from rankscope.compat.debugger.kept import DebuggerStore, LayerWatch
from rankscope.compat.debugger.treefiles import Files, write_rank
from rankscope.compat.debugger.values import LocalValues
from rankscope.tree.assembly.interning import join_path, name_roots, roots_of
from rankscope.tree.assembly.rankstreams import RankStream, StreamBytes
from rankscope.tree.build import assemble
from rankscope.tree.growingtree import trace_of
from rankscope.tree.views import Node

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
    """Leave a forked child without its parent's trace and blocks, and with locks nobody holds."""
    global _shared, _quiet, _is_ours, _attaching
    _is_ours, _attaching = threading.RLock(), threading.RLock()
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


# ---- the forwards of a model ---------------------------------------------------------------------

_TORCH: Final = nn.Module.__call__.__code__.co_filename
_CALLERS: Final = frozenset({"_call_impl", "inner", "_slow_forward"})
_LIKE_A_METHOD: Final = (*functools.WRAPPER_ASSIGNMENTS, "__code__")  # torch.export reads it
_MISSING: Final = object()
_NOTHING: Final = contextlib.nullcontext()
_attaching = threading.RLock()
_Forward = Callable[..., Any]


class _DirectCalls:
    """Stands in front of `forward` of a model and all modules in it; a session hears every call."""

    def __init__(self, model: nn.Module, *, no_grad: bool) -> None:
        self.model = model
        self.no_grad = no_grad
        self.session: Session | None = None

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Put the attributes on; at the end put back what was there, unless the program put others
        there."""
        fronts: list[_Front] = []
        with _attaching:
            for module in _uncompiled(self.model, set()):
                front = vars(module).get("forward")
                if not (isinstance(front, _Front) and front.module is module):
                    front = vars(module)["forward"] = _Front(module)
                front.blocks = (*front.blocks, self)
                fronts.append(front)
        try:
            yield
        finally:
            with _attaching:
                for front in fronts:
                    front.leave(self)


class _Front:
    """What `module.forward` is inside a block. A copy of the module, or a file it is saved to, has
    the copy's own `forward`: to read the file takes no rankscope."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: object = vars(module).get("forward", _MISSING)
        self.forward: _Forward = module.forward
        self.blocks: tuple[_DirectCalls, ...] = ()
        self._copies: list[tuple[weakref.ref[nn.Module], object]] = []
        functools.update_wrapper(self, self.forward, _LIKE_A_METHOD, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.forward
        if is_compiling():
            return forward(*args, **kwargs)
        session, module, is_without = None, self.module, False
        for block in self.blocks:
            session = session or block.session
            is_without = is_without or (block.no_grad and block.model is not module)
        is_told = session is None or _is_from_torch()
        with torch.no_grad() if is_without else _NOTHING:
            if is_told or session is None:
                return forward(*args, **kwargs)
            return session.call(module, args, kwargs, forward)

    def leave(self, block: _DirectCalls) -> None:
        self.blocks = tuple(other_block for other_block in self.blocks if other_block is not block)
        if self.blocks:
            return
        attributes = vars(self.module)
        if attributes.get("forward") is self:
            if self.before is _MISSING:
                del attributes["forward"]
            else:
                attributes["forward"] = self.before
        for reference, plain in self._copies:
            front = reference()
            if front is not None and vars(front).get("forward") is plain:
                del vars(front)["forward"]
        self._copies.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> object:
        if self.before is not _MISSING:
            return copy.deepcopy(self.before, memo)
        duplicate = copy.deepcopy(self.module, memo)
        plain = duplicate.forward
        if duplicate is not self.module and not isinstance(plain, _Front):
            self._copies.append((weakref.ref(duplicate), plain))
        return plain

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if self.before is not _MISSING:
            return operator.getitem, ((self.before,), 0)
        return getattr, (self.module, "forward")


def _uncompiled(module: nn.Module, visited: set[int]) -> Iterator[nn.Module]:
    """Yield a module and those below it, but for what a compiler has looked at: any attribute would
    make it look again."""
    wrapper = wrapper_of(module)
    is_compiled = is_compiled_in_place(module) or (wrapper is not None and wrapper[1] == "compile")
    if id(module) in visited or is_compiled or isinstance(module, torch.jit.ScriptModule):
        return
    visited.add(id(module))
    yield module
    for child in module.children():
        yield from _uncompiled(child, visited)


def _is_from_torch() -> bool:
    """True where torch's `Module.__call__` called the function that asks."""
    code = sys._getframe(2).f_code
    return code.co_name in _CALLERS and code.co_filename == _TORCH


Ranks = int | Iterable[int] | Literal["all"]


@contextmanager
def model_addition_debugger_context(
    model: nn.Module,
    debug_path: str | os.PathLike[str] | None = None,
    do_prune_layers: bool = True,
    use_repr: bool = True,
    no_grad: bool = True,
    ranks: Ranks = 0,
    *,
    all_outputs: bool = False,
    forwards: int | None = 100,
) -> Iterator[nn.Module]:
    """Write what goes in and comes out of every module of `model`, for each of its forwards in the
    block: `{Class}_debug_tree_FULL_TENSORS.json` and `_SUMMARY.json`.

    Args:
        model: any module; wrapped in DDP, FSDP2 or a checkpoint wrapper too.
        debug_path: folder for the files, made with its parents; default the current one.
        do_prune_layers: leave the first and the last of each list of layers.
        use_repr: write values as lines of `print`; else each tensor to a safetensors file of its
            own, which the JSON names.
        no_grad: run the forward of every module below the model under `torch.no_grad()`, on every
            rank, as transformers does; with False the block may train.
        ranks: whose files are written: 0, other ranks, or "all". Unless it is 0 the rank stands in
            every name.
        all_outputs: write the outputs of modules that hold others too.
        forwards: of how many forwards files are written, the first of the block; what is left out
            is said on stderr. None for all.

    Raises:
        ValueError: `debug_path` cannot be a folder, or `forwards` is no number of forwards.
    """
    if forwards is not None and forwards < 1:
        raise ValueError(f"forwards={forwards}: give 1 or more, or None for all")
    identity = who_am_i()
    is_wanted = _wants(ranks, identity.rank)
    folder = _folder(debug_path) if is_wanted else None
    label = "" if ranks == 0 else f"_rank{identity.rank}"
    files = Files(prunes=do_prune_layers, as_text=use_repr, all_outputs=all_outputs, label=label)

    is_alone = identity.world_size == 1 or ranks == "all"
    block = DebuggerBlock(
        model, folder, files, rank=identity.rank, runs_reprs=is_alone, forwards=forwards
    )
    direct = _DirectCalls(model, no_grad=no_grad)
    with direct.standing():
        direct.session = block.begin()
        try:
            yield model
        finally:
            direct.session = None
            block.end()


def _wants(ranks: Ranks, rank: int) -> bool:
    if isinstance(ranks, str):
        if ranks != "all":
            raise ValueError(f"ranks={ranks!r}: give a rank, several, or 'all'")
        return True
    return rank == ranks if isinstance(ranks, int) else rank in set(ranks)


def _folder(debug_path: str | os.PathLike[str] | None) -> Path:
    folder = Path(debug_path or ".").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Unexpected or existing debug_path={debug_path}.") from error
    return folder
