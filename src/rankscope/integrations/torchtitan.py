"""torchtitan: `--override.imports rankscope.integrations.torchtitan.traced` on its command line;
the config of the training stays as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchtitan.config.override import derive, override
from torchtitan.tools.profiler import Profiler

from rankscope.integrations.training import TracedTraining

__all__ = ["TracingProfiler", "traced"]


class TracingProfiler(Profiler):  # type: ignore[misc]  # read without its types
    """torchtitan's profiler, which also traces the training and says the verdict when it ends.

    A train step ends where torchtitan counts one, behind all its micro-batches. Where the training
    ends by an exception, the trace ends with the process and names it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Profiler.Config):  # type: ignore[misc]  # as above
        """What the profiler takes, and any setting of rankscope by its keyword."""

        settings: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, **runtime: Any) -> None:
        super().__init__(config, **runtime)
        self._training = TracedTraining(config.settings)

    def __enter__(self) -> TracingProfiler:
        super().__enter__()
        self._training.begin()
        return self

    def step(self) -> None:
        """End the train step."""
        self._training.step()
        super().step()

    def __exit__(self, kind: Any, error: Any, where: Any) -> bool:
        if kind is None:
            self._training.end()
        return bool(super().__exit__(kind, error, where))


@override(target=Profiler.Config, description="rankscope traces the training")  # type: ignore[untyped-decorator]  # as above
def traced(config: Any, **settings: Any) -> Any:
    """Put `TracingProfiler` in the place of the profiler; `settings` are those of rankscope."""
    return derive(config, TracingProfiler.Config, settings=settings)
