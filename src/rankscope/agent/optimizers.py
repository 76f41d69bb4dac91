"""What the optimizers tell: when a step ends, and which parameters each of them holds."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import FrameType

import torch

__all__ = ["OptimizerSearch", "held_parameters", "runs_closure", "steps_running"]

_OPTIMIZER_FILE = "torch/optim/optimizer.py"


class OptimizerSearch:
    """Answers whether an optimizer is alive in this process, made before or after attaching.

    torch marks the `step` of a class as hooked when its first object is made: without a marked
    class there is none. Else one living object is looked for among those the garbage collector
    knows, and then only remembered; a search that finds none is repeated at doubling intervals.
    """

    def __init__(self) -> None:
        self._found: weakref.ref[torch.optim.Optimizer] | None = None
        self._questions = 0

    def exists(self) -> bool:
        """True where an optimizer is alive."""
        if self._found is not None and self._found() is not None:
            return True
        if not any(
            getattr(c.__dict__.get("step"), "hooked", False)
            for c in _subclasses(torch.optim.Optimizer)
        ):
            return False
        self._questions += 1
        if self._questions & (self._questions - 1):
            return False
        for candidate in gc.get_objects():
            # not isinstance: asking a proxy for its __class__ may import a module, or warn
            if issubclass(type(candidate), torch.optim.Optimizer):
                self.saw(candidate)
                return True
        return False

    def saw(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer that has just stepped."""
        self._found = weakref.ref(optimizer)
        self._questions = 0


def _subclasses(cls: type) -> Iterator[type]:
    children: list[type] = type.__subclasses__(cls)
    for child in children:
        yield child
        yield from _subclasses(child)


def held_parameters(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return the identities of all parameters in an optimizer's groups."""
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


def runs_closure(arguments: tuple[object, ...], keywords: dict[str, object]) -> bool:
    """True where `step` was called with a closure: gradients are only final after it."""
    closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
    return closure is not None


def steps_running() -> int:
    """Return how many optimizer steps are on this thread's Python stack."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        count += code.co_name == "wrapper" and code.co_filename.endswith(_OPTIMIZER_FILE)
        frame = frame.f_back
    return count
