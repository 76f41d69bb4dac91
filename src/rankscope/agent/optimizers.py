"""What the optimizers tell: when a step ends, and which parameters each of them holds."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["held_parameters", "optimizer_exists", "runs_closure"]


def optimizer_exists() -> bool:
    """True once any optimizer object has been made in this process, before or after attaching.

    torch marks the `step` of a class as hooked when its first object is made, so no search through
    the garbage collector's objects is needed.
    """
    return any(getattr(cls.__dict__.get("step"), "hooked", False) for cls in _subclasses(torch.optim.Optimizer))


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def held_parameters(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Return the identities of all parameters in an optimizer's groups."""
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


def runs_closure(arguments: tuple[object, ...], keywords: dict[str, object]) -> bool:
    """True where `step` was called with a closure: gradients are only final after it."""
    closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
    return closure is not None
