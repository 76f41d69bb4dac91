"""Inputs that are off by a rounding, for a run that measures noise (`diff --noise`).

The one part of rankscope that changes what a program computes, and only where the setting `perturb`
asks for it. Its hooks are put on as those of the program are, before those that trace: a trace
shows what the model was given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rankscope.agent.guard import attempt, say, text_of
from rankscope.capture.torch_internals.autograd import current_graph_task
from rankscope.capture.torch_internals.compiling import is_compiling

_DTYPES: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class _Calls(threading.local):
    depth = 0
    is_expected = False
    """The outermost call was given no floating input: the first floating output is due."""


class Perturbation:
    """Multiplies the floating inputs of every outermost module call by 1 plus or minus some
    roundings; where it has none, the first floating output of a module inside. The sign of each
    element follows from its value, so the random numbers of the program stay. Keyword inputs and
    what recomputation runs again are left alone."""

    def __init__(self, roundings: int) -> None:
        """Put the hooks on; `roundings` is in units of `torch.finfo(dtype).eps`."""
        self._roundings = roundings
        self._calls = _Calls()
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        if is_compiling():
            return None
        self._calls.depth += 1
        if self._calls.depth > 1 or current_graph_task() != -1:
            return None
        changed = self._attempt(lambda: tuple(map(self._off, args)))
        if changed is not None:
            self._calls.is_expected = all(a is b for a, b in zip(args, changed))
        return changed

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if is_compiling():
            return None
        self._calls.depth = max(self._calls.depth - 1, 0)
        if not self._calls.is_expected or current_graph_task() != -1:
            return None
        changed = self._attempt(lambda: self._first_off(output))
        if changed is not None:
            self._calls.is_expected = False
        return changed

    def _attempt(self, change: Callable[[], Any]) -> Any:
        """Return what was changed; None, and change nothing from then on, where that fails."""
        changed: list[Any] = []
        error = attempt(lambda: changed.append(change()))
        if error is None:
            return changed[0]
        self.remove()
        say(f"inputs are no longer changed (--rs-perturb): {text_of(error)}")
        return None

    def _first_off(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            changed = self._off(output)
            return None if changed is output else changed
        if type(output) in (tuple, list):
            for index, each in enumerate(output):
                changed = self._off(each)
                if changed is not each:
                    return type(output)((*output[:index], changed, *output[index + 1 :]))
        if isinstance(output, Mapping) and hasattr(output, "update"):
            for name, each in output.items():
                changed = self._off(each)
                if changed is not each:
                    output.update({name: changed})
                    return output
        return None

    def _off(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in _DTYPES:
            return value
        with torch.no_grad():
            signs = torch.sign(torch.sin(value.detach().float() * 997.0))
            factors = (1 + self._roundings * torch.finfo(value.dtype).eps * signs.double()).to(
                value.dtype
            )
        return value * factors
