"""One module alone: it is handed what a recorded call was handed, and what it gives is held to what
the call gave.

    report = rankscope.replay(model.layers[1].attention, "trace", "layers.1.attention", step=0)
    assert report.agrees, report.text

Given the reference's inputs, a module that is right gives the reference's outputs, whatever the
modules before it do. The trace has to hold the full tensors of the call (`--rs-tensors PATH`).
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

from rankscope.agent.guard import attempt, text_of
from rankscope.capture.describe import dtype_name
from rankscope.capture.pytree import is_tensor, walk
from rankscope.capture.torch_internals.distributed import is_dtensor
from rankscope.diagnosis.comparison.tolerances import DEFAULTS
from rankscope.errors import ReplayError, SelectionError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.replaying.recordedcall import RecordedCall, ReplayInputs
from rankscope.tree.reader import TraceLike, opened_trace
from rankscope.tree.tensors.exactdistance import exact_distance
from rankscope.tree.views import Node, Value

__all__ = ["Replay", "ReplayedOutput", "replay"]

_NUMBERS: Final = ("l2", "mean", "min", "max")
_SAME: Final = 1e-5
"""Difference of two statistics, relative to the largest of both values' elements or norms, that
rounding explains."""
_NAMED: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedOutput:
    """One output of the module beside the recorded one."""

    slot: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    """L2 norm of the difference over that of the recorded tensor, exact; NaN where the two could
    not be compared."""
    tolerance: float
    """Distance that rounding explains."""
    unequal: int
    text: str

    @property
    def agrees(self) -> bool:
        """True where rounding explains the distance."""
        return self.error <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a module gave for the inputs of a recorded call."""

    path: str
    call: str
    ranks: tuple[int, ...]
    """Whose tensors it was handed: one rank's, or those that global tensors were made of."""
    outputs: tuple[ReplayedOutput, ...]
    notes: tuple[str, ...]
    """What must be known to read it: what was inferred, what was not compared."""

    @property
    def agrees(self) -> bool:
        """True where every output that was recorded agrees."""
        return all(output.agrees for output in self.outputs)

    @property
    def text(self) -> str:
        """A line for the whole, one for each output, one for each note."""
        word = "agrees" if self.agrees else "differs"
        given = f"given the inputs of {ranks_named(self.ranks)}"
        lines = [f"{word}: {self.path or '(root)'}, {self.call}, {given}"]
        lines += [
            f"  {each.slot}  {each.dtype}{list(each.shape)}  {each.text}" for each in self.outputs
        ]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def replay(
    module: nn.Module,
    trace: TraceLike,
    path: str,
    step: int = 0,
    rank: int | None = None,
    *,
    mode: Mode | str | None = None,
    micro_batch: int = 0,
    ordinal: int = 0,
    arguments: Mapping[int | str, object] | None = None,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    with_grad: bool = False,
    layouts: LayoutFile | None = None,
) -> Replay:
    """Hand a module the inputs of a recorded call, and hold what it gives to what was recorded.

    The module runs in the mode of the recorded step (train or eval), on its own device. Afterwards
    it is as it was: modes, buffers, attributes, gradients; so is the state of random numbers.

    Args:
        module: yours, with the weights that it should have.
        trace: open, its folder, or what `with rankscope.trace(...)` gave; it has to hold the full
            tensors of the call (`--rs-tensors PATH`).
        path: which module of the trace, "" for the root.
        step: number of the step.
        rank: whose tensors; None for the global ones, put together from those of all ranks.
        mode: of the step, train or eval; default train, or eval where there is no train step.
        micro_batch: n-th call of the root in the step.
        ordinal: which call of the path in the micro-batch.
        arguments: stands for recorded arguments, by position or name: needed for those that are
            neither tensors nor numbers nor text.
        dtype: that floating inputs are cast to; default as recorded.
        tolerance: relative L2 distance that counts as none; default that of `rankscope diff` for
            the coarsest dtype among inputs and outputs, 0 where none is floating.
        with_grad: let the module record what backward would need; some kernels compute otherwise
            then.
        layouts: declared layouts, for global tensors that no DTensor describes.

    Raises:
        SelectionError: the trace has no such call or rank, or did not keep its tensors; says how to
            keep them.
        LayoutError: nothing says how the ranks' tensors make global ones: name a rank.
        ReplayError: the module raised, an argument is no tensor and was not given, or the module
            gives nothing that was recorded.
        TraceError, FolderError: a damaged trace, or none.
        TypeError: `module` is none.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{type(module).__name__} is no module: give the torch module to replay")
    with opened_trace(trace) as source:
        call = RecordedCall(source, path, step, rank, mode, micro_batch, ordinal, layouts)
        inputs = ReplayInputs(call, arguments or {}, _device_of(module), dtype)
        return _replayed(module, call, inputs, tolerance, with_grad=with_grad)


def _replayed(
    module: nn.Module,
    call: RecordedCall,
    inputs: ReplayInputs,
    tolerance: float | None,
    *,
    with_grad: bool,
) -> Replay:
    path = call.node.path
    args, kwargs = inputs.made()
    handed = [leaf for _, leaf in walk("input", (args, kwargs)) if is_tensor(leaf)]
    given: list[object] = []
    is_training = call.node.head.mode is Mode.TRAIN

    def run() -> None:
        given.append(module(*args, **kwargs))

    with _unchanged(module, is_training), torch.set_grad_enabled(with_grad):
        error = attempt(run)
        found = dict(walk("output", given[0])) if given else {}
        made = {slot: each.detach() for slot, each in found.items() if is_tensor(each)}
    if error is not None:
        listed = ", ".join(f"{dtype_name(t.dtype)}{list(t.shape)}" for t in handed)
        raise ReplayError(
            f"{type(module).__name__} raised {text_of(error)} when it was handed the inputs of "
            f"{path or '(root)'} ({listed or 'no tensors'})",
            "cast them with dtype=, take one rank's with rank=, or replace some with arguments=",
        ) from error
    dtypes = {dtype_name(tensor.dtype) for tensor in handed}
    told = _weights_note(module, call)
    outputs = tuple(_compared(call, made, dtypes, tolerance, has_hooks=bool(module._forward_hooks)))
    return Replay(
        path=path,
        call=call.words,
        ranks=tuple(sorted(call.used)),
        outputs=outputs,
        notes=(*([told] if told else ()), *call.notes),
    )


# ---- what comes out ------------------------------------------------------------------------------


def _compared(
    call: RecordedCall,
    made: Mapping[str, torch.Tensor],
    dtypes: set[str],
    tolerance: float | None,
    *,
    has_hooks: bool,
) -> Iterator[ReplayedOutput]:
    """Yield every recorded output beside what the module made; its own hooks, if it has any, may
    replace what it makes."""
    returned = call.slots("returned") if has_hooks else []
    slots = returned or call.slots("output")
    others = call.others("returned" if returned else "output")
    if not slots:
        listed = ", ".join(f"{slot} = {text}" for slot, text in others.items())
        raise SelectionError(
            f"{call.node.path or '(root)'} gave no tensor in {call.words}, as far as was recorded: "
            f"{listed or 'nothing'}"
        )
    for slot in slots:
        recorded = call.tensor(slot)
        _, dot, rest = slot.partition(".")
        given = made.get(f"output{dot}{rest}")
        both = [recorded] if given is None else [recorded, given]
        own = {*dtypes, *(dtype_name(tensor.dtype) for tensor in both)}
        known = [DEFAULTS[each][0] for each in own if each in DEFAULTS]
        allowed = max(known, default=0.0) if tolerance is None else tolerance
        yield _beside(slot, recorded, given, allowed, sorted(made))
    call.notes += [
        f"not compared, because it is no tensor: {slot} = {text}"
        for slot, text in others.items()
        if text != "None"
    ]
    extra = sorted(made.keys() - {f"output{slot[len(slot.partition('.')[0]) :]}" for slot in slots})
    if extra:
        call.notes.append(f"not in the trace: {', '.join(extra)}")


def _beside(
    slot: str, recorded: torch.Tensor, given: torch.Tensor | None, allowed: float, others: list[str]
) -> ReplayedOutput:
    error, unequal = math.nan, recorded.numel()
    if given is None:
        text = f"the module gave no such output; it gave {', '.join(others) or 'no tensor'}"
    elif given.shape != recorded.shape:
        text = f"the module gave {dtype_name(given.dtype)}{list(given.shape)}"
    else:
        apart = exact_distance(recorded, given)
        error, unequal = apart.relative, apart.unequal
        cast = "" if given.dtype == recorded.dtype else f", though {dtype_name(given.dtype)}"
        some = f"{unequal:,} of {recorded.numel():,} elements"
        worst, pair = f"[{', '.join(map(str, apart.at))}]", ""
        if unequal:
            pair = f"{given[apart.at].item():.6g} instead of {recorded[apart.at].item():.6g}"
        if not recorded.numel():
            text = f"there is no element to compare{cast}"
        elif not unequal:
            text = f"every element is the recorded one{cast}"
        elif apart.other_nonfinite:
            text = f"other elements are NaN or infinite, first at {worst}: {pair}{cast}"
        else:
            than = "within" if error <= allowed else "more than"
            text = (
                f"off by {error:.3g} of its norm, {than} the tolerance {allowed:.3g}: {some} "
                f"differ, most at {worst}: {pair}{cast}"
            )
    return ReplayedOutput(
        slot=slot,
        dtype=dtype_name(recorded.dtype),
        shape=tuple(recorded.shape),
        error=error,
        tolerance=allowed,
        unequal=unequal,
        text=text,
    )


# ---- the module ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _unchanged(module: nn.Module, is_training: bool) -> Iterator[None]:
    """Put a module into a mode, and leave it and all random numbers as they were before. Buffers
    are exchanged for copies while it runs, so that not even their version changes."""
    parts = [*module.modules()]
    tables = [table for part in parts for table in (vars(part), part._buffers, part._parameters)]
    before = [dict(table) for table in tables]
    copies: dict[int, torch.Tensor] = {}
    device = _device_of(module)
    states = random.getstate(), np.random.get_state()  # those of the program
    kind = {} if device.type == "cpu" else {"device_type": device.type}
    with torch.random.fork_rng([device] if kind else [], **kind):
        try:
            for part in parts:
                for name, buffer in part._buffers.items():
                    if buffer is not None:  # modules that share one share its copy
                        part._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
            if module.training is not is_training:
                module.train(is_training)
            yield
        finally:
            for table, own in zip(tables, before):
                table.clear()
                table.update(own)
            random.setstate(states[0])
            np.random.set_state(states[1])


def _device_of(module: nn.Module) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


# ---- its weights ---------------------------------------------------------------------------------
# An output that differs may come of other weights as well as of other code. What the trace holds of
# the parameters before the step (after the train step before it, or at setup) tells the two apart:
# statistics that differ prove other weights. Equal ones prove nothing, and nothing is said of them.


def _weights_note(module: nn.Module, call: RecordedCall) -> str:
    """Return which parameters are not those of the recorded module before the step."""
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
    """Yield the nodes that hold parameters as they were before the call's step, if known."""
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
