"""Lightning: `Trainer(..., callbacks=[RankscopeMonitor()])`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the same under its other name
    from pytorch_lightning import Callback

from rankscope.integrations.training import TracedTraining

__all__ = ["RankscopeMonitor"]


class RankscopeMonitor(Callback):  # type: ignore[misc]  # read without its types
    """Traces `trainer.fit(...)` and says the verdict when it ends.

    A train step ends with the batch in which the optimizers stepped: accumulated batches and the
    several optimizers of manual optimization are one step. Validation, and the check before
    training, lie in eval steps of their own.
    """

    def __init__(self, **settings: object) -> None:
        """Trace nothing yet.

        Args:
            **settings: any setting by its keyword (`steps="0-2"`, `out="trace"`); the rest comes
                from `RANKSCOPE_*` variables and defaults.
        """
        self._training = TracedTraining(settings)
        self._optimizer_steps = 0

    @property
    def path(self) -> Path | None:
        """The trace folder, once training has ended, on the rank that speaks for the job; None on
        all others, and where `rankscope run` traces the job."""
        return self._training.path

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        """Begin the trace; the process group is there."""
        self._training.begin()
        self._optimizer_steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """End the train step where the optimizers stepped in this batch."""
        if trainer.global_step != self._optimizer_steps:
            self._optimizer_steps = trainer.global_step
            self._training.step()

    def on_fit_end(self, *_: Any) -> None:
        """End the trace and say the verdict."""
        self._training.end()
