"""Events of a root: its parameters and buffers at setup, its gradients before and parameters after
an optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from rankscope.agent.modules import ModuleInfo, ModuleTable, Root, own_buffers, own_parameters
from rankscope.agent.recorder import Recorder
from rankscope.agent.values import ValueReader
from rankscope.capture.invisible import invisible
from rankscope.record.call import Mode, Phase
from rankscope.record.value import ValueFlag

__all__ = ["ParameterEvents"]


class ParameterEvents:
    """Records whole roots at once; parameters and gradients are those of `named_parameters()`."""

    def __init__(
        self,
        table: ModuleTable,
        recorder: Recorder,
        values: ValueReader,
        define: Callable[[ModuleInfo], int],
        phases: tuple[str, ...],
    ) -> None:
        self._table = table
        self._recorder = recorder
        self._values = values
        self._define = define
        self._phases = frozenset(phases)

    def wants(self, phase: Phase) -> bool:
        """True where the setting `phases` takes this event and values are taken at all."""
        return phase.word in self._phases and self._values.is_on

    def setup(self, root: Root) -> None:
        """Record parameters and buffers before the first forward of a root."""
        if self.wants(Phase.SETUP):
            self._event(root, Phase.SETUP, Mode.TRAIN, 0, 0, None)

    def gradients(self, step: int, ordinal: int, held: frozenset[int], *, is_scaled: bool) -> None:
        """Record final gradients of every root.

        Args:
            step: the train step.
            ordinal: how many optimizers have stepped in this step before.
            held: identities of the parameters to record; empty for all.
            is_scaled: the optimizer divides them by the loss scale itself.
        """
        if not self.wants(Phase.GRADS):
            return
        flags = int(ValueFlag.SCALED) if is_scaled else 0
        for root in self._table.roots:
            self._event(root, Phase.GRADS, Mode.TRAIN, step, ordinal, held, flags)

    def parameters(self, step: int, ordinal: int, held: frozenset[int]) -> None:
        """Record parameters and buffers of every root, just after an optimizer step."""
        if not self.wants(Phase.PARAMS):
            return
        for root in self._table.roots:
            self._event(root, Phase.PARAMS, Mode.TRAIN, step, ordinal, held)

    def _event(
        self,
        root: Root,
        phase: Phase,
        mode: Mode,
        step: int,
        ordinal: int,
        held: frozenset[int] | None,
        flags: int = 0,
    ) -> None:
        """Record one event of a root: a call for it, and one below it for every module that owns
        something.
        """
        parent: int | None = None
        for info in self._table.of_root(root):
            module = info.module()
            if module is None or (info.path and not info.is_selected):
                continue
            items = list(self._items(info, module, phase, held))
            if parent is not None and not items:
                continue
            sequence = self._recorder.enter(
                self._define(info), root.definition, parent, mode, step, None, phase, ordinal
            )
            with invisible():
                for slot, tensor in items:
                    if tensor is None:
                        self._values.absent(sequence, slot, phase)
                    else:
                        self._values.read(tensor, sequence, slot, phase, flags=flags, samples=False)
            if parent is None:
                parent = sequence
            else:
                self._recorder.exit(sequence)
        if parent is not None:
            self._recorder.exit(parent)

    def _items(
        self, info: ModuleInfo, module: torch.nn.Module, phase: Phase, held: frozenset[int] | None
    ) -> Iterable[tuple[str, torch.Tensor | None]]:
        parameters = own_parameters(module)
        for name in info.own_parameters:
            parameter = parameters.get(name)
            if parameter is None or (held and id(parameter) not in held):
                continue
            kind = "grad" if phase is Phase.GRADS else "param"
            slot = f"{kind}:{name}"
            if not self._values.wants(slot):
                continue
            if phase is not Phase.GRADS:
                yield slot, parameter
            elif parameter.requires_grad:
                with invisible():
                    gradient = parameter.grad
                yield slot, gradient
        if phase is not Phase.GRADS:
            for name, buffer in own_buffers(module).items():
                if buffer is not None and self._values.wants(f"buffer:{name}"):
                    yield f"buffer:{name}", buffer
