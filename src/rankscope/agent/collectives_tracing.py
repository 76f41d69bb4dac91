"""The collectives of a session: when they are watched, and where in a step each belongs."""

from __future__ import annotations

from collections.abc import Callable

from rankscope.agent.calls import Place
from rankscope.agent.collectives import Collectives
from rankscope.agent.collectives_watch import CollectiveWatch
from rankscope.agent.guard import Guard
from rankscope.agent.recorder import Recorder
from rankscope.agent.settings import Settings, matches
from rankscope.agent.tracer import Tracer
from rankscope.agent.values import ValueReader
from rankscope.capture.torch_internals import current_graph_task
from rankscope.record.call import Mode, Phase

__all__ = ["CollectiveTracing"]


class CollectiveTracing:
    """Watches collectives while a traced step runs."""

    def __init__(
        self,
        guard: Guard,
        recorder: Recorder,
        values: ValueReader,
        tracer: Tracer,
        settings: Settings,
        running: Callable[[], tuple[Mode, int, bool] | None],
    ) -> None:
        """Watch nothing yet.

        Args:
            guard: keeps what fails here out of the program.
            recorder: writes the calls.
            values: reads their tensors.
            tracer: knows the module calls that are open.
            settings: which phases and paths to take.
            running: mode and number of the traced step that runs, and whether an optimizer does;
                None where none is traced.
        """
        self._recorder = recorder
        self._tracer = tracer
        self._running = running
        self._is_wanted = Phase.COLLECTIVE.word in settings.phases
        self._takes_outside = matches(settings.paths, "")
        self._outside = 0
        """Definition of what issues collectives outside every module call."""
        self._collectives = Collectives(recorder, values, self._place)
        self._watch = CollectiveWatch(guard, self._collectives)

    def put_on(self) -> None:
        """Watch from now on; safe to call again."""
        if self._is_wanted:
            self._watch.put_on()

    def take_off(self) -> None:
        """Leave torch as it was; safe to call in any state."""
        self._watch.take_off()

    def end_step(self) -> None:
        """Close what is open of a step, and count anew."""
        self._collectives.end_step()

    def _place(self) -> Place | None:
        if self._tracer.is_inside:
            return self._tracer.place()
        running = self._running()
        if running is None:
            return None
        mode, step, is_inside_optimizer = running
        if current_graph_task() != -1:
            issuer = "backward"
        else:
            issuer = "optimizer" if is_inside_optimizer else "outside"
        if not self._outside:
            self._outside = self._recorder.define(
                "module", root=0, path="", raw_path="", wrappers=(), opaque=False, **{"class": ""}
            )
        return Place(self._outside, 0, None, mode, step, None, issuer, self._takes_outside)
