"""verl: a profiler tool beside its own, `global_profiler.tool=rankscope`. Importing this module
makes the name known; `VERL_USE_EXTERNAL_MODULES=rankscope.integrations.verl` has all workers do it.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from verl.utils.profiler import DistProfiler

from rankscope.integrations.training import TracedTraining

__all__ = ["TOOL", "StepTracer"]

TOOL = "rankscope"
"""The name in `global_profiler.tool`, and in `profiler.tool` of a role."""


class StepTracer:
    """Traces the RL steps of `global_profiler.steps` in one worker, each into a trace of its own.

    In a trace every optimizer step is a train step, and every forward without gradients (log
    probabilities, values, rewards) an eval step. The trace of a step lies in
    `<save_path>/rankscope-<role>-step<n>`: roles are jobs of their own, with ranks of their own.
    """

    def __init__(self, config: Any, role: str) -> None:
        """Trace nothing yet. `config`: the `ProfilerConfig` of the role; `role`: what distinguishes
        the ranks of this worker from those of other groups."""
        self._folder = Path(config.save_path or "outputs/profile")
        self._ranks = None if config.all_ranks else ",".join(map(str, config.ranks or [0]))
        self._role = role
        self._begun = 0
        self._training = TracedTraining({})

    def start(self, **facts: Any) -> None:
        """Begin the trace of an RL step; `profile_step` or `global_step` is its number."""
        number = facts.get("profile_step", facts.get("global_step", self._begun))
        self._begun += 1
        out = self._folder / f"rankscope-{self._role}-step{number}"
        self._training = TracedTraining({"steps": "all", "out": str(out), "ranks": self._ranks})
        self._training.begin(has_steps=False)

    def stop(self) -> None:
        """End it, and say the verdict on the rank that speaks for the worker's group."""
        self._training.end()


def _know_tool() -> None:
    """Have `DistProfiler` take our tool for the name, where it would do nothing for it."""
    original = DistProfiler.__init__
    if getattr(original, "__wrapped__", None) is not None:
        return

    @functools.wraps(original)
    def make(self: Any, rank: int, config: Any = None, *more: Any, **named: Any) -> None:
        original(self, rank, config, *more, **named)
        if getattr(config, "tool", None) == TOOL:
            role = named.get("save_file_prefix") or os.environ.get("WG_PREFIX") or "worker"
            self._impl = StepTracer(config, role)

    DistProfiler.__init__ = make


_know_tool()
