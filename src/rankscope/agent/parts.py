"""What works together while a spool is open: made once, when the first call that matters comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from rankscope.agent.guard import Guard
from rankscope.agent.hooks.callstack import Scope
from rankscope.agent.hooks.callvalues import CallValues, CallWishes
from rankscope.agent.hooks.definitions import DefinitionWriter
from rankscope.agent.hooks.install import HookSet
from rankscope.agent.hooks.modules import ModuleInfo, ModuleTable
from rankscope.agent.hooks.tracer import Tracer
from rankscope.agent.recorder import Recorder
from rankscope.agent.steps.optimizers import OptimizerSearch
from rankscope.agent.steps.updates import Updates
from rankscope.agent.values.parameters import ParameterEvents
from rankscope.agent.values.tensorstore import TensorStore
from rankscope.agent.values.valuereader import ValueReader
from rankscope.capture.describe import Describer
from rankscope.record.streams import RankIdentity
from rankscope.settings import Settings
from rankscope.spool.writer import SpoolWriter

__all__ = ["Opened", "SessionParts", "parts_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A spool that was opened for this process, its identity already written."""

    identity: RankIdentity
    writer: SpoolWriter
    recorder: Recorder
    step_trigger_folder: Path | None = None
    """Folder in which the traced ranks agree on a step, None for a rank that is alone."""
    keeper: TensorStore | None = None
    """Keeps full tensors, None where none were asked for."""
    is_launched: bool = False
    """A launcher of ours has the last word on the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """What a session works with from then on."""

    rank: int
    recorder: Recorder
    table: ModuleTable
    values: ValueReader
    definitions: DefinitionWriter
    call_values: CallValues
    tracer: Tracer
    parameters: ParameterEvents
    updates: Updates


def parts_of(
    opened: Opened,
    settings: Settings,
    guard: Guard,
    hooks: HookSet,
    optimizers: OptimizerSearch,
    wishes: CallWishes,
    open_scope: Callable[[ModuleInfo, nn.Module], Scope | None],
    follow_own_hooks: Callable[[ModuleInfo], None],
) -> SessionParts:
    """Make the parts, and have the hooks call the tracer."""
    recorder, rank = opened.recorder, opened.identity.rank
    table = ModuleTable(enters_compiled=settings.compile == "eager", paths=settings.paths)
    values = ValueReader(recorder, Describer(rank), settings, opened.keeper)
    definitions = DefinitionWriter(recorder, table)
    call_values = CallValues(guard, recorder, values, settings, wishes)
    tracer = Tracer(
        recorder, definitions, table, values, call_values, settings, open_scope,
        hooks.stands_behind_inputs_of, hooks.stands_behind_outputs_of,
        follow_own_hooks, hooks.leave_modules,
    )  # fmt: skip
    parameters = ParameterEvents(table, recorder, values, definitions.of, settings.phases)
    hooks.follow_with(
        before=tracer.before_forward,
        after=tracer.after_forward,
        own_input=tracer.own_input_hook,
        own_output=tracer.own_output_hook,
    )
    updates = Updates(table, recorder, parameters, optimizers)
    call_values.gradients.begins = updates.backward_begins
    return SessionParts(
        rank=rank,
        recorder=recorder,
        table=table,
        values=values,
        definitions=definitions,
        call_values=call_values,
        tracer=tracer,
        parameters=parameters,
        updates=updates,
    )
