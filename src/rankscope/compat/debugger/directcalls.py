"""Calls of `module.forward` that go past `module(...)`, and gradients off below the model.

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
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

from rankscope.agent.hooks.wrappers import wrapper_of
from rankscope.agent.session import Session
from rankscope.capture.torch_internals.compiling import is_compiled_in_place, is_compiling

_TORCH: Final = nn.Module.__call__.__code__.co_filename
_CALLERS: Final = frozenset({"_call_impl", "inner", "_slow_forward"})
_LIKE_A_METHOD: Final = (*functools.WRAPPER_ASSIGNMENTS, "__code__")  # torch.export reads it
_MISSING: Final = object()
_NOTHING: Final = contextlib.nullcontext()
_attaching = threading.RLock()
_Forward = Callable[..., Any]


class DirectCalls:
    """Stands in front of `forward` of a model and all modules in it; a session is told of calls."""

    def __init__(self, model: nn.Module, *, no_grad: bool) -> None:
        self.model = model
        self.no_grad = no_grad
        self.session: Session | None = None

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Put the attributes on; in the end take them off again, and leave what was there before,
        or what the program has put there since."""
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
        self.blocks: tuple[DirectCalls, ...] = ()
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

    def leave(self, block: DirectCalls) -> None:
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
