"""Whether a module that is replayed has the weights that the recorded one had at that call.

An output that differs may come of other weights as well as of other code. What the trace holds of
the parameters before the step (after the train step before it, or at setup) tells the two apart:
statistics that differ prove other weights. Equal ones prove nothing, and nothing is said of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from rankscope.capture.describe import dtype_name
from rankscope.capture.torch_internals.dtensor import is_dtensor
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.replaying.recordedcall import RecordedCall
from rankscope.tree.views import Node, Value

__all__ = ["weights_note"]

_NUMBERS: Final = ("l2", "mean", "min", "max")
_SAME: Final = 1e-5
"""Difference of two statistics, relative to the largest of both values' elements or norms, that
rounding explains."""
_NAMED: Final = 4


def weights_note(module: nn.Module, call: RecordedCall) -> str:
    """Return which parameters of a module are not those that the recorded module had before the
    step; "" where none is known to be another one."""
    nodes = {node.path: node for node in _nodes_before(call)}
    other, known = [], 0
    for inside, part in module.named_modules():
        path = ".".join(filter(None, (call.node.path, inside)))
        for name, parameter in part._parameters.items():
            node = nodes.get(path)
            value = None if node is None or parameter is None else node.value(f"param:{name}")
            if value is None or parameter is None:
                continue
            is_same = _is_same(parameter.detach(), value, call.rank)
            known += is_same is not None
            if is_same is False:
                other.append(".".join(filter(None, (inside, name))))
    if not other:
        return ""
    more = ", ..." if len(other) > _NAMED else ""
    return (
        f"{len(other)} of {known} parameters are not those that were recorded before the step "
        f"({', '.join(other[:_NAMED])}{more}): the module has other weights"
    )


def _nodes_before(call: RecordedCall) -> Iterator[Node]:
    """Yield the nodes that hold parameters as they were before the call's step; none where the
    trace does not know that."""
    head, trace = call.node.head, call.node.trace
    if head.mode is Mode.EVAL and any(step.mode is Mode.TRAIN for step in trace.steps):
        return  # which train step came before it is not recorded
    for step in trace.setup if head.mode is Mode.EVAL or not head.step else trace.steps:
        if step.incarnation != head.incarnation:
            continue
        if step.is_setup or (step.mode is Mode.TRAIN and step.step == head.step - 1):
            yield from (n for n in step.walk() if n.phase in (Phase.SETUP, Phase.PARAMS))


def _is_same(parameter: torch.Tensor, value: Value, rank: int | None) -> bool | None:
    """Say whether a parameter may be the recorded one; None where its statistics are not known."""
    is_other = value.dtype != dtype_name(parameter.dtype)
    # of a DTensor every operation may be a collective
    if is_other or not parameter.numel() or is_dtensor(type(parameter)) or parameter.is_meta:
        return None
    digests = value.per_rank
    if rank is None:
        whole = value.combined if value.global_shape == tuple(parameter.shape) else None
        alone = next(iter(digests.values())) if value.distinct == 1 else None
        found = whole or alone
    else:
        found = digests.get(rank)
    if found is None or found.number("count") != parameter.numel():
        return None
    numbers = parameter.double()
    own = (numbers.norm(), numbers.mean(), numbers.min(), numbers.max())
    recorded = [found.number(name) for name in _NUMBERS]
    if any(each is None for each in recorded):
        return None
    size = float(numbers.abs().max())
    scales = (float(own[0]), size, size, size)
    return all(
        abs(float(mine) - float(theirs or 0.0)) <= _SAME * max(scale, abs(float(theirs or 0.0)))
        for mine, theirs, scale in zip(own, recorded, scales)
    )
