"""What is noted of an optimizer when it steps: options, rates of 0, and parameters of no module."""

from __future__ import annotations

import torch

from rankscope.agent.steps.optimizersearch import Holdings
from rankscope.capture.invisible import invisible
from rankscope.record.notes import Note, NoteKind
from rankscope.record.optimizeroptions import options_text

__all__ = ["describe_options", "describe_rates", "describe_strangers"]

_SHAPES_NAMED = 3
_LONGEST_VALUE = 40
_NO_OPTIONS = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"}
)


def describe_strangers(optimizer: torch.optim.Optimizer, holdings: Holdings) -> Note | None:
    """Say what an optimizer holds that no module seen owns; None where there is nothing.

    An optimizer made before `fully_shard` or `parallelize_module` replaced the parameters holds the
    old ones, which get no gradient; one that keeps master copies gives them theirs.
    """
    strangers = holdings.strangers
    if not strangers:
        return None
    with invisible():
        without = sum(tensor.grad is None for tensor in strangers)
        shapes = sorted({str(list(tensor.shape)) for tensor in strangers})
    named = ", ".join(shapes[:_SHAPES_NAMED]) + (", ..." if len(shapes) > _SHAPES_NAMED else "")
    return Note.of(
        NoteKind.FOREIGN_PARAMETERS,
        optimizer=type(optimizer).__name__,
        own=len(holdings.own),
        foreign=len(strangers),
        idle=without,
        shapes=named,
    )


def describe_rates(optimizer: torch.optim.Optimizer) -> Note | None:
    """Say how many parameters with a gradient a step will leave where they are, because the
    learning rate of their group is 0; None where there is none. A rate that is a tensor is not
    read: it may lie on an accelerator.
    """
    with invisible():
        still = sum(
            parameter.grad is not None
            for group in getattr(optimizer, "param_groups", ())
            if isinstance(group.get("lr"), int | float) and not group["lr"]
            for parameter in group["params"]
        )
    name = type(optimizer).__name__
    return Note.of(NoteKind.RATE_OF_ZERO, optimizer=name, parameters=still) if still else None


def describe_options(optimizer: torch.optim.Optimizer) -> Note | None:
    """Say with which options an optimizer steps; None for one that has none.

    Values that groups of parameters do not share stand in the order of the groups, `0.1 | 0.0`.
    Those that choose an implementation (`foreach`, `fused`) change no result and are left out.
    """
    found: dict[str, list[str]] = {}
    for group in getattr(optimizer, "param_groups", ()):
        for name, value in group.items():
            values = found.setdefault(str(name), [])
            text = _option(value)
            if name not in _NO_OPTIONS and text not in values:
                values.append(text)
    options = options_text(found)
    name = type(optimizer).__name__
    return Note.of(NoteKind.OPTIMIZER_OPTIONS, optimizer=name, options=options) if options else None


def _option(value: object) -> str:
    """Return a plain value as text, "" for others. A tensor is not read: it may lie on an
    accelerator."""
    if isinstance(value, torch.Tensor):
        return "(a tensor)"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_option, value))})"
    if value is None or isinstance(value, (bool, int, str)):
        return str(value)[:_LONGEST_VALUE]
    return f"{value:.9g}" if isinstance(value, float) else ""
