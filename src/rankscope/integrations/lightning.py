"""Lightning: `Trainer(..., callbacks=[RankscopeMonitor()])`."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:  # the same under its other name
    from pytorch_lightning import Callback

from rankscope.integrations.training import TracedCallback

__all__ = ["RankscopeMonitor"]


class RankscopeMonitor(TracedCallback, Callback):  # type: ignore[misc]  # read without its types
    """Traces `trainer.fit(...)` and says the verdict when it ends.

    A train step ends with the batch in which the optimizers stepped: accumulated batches and the
    several optimizers of manual optimization are one step. Validation, and the check before
    training, lie in eval steps of their own.
    """

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
