"""What the optimizers tell: when a step ends, and which parameters each of them holds."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch

from rankscope.capture.invisible import invisible

__all__ = [
    "Holdings",
    "OptimizerSearch",
    "OptimizerSet",
    "describe_strangers",
    "held_parameters",
    "parameters_of",
    "runs_closure",
    "steps_running",
]

_OPTIMIZER_FILE = "torch/optim/optimizer.py"
_SHAPES_NAMED = 3


@dataclass(frozen=True, slots=True)
class Holdings:
    """Whose parameters are whose when one optimizer steps; all by identity."""

    own: frozenset[int]
    """Those of the roots seen that this optimizer holds."""
    unheld: frozenset[int]
    """Those of the roots seen that no optimizer alive holds."""
    strangers: tuple[torch.Tensor, ...]
    """What it holds that belongs to no root seen: flattened or sharded copies, or what a
    parallelized model has left behind.
    """


class OptimizerSet:
    """Living optimizers by identity, none kept alive: a class of somebody's own may compare and not
    hash.
    """

    def __init__(self) -> None:
        self._members: dict[int, weakref.ref[torch.optim.Optimizer]] = {}

    def add(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take an optimizer in; True where it was not a member."""
        if optimizer in self:
            return False
        self._members[id(optimizer)] = weakref.ref(optimizer)
        return True

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        member = self._members.get(id(optimizer))
        return member is not None and member() is optimizer

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        for key, member in list(self._members.items()):
            optimizer = member()
            if optimizer is None:
                self._members.pop(key, None)
            else:
                yield optimizer

    def clear(self) -> None:
        """Leave no member."""
        self._members.clear()


class OptimizerSearch:
    """Finds the optimizers that are alive in this process, made before or after attaching.

    torch marks the `step` of a class as hooked when its first object is made: without a marked
    class there is none. Else living objects are looked for among those the garbage collector
    knows, and then only remembered; a search that finds nothing new is repeated at doubling
    intervals.
    """

    def __init__(self) -> None:
        self._found = OptimizerSet()
        self._questions = 0

    def exists(self) -> bool:
        """True where an optimizer is alive."""
        if any(True for _ in self._found):
            return True
        if not any(
            getattr(c.__dict__.get("step"), "hooked", False)
            for c in _subclasses(torch.optim.Optimizer)
        ):
            return False
        return self._look()

    def saw(self, optimizer: torch.optim.Optimizer) -> bool:
        """Remember an optimizer; True where it was not known."""
        return self._found.add(optimizer)

    def holdings(self, optimizer: torch.optim.Optimizer, known: frozenset[int]) -> Holdings:
        """Say which of the known parameters an optimizer holds, and which nobody does."""
        held = {id(parameter): parameter for parameter in parameters_of(optimizer)}
        unheld = self._unheld(known)
        if unheld and self._look():
            unheld = self._unheld(known)
        strangers = tuple(tensor for key, tensor in held.items() if key not in known)
        return Holdings(known & held.keys(), unheld, strangers)

    def _unheld(self, known: frozenset[int]) -> frozenset[int]:
        return known.difference(*(held_parameters(o) for o in self._found))

    def _look(self) -> bool:
        """Search the objects of the garbage collector; True where an optimizer was found that was
        not known. Most calls do nothing: each takes twice as many questions as the one before.
        """
        self._questions += 1
        if self._questions & (self._questions - 1):
            return False
        is_any_new = False
        for candidate in gc.get_objects():
            # not isinstance: asking a proxy for its __class__ may import a module, or warn
            if issubclass(type(candidate), torch.optim.Optimizer):
                is_any_new |= self.saw(candidate)
        if is_any_new:
            self._questions = 0
        return is_any_new


def _subclasses(cls: type) -> Iterator[type]:
    children: list[type] = type.__subclasses__(cls)
    for child in children:
        yield child
        yield from _subclasses(child)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield all parameters in an optimizer's groups."""
    # an optimizer found while its __init__ runs has no groups yet
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def held_parameters(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return the identities of all parameters in an optimizer's groups."""
    return frozenset(id(parameter) for parameter in parameters_of(optimizer))


def describe_strangers(optimizer: torch.optim.Optimizer, holdings: Holdings) -> str:
    """Say what an optimizer holds that no module seen owns; "" where there is nothing.

    An optimizer made before `fully_shard` or `parallelize_module` replaced the parameters holds the
    old ones, which get no gradient; one that keeps master copies gives them theirs.
    """
    strangers = holdings.strangers
    if not strangers:
        return ""
    with invisible():
        without = sum(tensor.grad is None for tensor in strangers)
        shapes = sorted({str(list(tensor.shape)) for tensor in strangers})
    named = ", ".join(shapes[:_SHAPES_NAMED]) + (", ..." if len(shapes) > _SHAPES_NAMED else "")
    return (
        f"{type(optimizer).__name__} holds {len(holdings.own)} parameters of the modules seen, and "
        f"{len(strangers)} that none of them owns ({without} without a gradient; shapes {named})"
    )


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
