"""The collectives of a session: when they are watched, and where in a step each belongs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rankscope.agent.collectives.interception import MESSAGES, CollectiveWatch
from rankscope.agent.collectives.recording import Collectives
from rankscope.agent.guard import Guard
from rankscope.agent.hooks.callstack import EventPlace, NodeMap, NodeSpan
from rankscope.agent.hooks.members import own_parameters
from rankscope.agent.hooks.modules import ModuleInfo, ModuleTable
from rankscope.agent.hooks.tracer import Tracer
from rankscope.agent.recorder import Recorder
from rankscope.agent.steps.stepmachine import RunningStep
from rankscope.agent.values.valuereader import ValueReader
from rankscope.capture.torch_internals.autograd import current_graph_task, current_node
from rankscope.capture.torch_internals.parallel import sharded_module_in_hand
from rankscope.globs import glob_matches
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.settings import Settings

__all__ = ["CollectiveTracing"]


class CollectiveTracing:
    """Watches collectives for one session."""

    def __init__(
        self,
        guard: Guard,
        settings: Settings,
        open_session: Callable[[], bool],
        running: Callable[[bool], RunningStep | None],
    ) -> None:
        """Watch nothing yet.

        Args:
            open_session: opens the spool, and hands over what is in it by `open`; False where this
                process is not traced.
            running: what runs, or is about to, outside every module call; None where it is not
                traced. Told whether it is a send or a receive.
        """
        self._open_session = open_session
        self._running = running
        self._is_wanted = Phase.COLLECTIVE.word in settings.phases
        self._paths = settings.paths
        self.select_too(())
        self._collectives = Collectives(self._place)
        self._messages = self._collectives.messages
        self._watch = CollectiveWatch(guard, self._collectives)
        self._nodes = NodeMap()
        self._owners: dict[int, ModuleInfo] = {}
        """By the identity of a parameter; made in a step that asks."""
        self._tracer: Tracer | None = None
        """None until the spool is open."""
        self.awaits_first = False
        """No step and no run of a schedule has begun: what is not a message builds a model."""

    def open(
        self, recorder: Recorder, values: ValueReader, tracer: Tracer, table: ModuleTable
    ) -> None:
        """Take what an open spool gives."""
        self._recorder, self._tracer, self._table = recorder, tracer, table
        self._outside = 0
        self._collectives.open(recorder, values)

    def expect_step(self, *, is_first: bool) -> None:
        """Watch from now on, because the next step is to be traced: a pipeline stage receives what
        it works on before its first forward of a step.

        Args:
            is_first: nothing was traced yet; only sends, receives and what a run of a pipeline
                schedule begins with are taken then, not what builds a model.
        """
        self.awaits_first = is_first
        if self._is_wanted:
            self._watch.put_on(only_groups=is_first)
        if is_first:
            self._messages.begin("start")

    def select_too(self, paths: tuple[str, ...]) -> None:
        """Take collectives outside every module call where the setting or these globs take ""."""
        self._takes_outside = any(glob_matches(glob, "") for glob in (*self._paths, *paths))

    def count_messages_from(self, point: str) -> None:
        """Number messages from here on, where every rank does: see `Collective.since`."""
        if self._watch.is_on:
            self._messages.begin(point)

    def put_on(self) -> None:
        """Watch while a traced step runs; safe to call again."""
        self.awaits_first = False
        if self._is_wanted and self._tracer is not None:
            self._watch.put_on()
            self._tracer.nodes = self._nodes

    def take_off(self) -> None:
        """Leave torch as it was; safe to call in any state."""
        self._watch.take_off()
        self._messages.lose()
        self._nodes.clear()
        if self._tracer is not None:
            self._tracer.nodes = None

    def end_step(self, mode: Mode, step: int) -> None:
        """Close what is open of a step."""
        self._nodes.clear()
        self._owners.clear()
        self._collectives.end_step(mode, step)

    def close(self) -> None:
        """Close whatever is open: the session ends."""
        self._collectives.end_step(None, None)

    # ------------------------------------------------------------------ places

    def _place(self, name: str) -> EventPlace | None:
        is_message = name in MESSAGES
        place = None
        if self._tracer is not None or (self._running(is_message) and self._open_session()):
            place = self._place_of(is_message)
        if place is None and is_message:
            self._messages.lose()
        return place

    def _place_of(self, is_message: bool) -> EventPlace | None:
        tracer = self._tracer
        assert tracer is not None  # the session is open
        frame = tracer.frame_around()
        if frame is not None:
            return tracer.place_in(frame.info, frame.scope, frame.sequence, frame.phase.word)
        issuer = "outside"
        if current_graph_task() != -1:
            span = self._span_in_backward()
            if span is not None:
                return tracer.place_in(span.info, span.scope, span.sequence, "backward")
            issuer = "backward"
        running = self._running(is_message)
        if running is None:
            return None
        if running.is_inside_optimizer:
            issuer = "optimizer"
        if not self._outside:
            self._outside = self._recorder.define(
                "module", root=0, path="", raw_path="", wrappers=(), opaque=False, **{"class": ""}
            )
        return EventPlace(
            self._outside, 0, None, running.mode, running.step, None, issuer, self._takes_outside,
            "",
        )  # fmt: skip

    def _span_in_backward(self) -> NodeSpan | None:
        """Return the module call whose backward this thread is in, as far as that is known."""
        node = current_node()
        if node is None:  # behind the graph: what a callback of the whole backward pass runs
            module = sharded_module_in_hand()
            info = self._table.get(module) if module is not None else None
            return None if info is None else self._nodes.latest(info)
        number, leaf = node
        return self._nodes.find(number) if leaf is None else self._span_of_owner(leaf)

    def _span_of_owner(self, parameter: torch.Tensor) -> NodeSpan | None:
        """Return the latest call of the module that owns a parameter."""
        if not self._owners:
            for root in self._table.roots:
                for info, module in self._table.of_root(root):
                    owned = own_parameters(module)
                    self._owners.update((id(owned[n]), info) for n in info.own_parameters)
        owner = self._owners.get(id(parameter))
        return None if owner is None else self._nodes.latest(owner)
