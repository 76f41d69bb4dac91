"""The Trainer of transformers: `Trainer(..., callbacks=[RankscopeCallback()])`, or by name,
`report_to="rankscope"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from rankscope.integrations.training import TracedTraining

__all__ = ["RankscopeCallback", "register"]


class RankscopeCallback(TrainerCallback):  # type: ignore[misc]  # read without its types
    """Traces `trainer.train()` and says the verdict when it ends.

    A train step ends where the Trainer counts one: behind all its accumulated micro-batches, also
    where the optimizer was skipped. Evaluation lies in eval steps of its own.
    """

    def __init__(self, **settings: object) -> None:
        """Trace nothing yet.

        Args:
            **settings: any setting by its keyword (`steps="0-2"`, `out="trace"`); the rest comes
                from `RANKSCOPE_*` variables and defaults.
        """
        self._training = TracedTraining(settings)

    @property
    def path(self) -> Path | None:
        """The trace folder, once training has ended, on the rank that speaks for the job; None on
        all others, and where `rankscope run` traces the job."""
        return self._training.path

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begin the trace."""
        self._training.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End the train step."""
        self._training.step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the trace and say the verdict."""
        self._training.end()


def register() -> None:
    """Make `report_to="rankscope"` mean `RankscopeCallback()`; call it before the Trainer is
    made."""
    INTEGRATION_TO_CALLBACK["rankscope"] = RankscopeCallback
