"""The Trainer of transformers: `Trainer(..., callbacks=[RankscopeCallback()])`, or by name,
`report_to="rankscope"`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from rankscope.integrations.training import TracedCallback

__all__ = ["RankscopeCallback", "register"]


class RankscopeCallback(TracedCallback, TrainerCallback):  # type: ignore[misc]  # read without its types
    """Traces `trainer.train()` and says the verdict when it ends.

    A train step ends where the Trainer counts one: behind all its accumulated micro-batches, also
    where the optimizer was skipped. Evaluation lies in eval steps of its own.
    """

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
