"""One module alone: it is handed the inputs of a recorded call, and its outputs are compared.

    report = rankscope.replay(model.layers[1].attention, "trace", "layers.1.attention", step=0)
    assert report.agrees, report.text

Given the reference's inputs, a right module gives the reference's outputs, whatever the modules
before it do. The trace has to hold the full tensors of the call (`--rs-tensors PATH`).
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from rankscope.agent.guard import attempt, text_of
from rankscope.capture.describe import dtype_name
from rankscope.capture.pytree import is_tensor, walk
from rankscope.capture.torch_internals.distributed import is_dtensor
from rankscope.diagnosis.comparison.difference import DEFAULTS
from rankscope.errors import LayoutError, ReplayError, SelectionError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import ranks_named
from rankscope.record.statistics import Combined
from rankscope.record.value import Digest, is_form
from rankscope.tree.reader import TraceLike, opened_trace
from rankscope.tree.selection import named
from rankscope.tree.slotview import by_slot
from rankscope.tree.tensors.globalvalues import local_tensor, whole_value
from rankscope.tree.tensors.rebuild import exact_distance
from rankscope.tree.views import Node, Trace, Value

__all__ = ["Replay", "ReplayedOutput", "replay"]

_OF_TORCH: Final = re.compile(r"torch\.(\w+)")
_STATISTICS: Final = ("l2", "mean", "min", "max")
_SAME: Final = 1e-5
"""Difference of statistics that rounding explains, relative to the largest element or norm."""
_NUMBERS: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class RecordedCall:
    """One forward call of the trace, whose tensors are read."""

    def __init__(self, node: Node, rank: int | None, layouts: LayoutFile | None) -> None:
        self.node, self.rank, self._layouts = node, rank, layouts
        if rank is not None and rank not in node.ranks:
            callers = f"{ranks_named(node.ranks)} did"
            raise SelectionError(f"rank {rank} did not call {self.name} in {self.words}; {callers}")
        self.used: set[int] = set() if rank is None else {rank}
        self.notes: list[str] = []

    @property
    def name(self) -> str:
        """Path of the module, as people write it."""
        return self.node.path or "(root)"

    @property
    def words(self) -> str:
        """Which call this is."""
        node = self.node
        repeat = f", call {node.ordinal}" if node.ordinal else ""
        return f"forward of {node.head.words}, micro-batch {node.micro_batch}{repeat}"

    def slots(self, kind: str) -> tuple[list[str], dict[str, str]]:
        """Return the slots of one kind that hold tensors, and {slot: text} of the others."""
        entries = by_slot(slot for slot in self.node.slots if slot.slot.partition(".")[0] == kind)
        tensors = [slot for slot, views in entries.items() if views[0].dtype != "python"]
        texts = {slot: self.note(slot) or "None" for slot in entries if slot not in tensors}
        return tensors, texts

    def tensor(self, slot: str) -> torch.Tensor:
        """Return the full tensor of one slot: the rank's, or the global one. Errors as of
        `whole_value`."""
        value = self.node.value(slot)
        assert value is not None
        try:
            if self.rank is not None:
                return local_tensor(value, self.rank, is_checked=True)
            global_value = whole_value(value, self._layouts)
        except SelectionError as error:
            keep = f"a replay needs all of the call: --rs-tensors '{self.node.path}:*'"
            raise SelectionError(str(error), keep) from None
        except LayoutError as error:
            text = str(error).replace("--rank ", "rank=").replace("--layout FILE", "layouts=")
            raise LayoutError(text) from None
        self.used.update(global_value.ranks)
        self.notes += [f"{slot}: {text}" for text in global_value.remarks]
        return global_value.tensor

    def note(self, slot: str) -> str | None:
        """Return the text of a slot that holds no tensor; None where there is no such slot."""
        value = self.node.value(slot)
        folds = [fold for view in value.views for fold in view.pieces] if value else []
        texts = (fold.note for fold in folds if self.rank is None or self.rank in fold.ranks)
        return next(texts, None)


def _find_call(
    trace: Trace, path: str, step: int, mode: Mode | str | None, micro_batch: int, ordinal: int
) -> Node:
    """Return the node of a forward call; SelectionError: there is no such call, says what there
    is."""
    chosen_mode = trace.default_mode if mode is None else named(Mode, "mode", mode)
    nodes = [
        node
        for group in reversed(trace.steps)
        if group.step == step and group.mode is chosen_mode
        for node in group.walk()
        if node.phase is Phase.FORWARD
        and (node.path, node.micro_batch, node.ordinal) == (path, micro_batch, ordinal)
    ]
    if nodes:
        return nodes[0]
    # the trace has no output of such a call either: this raises the error that lists its calls
    where = {"step": step, "micro_batch": micro_batch, "ordinal": ordinal}
    return trace.value(path, "output", phase=Phase.FORWARD, mode=chosen_mode, **where).node


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """Makes the arguments of a call of what was recorded."""

    _call: RecordedCall
    _replacements: Mapping[int | str, object]
    _device: torch.device
    _dtype: torch.dtype | None

    def arguments(self) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return positional and keyword arguments. SelectionError: a tensor was not kept, or no
        inputs were recorded; ReplayError: an argument that is no tensor has to be given."""
        form = self._form()
        forms = {**dict(enumerate(form["args"])), **form["kwargs"]}
        arguments: dict[int | str, object] = {
            key: self._replacements[key] if key in self._replacements else self._value(part, key)
            for key, part in forms.items()
        }
        arguments |= self._replacements
        places = sorted(key for key in arguments if isinstance(key, int))
        if places != [*range(len(places))]:
            raise ReplayError(f"arguments= names position {places[-1]}, but none before it")
        keywords = {key: value for key, value in arguments.items() if isinstance(key, str)}
        return tuple(map(arguments.__getitem__, places)), keywords

    def _form(self) -> dict[str, Any]:
        """Return how the arguments were nested; `form:input` is taken with full tensors."""
        call = self._call
        if (text := call.note("form:input")) is not None:
            form: dict[str, Any] = json.loads(text)
            return form
        tensors, texts = call.slots("input")
        parts = {**{slot: {"slot": slot} for slot in tensors}, **texts}
        names = {slot.partition(".")[2]: part for slot, part in parts.items()}
        is_read = self._replacements or any(is_form(view.slot) for view in call.node.slots)
        if any("." in name for name in names) or not (names or is_read):
            raise SelectionError(
                f"the inputs of {call.name}, or how they were nested, were not recorded; trace "
                f"again with --rs-slots '*' and --rs-tensors '{call.node.path}'"
            )
        return {
            "args": [part for name, part in names.items() if name.isdecimal()],
            "kwargs": {name: part for name, part in names.items() if not name.isdecimal()},
        }

    def _value(self, form: object, name: int | str) -> object:
        """Return what a form (docs/trace-format.md) describes in an argument of that name."""
        if isinstance(form, list):
            return tuple(self._value(part, name) for part in form)
        if isinstance(form, dict):
            if "items" in form:
                return {key: self._value(part, name) for key, part in form["items"].items()}
            return self._tensor(form)
        return self._parsed(str(form), name)

    def _tensor(self, form: Mapping[str, Any]) -> torch.Tensor:
        recorded = self._call.tensor(form["slot"])
        is_cast = self._dtype is not None and recorded.is_floating_point()
        tensor = recorded.to(self._device, self._dtype if is_cast else None, copy=True)
        stride, is_global = form.get("stride"), self._call.rank is None
        if not stride or is_global or len(stride) != tensor.ndim or min(stride) <= 0:
            return tensor
        # kernels may add in another order where a tensor is not in row-major order
        return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)

    def _parsed(self, text: str, name: int | str) -> object:
        if text in _NUMBERS:
            return _NUMBERS[text]
        of_torch = _OF_TORCH.fullmatch(text)
        if of_torch and isinstance(getattr(torch, of_torch[1], None), (torch.dtype, torch.layout)):
            return getattr(torch, of_torch[1])
        if text.startswith("device("):
            return self._device
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise ReplayError(
                f"argument {name} of {self._call.name} is not a tensor, and the "
                f"trace holds its text alone: {text}",
                f"give it with arguments={{{name!r}: ...}}",
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedOutput:
    """One output of the module beside the recorded one."""

    slot: str
    dtype: str
    shape: tuple[int, ...]
    error: float
    """L2 norm of the difference over that of the recorded tensor; NaN where not comparable."""
    tolerance: float
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
    ranks: tuple[int, ...]  # those whose tensors it was handed
    outputs: tuple[ReplayedOutput, ...]
    notes: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """True where every output that was recorded agrees."""
        return all(output.agrees for output in self.outputs)

    @property
    def text(self) -> str:
        """A line for the whole, one for each output, one for each note."""
        call = (
            f"{self.path or '(root)'}, {self.call}, given the inputs of {ranks_named(self.ranks)}"
        )
        lines = [f"{'agrees' if self.agrees else 'differs'}: {call}"]
        lines += [f"  {out.slot}  {out.dtype}{list(out.shape)}  {out.text}" for out in self.outputs]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


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
        trace: open, its folder, or what `with rankscope.trace(...)` gave.
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
        with_grad: let the module record for backward; some kernels compute otherwise then.
        layouts: declared layouts, for global tensors that no DTensor describes.

    Raises:
        SelectionError: no such call or rank, or its tensors were not kept; says how to keep them.
        LayoutError: nothing says how the ranks' tensors make global ones: name a rank.
        ReplayError: the module raised, or an argument is no tensor and was not given.
        TraceError, FolderError, TypeError: a damaged trace, or none; no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{type(module).__name__} is not a module: give the torch module to replay")
    with opened_trace(trace) as source:
        node = _find_call(source, path, step, mode, micro_batch, ordinal)
        call = RecordedCall(node, rank, layouts)
        tensors_of_module = itertools.chain(module.parameters(), module.buffers())
        device = next((tensor.device for tensor in tensors_of_module), torch.device("cpu"))
        inputs = ReplayInputs(call, arguments or {}, device, dtype)
        args, kwargs = inputs.arguments()
        tensors = [leaf for _, leaf in walk("input", (args, kwargs)) if is_tensor(leaf)]
        results: list[object] = []
        is_training = node.head.mode is Mode.TRAIN
        with _unchanged(module, device, is_training), torch.set_grad_enabled(with_grad):
            error = attempt(lambda: results.append(module(*args, **kwargs)))
            leaves = walk("output", results[0]) if results else ()
            outputs = {slot: leaf.detach() for slot, leaf in leaves if is_tensor(leaf)}
        if error is not None:
            listed = ", ".join(f"{dtype_name(t.dtype)}{list(t.shape)}" for t in tensors)
            raise ReplayError(
                f"{type(module).__name__} raised {text_of(error)} when it was handed the inputs of "
                f"{call.name} ({listed or 'no tensors'})",
                "cast them with dtype=, take one rank's with rank=, or replace some by arguments=",
            ) from error
        dtypes = {dtype_name(tensor.dtype) for tensor in tensors}
        call.notes[:0] = _weights_notes(module, call)
        has_hooks = bool(module._forward_hooks)
        compared = tuple(_compared(call, outputs, dtypes, tolerance, has_hooks=has_hooks))
        ranks, notes = tuple(sorted(call.used)), tuple(call.notes)
        return Replay(path=path, call=call.words, ranks=ranks, outputs=compared, notes=notes)


def _compared(
    call: RecordedCall,
    outputs: Mapping[str, torch.Tensor],
    dtypes: set[str],
    tolerance: float | None,
    *,
    has_hooks: bool,
) -> Iterator[ReplayedOutput]:
    """Yield every recorded output beside the module's; hooks of the module may replace what it
    returns."""
    slots, texts = call.slots("returned") if has_hooks else ([], {})
    if not slots:
        slots, texts = call.slots("output")
    if not slots:
        listed = ", ".join(f"{slot} = {text}" for slot, text in texts.items())
        raise SelectionError(
            f"{call.name} gave no tensor in {call.words}, as far as was recorded: "
            f"{listed or 'nothing'}"
        )
    names = {slot: f"output{slot.removeprefix(slot.partition('.')[0])}" for slot in slots}
    for slot, name in names.items():
        recorded, output = call.tensor(slot), outputs.get(name)
        pair = [recorded] if output is None else [recorded, output]
        used = dtypes.union(dtype_name(tensor.dtype) for tensor in pair) & DEFAULTS.keys()
        default = max((DEFAULTS[dtype][0] for dtype in used), default=0.0)
        allowed = default if tolerance is None else tolerance
        yield _beside(slot, recorded, output, allowed, sorted(outputs))
    call.notes += [
        f"not compared, because it is not a tensor: {slot} = {text}"
        for slot, text in texts.items()
        if text != "None"
    ]
    if extra := sorted(outputs.keys() - {*names.values()}):
        call.notes.append(f"not in the trace: {', '.join(extra)}")


def _beside(
    slot: str, recorded: torch.Tensor, output: torch.Tensor | None, allowed: float, names: list[str]
) -> ReplayedOutput:
    error, unequal = math.nan, recorded.numel()
    if output is None:
        text = f"the module gave no such output; it gave {', '.join(names) or 'no tensor'}"
    elif output.shape != recorded.shape:
        text = f"the module gave {dtype_name(output.dtype)}{list(output.shape)}"
    else:
        distance = exact_distance(recorded, output)
        error, unequal, at = distance.relative, distance.unequal, distance.at
        place = f"[{', '.join(map(str, at))}]"
        if unequal:
            place += f": {output[at].item():.6g} instead of {recorded[at].item():.6g}"
        if not recorded.numel():
            text = "there is no element to compare"
        elif not unequal:
            text = "every element is the recorded one"
        elif distance.other_nonfinite:
            text = f"other elements are NaN or infinite, first at {place}"
        else:
            relation = "within" if error <= allowed else "more than"
            text = (
                f"off by {error:.3g} of its norm, {relation} the tolerance {allowed:.3g}: "
                f"{unequal:,} of {recorded.numel():,} elements differ, most at {place}"
            )
        if output.dtype != recorded.dtype:
            text += f", though {dtype_name(output.dtype)}"
    return ReplayedOutput(
        slot=slot,
        dtype=dtype_name(recorded.dtype),
        shape=tuple(recorded.shape),
        error=error,
        tolerance=allowed,
        unequal=unequal,
        text=text,
    )


@contextlib.contextmanager
def _unchanged(module: nn.Module, device: torch.device, is_training: bool) -> Iterator[None]:
    """Put a module into a mode; leave it and all random numbers as they were. Copies stand for its
    buffers meanwhile, so that not even their version changes."""
    parts = [*module.modules()]
    tables = [table for part in parts for table in (vars(part), part._buffers, part._parameters)]
    before = [dict(table) for table in tables]
    copies: dict[int, torch.Tensor] = {}
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
            for table, content in zip(tables, before):
                table.clear()
                table.update(content)
            random.setstate(states[0])
            np.random.set_state(states[1])


def _weights_notes(module: nn.Module, call: RecordedCall) -> Iterator[str]:
    """Yield which parameters are not those of the recorded module before the step: an output that
    differs may come of other weights as well as of other code. Statistics that differ prove other
    weights; equal ones prove nothing."""
    nodes = {node.path: node for node in _nodes_before(call)}
    differing, known_count = [], 0
    for inside, part in module.named_modules():
        node = nodes.get(".".join(filter(None, (call.node.path, inside))))
        for name, parameter in part._parameters.items():
            value = None if node is None or parameter is None else node.value(f"param:{name}")
            if value is None or parameter is None:
                continue
            is_same = _is_same(parameter.detach(), value, call.rank)
            known_count += is_same is not None
            if is_same is False:
                differing.append(".".join(filter(None, (inside, name))))
    if differing:
        listed = ", ".join(differing[:4]) + (", ..." if len(differing) > 4 else "")
        yield (
            f"{len(differing)} of {known_count} parameters are not those that were recorded before "
            f"the step ({listed}): the module has other weights"
        )


def _nodes_before(call: RecordedCall) -> Iterator[Node]:
    """Yield the nodes that hold parameters as they were before the call's step, if known."""
    head, trace = call.node.head, call.node.trace
    if head.mode is Mode.EVAL and any(step.mode is Mode.TRAIN for step in trace.steps):
        return  # which train step came before it is not recorded
    for step in trace.setup if head.mode is Mode.EVAL or not head.step else trace.steps:
        is_before = step.is_setup or (step.mode is Mode.TRAIN and step.step == head.step - 1)
        if is_before and step.incarnation == head.incarnation:
            yield from (n for n in step.walk() if n.phase in (Phase.SETUP, Phase.PARAMS))


def _is_same(parameter: torch.Tensor, value: Value, rank: int | None) -> bool | None:
    """Say whether a parameter may be the recorded one; None where its statistics are not known."""
    is_other = value.dtype != dtype_name(parameter.dtype)
    # of a DTensor every operation may be a collective
    if is_other or not parameter.numel() or is_dtensor(type(parameter)) or parameter.is_meta:
        return None
    digest: Combined | Digest | None = value.per_rank.get(rank) if rank is not None else None
    if rank is None:
        digest = value.combined if value.global_shape == tuple(parameter.shape) else None
        if digest is None and value.distinct == 1:
            digest = next(iter(value.per_rank.values()))
    if digest is None or digest.number("count") != parameter.numel():
        return None
    numbers = parameter.double()
    statistics = (numbers.norm(), numbers.mean(), numbers.min(), numbers.max())
    size = float(numbers.abs().max())
    for name, number, scale in zip(_STATISTICS, statistics, (float(statistics[0]), *[size] * 3)):
        recorded = digest.number(name)
        if recorded is None:
            return None
        if not abs(float(number) - recorded) <= _SAME * max(scale, abs(recorded)):
            return False
    return True
