"""What all events of a root share: which modules and parameters they go over, and the calls that
stand for them in the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from rankscope.agent.hooks.definitions import DefinitionWriter
from rankscope.agent.hooks.members import own_parameters
from rankscope.agent.hooks.modules import ModuleInfo, ModuleTable, Root
from rankscope.agent.recorder import Recorder
from rankscope.agent.values.valuereader import ValueReader
from rankscope.capture.invisible import invisible
from rankscope.record.call import Mode
from rankscope.record.phases import Phase

__all__ = ["RootEvents"]

_Part = TypeVar("_Part")


class RootEvents:
    """Walks over roots, and writes the calls of their events: one for the root, and one below it
    for each of its modules.
    """

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
        self.definitions = definitions
        self._phases = frozenset(phases)

    def wants(self, phase: Phase) -> bool:
        """True where the setting `phases` takes this event and values are taken at all."""
        return phase.word in self._phases and self.values.is_on

    def modules(self, root: Root) -> Iterator[tuple[ModuleInfo, torch.nn.Module]]:
        """Yield the modules of a root that events go over: itself, and what the setting `paths`
        takes of those inside.
        """
        for info in self.table.of_root(root):
            module = info.module()
            if module is not None and (info.is_selected or not info.path):
                yield info, module

    def parameters(
        self, root: Root
    ) -> Iterator[tuple[ModuleInfo, torch.nn.Module, str, torch.Tensor]]:
        """Yield every parameter of a root with its module and its name there, whatever the setting
        `paths` takes. The caller holds `invisible()`.
        """
        for info in self.table.of_root(root):
            module = info.module()
            if module is not None:
                for name, parameter in own_parameters(module).items():
                    if parameter is not None:
                        yield info, module, name, parameter

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
        """Write one event of a root: a call for it, and one below for every module of `parts` that
        has something. The first part is the root's own call, and may have nothing.

        `record` writes one thing of a module into the call of that number, under `invisible()`;
        the last three numbers are as for `Recorder.enter`.
        """
        top: int | None = None
        for info, own in parts:
            if top is not None and not own:
                continue
            sequence = self.recorder.enter(
                self.definitions.of(info), root.definition, top, Mode.TRAIN, step, None, phase,
                ordinal, time_ns,
            )  # fmt: skip
            with invisible():
                for each in own:
                    record(info, each, sequence)
            if top is None:
                top = sequence
            else:
                self.recorder.exit(sequence, time_ns=time_ns)
        if top is not None:
            self.recorder.exit(top, time_ns=time_ns)
