"""Calls of `module.forward` that go past `module(...)`, and gradients off below the model.

torch runs no hook for `model.forward(x)`, which is how the debugger of transformers is used in its
own documentation. So for the length of a block every module has an instance attribute `forward` in
front of its own; a call that comes from torch's `__call__` goes straight through.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final

import torch
from torch import nn

from rankscope.agent.session import Session
from rankscope.agent.wrappers import wrapper_of
from rankscope.capture.torch_internals.compiling import is_compiled_in_place, is_compiling

__all__ = ["DirectCalls"]

_TORCH: Final = nn.Module.__call__.__code__.co_filename
_CALLERS: Final = frozenset({"_call_impl", "inner", "_slow_forward"})
_MARK: Final = "__rankscope_debugger__"
Forward = Callable[..., Any]


class DirectCalls:
    """Stands in front of `forward` of a model and all modules in it while it is entered."""

    def __init__(self, model: nn.Module, *, no_grad: bool) -> None:
        self._model = model
        self._no_grad = no_grad
        self._session: Session | None = None
        self._put: list[tuple[nn.Module, object]] = []

    def follow(self, session: Session | None) -> None:
        """Say which session is told of calls; None for none."""
        self._session = session

    def __enter__(self) -> DirectCalls:
        """Put the attributes on."""
        for module in _uncompiled(self._model, set()):
            if hasattr(vars(module).get("forward"), _MARK):
                continue  # of a block around this one
            self._put.append((module, vars(module).get("forward", _MISSING)))
            vars(module)["forward"] = self._front_of(module, is_top=module is self._model)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take them off again, and leave what was there before."""
        for module, before in self._put:
            if before is _MISSING:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = before
        self._put.clear()

    def _front_of(self, module: nn.Module, *, is_top: bool) -> Forward:
        forward: Forward = module.forward
        runs_without = self._no_grad and not is_top

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return forward(*args, **kwargs)
            if runs_without:
                with torch.no_grad():
                    return self._call(module, forward, args, kwargs, _is_from_torch())
            return self._call(module, forward, args, kwargs, _is_from_torch())

        setattr(call, _MARK, True)
        return call

    def _call(
        self, module: nn.Module, forward: Forward, args: Any, kwargs: Any, is_seen: bool
    ) -> Any:
        if is_seen or self._session is None:
            return forward(*args, **kwargs)
        return self._session.call(module, args, kwargs, forward)


_MISSING: Final = object()


def _uncompiled(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yield a module and those below it, but for what a compiler has looked at: any attribute would
    make it look again.
    """
    wrapper = wrapper_of(module)
    is_compiled = is_compiled_in_place(module) or (wrapper is not None and wrapper[1] == "compile")
    if id(module) in seen or is_compiled or isinstance(module, torch.jit.ScriptModule):
        return
    seen.add(id(module))
    yield module
    for child in module.children():
        yield from _uncompiled(child, seen)


def _is_from_torch() -> bool:
    """True where the function that asks was called by torch's `Module.__call__`."""
    code = sys._getframe(2).f_code
    return code.co_name in _CALLERS and code.co_filename == _TORCH
