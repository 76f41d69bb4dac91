"""What the optimizers tell: when a step ends, and which parameters each of them holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rankscope.agent.guard import Guard
from rankscope.agent.hooks.pythonstack import calls_running
from rankscope.agent.standins import StandIns

_MAKING = ("__init__", "__setstate__")


@dataclass(frozen=True, slots=True)
class Holdings:
    """Whose parameters are whose when one optimizer steps; all by identity."""

    own: frozenset[int]
    """Those of the roots seen that this optimizer holds."""
    unheld: frozenset[int]
    """Those of the roots seen that no optimizer alive holds."""
    strangers: tuple[torch.Tensor, ...]
    """What it holds that belongs to no root seen: flattened, sharded or replaced parameters."""


OptimizersById = weakref.WeakValueDictionary[int, torch.optim.Optimizer]
"""Living optimizers by identity: a class of somebody's own may compare and not hash."""


class OptimizerSearch(StandIns):
    """Knows the optimizers that are alive in this process, made before or after attaching. Those
    made after `put_on` are seen in `__init__`, copies and unpickled ones in `__setstate__`. For
    those made before the heap is searched, once, and only where torch says that there was one: it
    marks the `step` of a class as hooked when its first object is made."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._found = OptimizersById()
        self._made = guard.hook(self.saw)
        self._may_have_missed = False
        """One may be alive that was made before `put_on`."""

    def put_on(self) -> None:
        """See every optimizer that is made from now on."""
        if self.is_on:
            return
        self._may_have_missed = any(_has_been_made(cls) for cls in _optimizer_classes())
        for name in _MAKING:
            self.put(torch.optim.Optimizer, name, self._around)

    def _around(self, original: Callable[..., None]) -> Callable[..., None]:
        def making(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self.is_on:
                self._made(optimizer)

        return making

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._found.get(id(optimizer)) is optimizer

    def exists(self) -> bool:
        """True where an optimizer is alive."""
        return len(self._found) > 0 or self._finds_earlier()

    def saw(self, optimizer: torch.optim.Optimizer) -> None:
        """Remember an optimizer that steps: its class may not call torch's constructor."""
        self._found[id(optimizer)] = optimizer

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of every optimizer found so far."""
        for optimizer in self._alive():
            yield from parameters_of(optimizer)

    def _alive(self) -> list[torch.optim.Optimizer]:
        references = self._found.valuerefs()  # at once: another thread may make one
        return [optimizer for each in references if (optimizer := each()) is not None]

    def holder_of(self, wanted: frozenset[int]) -> torch.optim.Optimizer | None:
        """Return an optimizer that holds one of these parameters (identities), if any does."""
        if self.exists():
            for optimizer in self._alive():
                if not wanted.isdisjoint(held_parameters(optimizer)):
                    return optimizer
        return None

    def holdings(self, optimizer: torch.optim.Optimizer, known: frozenset[int]) -> Holdings:
        """Say which of the known parameters an optimizer holds, and which nobody does."""
        held = {id(parameter): parameter for parameter in parameters_of(optimizer)}
        unheld = self._unheld(known)
        if unheld and self._finds_earlier():
            unheld = self._unheld(known)
        strangers = tuple(tensor for key, tensor in held.items() if key not in known)
        return Holdings(known & held.keys(), unheld, strangers)

    def _unheld(self, known: frozenset[int]) -> frozenset[int]:
        return known.difference(*(held_parameters(o) for o in self._alive()))

    def _finds_earlier(self) -> bool:
        """Search the heap, once, for optimizers made before `put_on`; True where one was found."""
        if not self._may_have_missed:
            return False
        self._may_have_missed = False
        classes = list(_optimizer_classes())
        # every object refers to its class: the collector finds the objects of a few classes without
        # handing over all others. By type, since to ask a proxy for its __class__ may import a
        # module, or warn.
        known = len(self._found)
        for candidate in gc.get_referrers(*classes):
            if any(type(candidate) is cls for cls in classes):
                self.saw(candidate)
        return len(self._found) > known


def _optimizer_classes(top: type = torch.optim.Optimizer) -> Iterator[type]:
    yield top
    children: list[type] = type.__subclasses__(top)
    for child in children:
        yield from _optimizer_classes(child)


def _has_been_made(cls: type) -> bool:
    return getattr(cls.__dict__.get("step"), "hooked", False)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield all parameters in an optimizer's groups."""
    # an optimizer found while its __init__ runs has no groups yet
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def held_parameters(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return the identities of all parameters in an optimizer's groups."""
    return frozenset(id(parameter) for parameter in parameters_of(optimizer))


def runs_closure(arguments: tuple[object, ...], keywords: dict[str, object]) -> bool:
    """True where `step` was called with a closure: gradients are only final after it."""
    closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
    return closure is not None


def steps_running() -> int:
    """Return how many optimizer steps are on this thread's Python stack."""
    return calls_running("wrapper", "torch/optim/optimizer.py")
