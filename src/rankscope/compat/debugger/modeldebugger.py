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
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from rankscope.agent.hooks.modules import wrapper_of
from rankscope.agent.join import who_am_i
from rankscope.agent.session import Session
from rankscope.capture.torch_internals.compiling import is_compiled_in_place, is_compiling
from rankscope.compat.debugger.trace import DebuggerBlock
from rankscope.compat.debugger.treefiles import Files

_TORCH: Final = nn.Module.__call__.__code__.co_filename
_CALLERS: Final = frozenset({"_call_impl", "inner", "_slow_forward"})
_LIKE_A_METHOD: Final = (*functools.WRAPPER_ASSIGNMENTS, "__code__")  # torch.export reads it
_MISSING: Final = object()
_NOTHING: Final = contextlib.nullcontext()
_attaching = threading.RLock()
_Forward = Callable[..., Any]


class _DirectCalls:
    """Stands in front of `forward` of a model and all modules in it; a session is told of calls."""

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
        self.blocks = tuple(each for each in self.blocks if each is not block)
        if self.blocks:
            return
        held = vars(self.module)
        if held.get("forward") is self:
            if self.before is _MISSING:
                del held["forward"]
            else:
                held["forward"] = self.before
        for reference, plain in self._copies:
            made = reference()
            if made is not None and vars(made).get("forward") is plain:
                del vars(made)["forward"]
        self._copies.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> object:
        if self.before is not _MISSING:
            return copy.deepcopy(self.before, memo)
        made = copy.deepcopy(self.module, memo)
        plain = made.forward
        if made is not self.module and not isinstance(plain, _Front):
            self._copies.append((weakref.ref(made), plain))
        return plain

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if self.before is not _MISSING:
            return operator.getitem, ((self.before,), 0)
        return getattr, (self.module, "forward")


def _forget() -> None:
    global _attaching
    _attaching = threading.RLock()


os.register_at_fork(after_in_child=_forget)


def _uncompiled(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yield a module and those below it, but for what a compiler has looked at: any attribute would
    make it look again."""
    wrapper = wrapper_of(module)
    is_compiled = is_compiled_in_place(module) or (wrapper is not None and wrapper[1] == "compile")
    if id(module) in seen or is_compiled or isinstance(module, torch.jit.ScriptModule):
        return
    seen.add(id(module))
    yield module
    for child in module.children():
        yield from _uncompiled(child, seen)


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
