"""Events of a root: values at setup, gradients before and parameters after an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from rankscope.agent.hooks.modules import (
    ModuleInfo,
    ModuleTable,
    Root,
    gradient_of,
    own_buffers,
    own_parameters,
    parameters_of_module,
)
from rankscope.agent.recorder import DefinitionWriter, Recorder
from rankscope.agent.values.valuereader import HeldValue, ValueReader
from rankscope.capture.describe import ParameterMarks, activation_marks
from rankscope.capture.torch_internals.distributed import is_dtensor
from rankscope.capture.torch_internals.tensors import inside_gradients, invisible
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.value import ValueFlag

_ABSENT = int(ValueFlag.ABSENT)
_UNHELD, _CARRIED = int(ValueFlag.UNHELD), int(ValueFlag.CARRIED)
_NO_SYNC = int(ValueFlag.NO_SYNC)
_Part = TypeVar("_Part")


class RootEvents:
    """Records whole roots at once; parameters and gradients are those of `named_parameters()`."""

    def __init__(
        self,
        table: ModuleTable,
        recorder: Recorder,
        values: ValueReader,
        definitions: DefinitionWriter,
        phases: tuple[str, ...],
    ) -> None:
        self.table = table
        self.recorder = recorder
        self.values = values
        self._definitions = definitions
        self._phases = frozenset(phases)
        self._with_buffers: set[Root] = set()

    def wants(self, phase: Phase) -> bool:
        """True where the setting `phases` takes this event and values are taken at all."""
        return phase.word in self._phases and self.values.is_on

    def modules(self, root: Root) -> Iterator[tuple[ModuleInfo, torch.nn.Module]]:
        """Yield the root itself, and the modules inside that the setting `paths` takes."""
        for info, module in self.table.of_root(root):
            if info.is_selected or not info.path:
                yield info, module

    def setup(self, root: Root) -> None:
        """Record modules, parameters and buffers before the first forward of a root. If full
        tensors are kept, parameters on a mesh are always described: a local tensor of a sharded
        model may not show its placement."""
        self._definitions.write_root(root)
        self._write_marks(root)
        if self.wants(Phase.SETUP) or (self.values.keeps and _is_placed(root)):
            self._record(root, _Event(Phase.SETUP))

    def _write_marks(self, root: Root) -> None:
        with invisible():
            marks = ParameterMarks(self.table.with_wrappers(root))
            definitions: list[tuple[ModuleInfo, dict[str, object]]] = [
                (info, {"name": name, **mark.as_fields()})
                for info, module in self.table.of_root(root)
                for name, parameter in own_parameters(module).items()
                if parameter is not None
                if (mark := marks.of(module, parameter)) is not None
            ]
            definitions += [
                (info, {"name": slot, "activation": True, **mark.as_fields()})
                for info, module in self.table.of_root(root)
                for slot, mark in activation_marks(module)
            ]
        for info, fields in definitions:
            self.recorder.define("mark", module=self._definitions.of(info), **fields)

    def gradients(
        self,
        step: int,
        ordinal: int,
        chosen: frozenset[int] | None,
        *,
        flags: int = 0,
        unheld: frozenset[int] = frozenset(),
        carried: frozenset[int] = frozenset(),
        unsynced: frozenset[int] | None = None,
        left: Mapping[int, HeldValue] | None = None,
        extras: Sequence[tuple[str, torch.Tensor]] = (),
    ) -> dict[int, bool]:
        """Record final gradients; return whether each is what was left. Parameters are given by
        identity.

        Args:
            ordinal: how many optimizers have stepped in this step before.
            chosen: parameters to record; None for all.
            unheld: parameters that no optimizer holds.
            carried: parameters that had a gradient before backward began.
            unsynced: parameters whose gradients the last backward pass was not to reduce, if known.
            left: what the last backward pass left.
            extras: (slot, tensor) of what belongs to the event itself.
        """
        as_left: dict[int, bool] = {}
        if not self.wants(Phase.GRADS):
            return as_left
        with invisible():
            now = self.table.unsynced_parameters()
        unsynced = now if unsynced is None else now & unsynced
        marks = (unheld, _UNHELD), (carried, _CARRIED), (unsynced, _NO_SYNC)
        event = _Event(Phase.GRADS, step, ordinal, flags, chosen, marks, left or {}, tuple(extras))
        for root in self.table.roots:
            self._record(root, event, as_left)
        return as_left

    def parameters(
        self, step: int, ordinal: int, chosen: frozenset[int] | None, *, flags: int = 0
    ) -> None:
        """Record parameters after an optimizer step; with the first in a step all buffers."""
        if not self.wants(Phase.PARAMS):
            return
        for root in self.table.roots:
            self._record(root, _Event(Phase.PARAMS, step, ordinal, flags, chosen))

    def has_gradients(self) -> bool:
        """True where a parameter of a root has a gradient now."""
        with invisible():
            return any(map(has_gradient, self.table.parameters()))

    def parameters_where(
        self, chosen: Set[int], holds: Callable[[torch.Tensor], bool]
    ) -> frozenset[int]:
        """Return which of these parameters (identities) satisfy a condition."""
        if not chosen:
            return frozenset()
        with invisible():
            return frozenset(
                id(parameter)
                for parameter in self.table.parameters()
                if id(parameter) in chosen and holds(parameter)
            )

    def with_gradient(self, parameters: Iterable[torch.Tensor]) -> frozenset[int]:
        """Return which parameters (identities) have a gradient that is not known to be zero."""
        if not self.wants(Phase.GRADS):
            return frozenset()
        with invisible():
            return frozenset(
                id(parameter)
                for parameter in parameters
                if (gradient := gradient_of(parameter)) is not None
                and not self.values.is_zero(gradient)
            )

    def end_step(self) -> None:
        """Forget whose buffers were recorded: they go with the first event of a step."""
        self._with_buffers.clear()

    def write(
        self,
        root: Root,
        phase: Phase,
        step: int,
        ordinal: int,
        parts: Iterable[tuple[ModuleInfo, Sequence[_Part]]],
        record: Callable[[ModuleInfo, _Part, int], None],
        time_ns: int = 0,
    ) -> None:
        """Write one event of a root: a call for it, and one below for every module of `parts` with
        values. The first part is the root's own call, and may be empty. `record` writes one value
        of a module into the call of that number, under `invisible()`."""
        top: int | None = None
        for info, items in parts:
            if top is not None and not items:
                continue
            sequence = self.recorder.enter(
                self._definitions.of(info), root.definition, top, Mode.TRAIN, step, None, phase,
                ordinal, time_ns,
            )  # fmt: skip
            with invisible():
                for item in items:
                    record(info, item, sequence)
            if top is None:
                top = sequence
            else:
                self.recorder.exit(sequence, time_ns=time_ns)
        if top is not None:
            self.recorder.exit(top, time_ns=time_ns)

    def _record(self, root: Root, event: _Event, as_left: dict[int, bool] | None = None) -> None:
        """Record an event of a root that it concerns; gradients go into `as_left`."""
        chosen, top = event.chosen, root.module()
        if chosen is not None and (
            top is None or not any(id(p) in chosen for p in parameters_of_module(top))
        ):
            return

        def read(info: ModuleInfo, item: _Item, sequence: int) -> None:
            slot, tensor, flags, is_described, owner = item
            is_as_left = False
            if tensor is None:
                self.values.note(None, sequence, slot, event.phase, flags | _ABSENT)
            elif is_described:
                self.values.describe(tensor, sequence, slot, event.phase, flags)
            else:
                is_as_left = self.values.read(
                    tensor, sequence, info.path, slot, event.phase,
                    flags=flags, samples=False,
                    earlier=event.left_gradients.get(owner) if owner else None,
                )  # fmt: skip
            if as_left is not None and owner:
                as_left[owner] = is_as_left

        parts = self._parts(root, event)
        self.write(root, event.phase, event.step, event.ordinal, parts, read)
        if event.phase is Phase.PARAMS:
            self._with_buffers.add(root)

    def _parts(self, root: Root, event: _Event) -> Iterator[tuple[ModuleInfo, list[_Item]]]:
        extras = [_Item(slot, tensor) for slot, tensor in event.extras]
        for info, module in self.modules(root):
            with invisible():
                items = list(self._items(root, info, module, event))
            yield info, items + extras
            extras = []

    def _items(
        self, root: Root, info: ModuleInfo, module: torch.nn.Module, event: _Event
    ) -> Iterable[_Item]:
        is_grads, chosen = event.phase is Phase.GRADS, event.chosen
        parameters = own_parameters(module)
        for name in info.own_parameters:
            parameter = parameters.get(name)
            if parameter is None or (chosen is not None and id(parameter) not in chosen):
                continue
            slot = f"{'grad' if is_grads else 'param'}:{name}"
            is_asked = self.wants(event.phase) and self.values.wants(slot)
            if event.phase is Phase.SETUP and is_dtensor(type(parameter)):
                is_read = is_asked and self.values.records_numbers(info.path, slot)
                yield _Item(slot, parameter, event.flags, is_described=not is_read)
                continue
            if not is_asked:
                continue
            if not is_grads:
                yield _Item(slot, inside_gradients(parameter), event.flags)
            elif parameter.requires_grad:
                gradient, flags = gradient_of(parameter), event.flags
                for marked, flag in event.marks if gradient is not None else ():
                    flags |= flag if id(parameter) in marked else 0
                yield _Item(slot, gradient, flags, owner=id(parameter))
        if is_grads or root in self._with_buffers or not self.wants(event.phase):
            return
        for name, buffer in own_buffers(module).items():
            if buffer is not None and self.values.wants(f"buffer:{name}"):
                yield _Item(f"buffer:{name}", buffer)


def _is_placed(root: Root) -> bool:
    top = root.module()
    return top is not None and any(is_dtensor(type(p)) for p in parameters_of_module(top))


def has_gradient(parameter: torch.Tensor) -> bool:
    """True where a parameter has a gradient now."""
    return gradient_of(parameter) is not None


@dataclass(frozen=True, slots=True)
class _Event:
    phase: Phase
    step: int = 0
    ordinal: int = 0
    flags: int = 0
    chosen: frozenset[int] | None = None
    marks: tuple[tuple[frozenset[int], int], ...] = ()
    """Parameters by identity, and the flag that their gradients get."""
    left_gradients: Mapping[int, HeldValue] = field(default_factory=dict)
    extras: tuple[tuple[str, torch.Tensor], ...] = ()


class _Item(NamedTuple):
    slot: str
    tensor: torch.Tensor | None
    flags: int = 0
    is_described: bool = False
    owner: int = 0
    """Identity of the parameter that a gradient belongs to."""
