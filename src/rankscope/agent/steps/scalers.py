"""Optimizer steps that never happened: a GradScaler found inf or NaN and skipped them.

A skipped step runs no hook of torch's. So a function of ours stands in `GradScaler.step` while a
traced step runs, and looks whether the optimizer has stepped meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler

from rankscope.agent.standins import StandIns
from rankscope.capture.dtypestorage import number_on_host
from rankscope.capture.invisible import invisible


class ScalerWatch(StandIns):
    """Tells of skipped steps between `put_on` and `take_off`; both may be called at any time."""

    def __init__(self, skipped: Callable[[torch.optim.Optimizer], None]) -> None:
        """`skipped` is told of an optimizer that a GradScaler did not step; it must not raise."""
        super().__init__()
        self._skipped = skipped
        self._stepped = 0

    def stepped(self) -> None:
        """Take note that an optimizer step began."""
        self._stepped += 1

    def put_on(self) -> None:
        """Stand in `GradScaler.step`."""
        self.put(GradScaler, "step", self._around)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(
            scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
        ) -> Any:
            before = self._stepped
            result = original(scaler, optimizer, *args, **kwargs)
            if self.is_on and self._stepped == before:
                self._stepped += 1  # another of ours may stand around theirs, around this one
                self._skipped(optimizer)
            return result

        return step


def scaling_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Return (slot, tensor) of the loss scale, and of whether inf or NaN was found, that a
    GradScaler hands a fused optimizer: that unscales and skips in its own kernel."""
    found = (
        (f"scaler:{name}", getattr(optimizer, name, None)) for name in ("grad_scale", "found_inf")
    )
    return [(slot, tensor) for slot, tensor in found if isinstance(tensor, torch.Tensor)]


def is_skipped_inside(optimizer: torch.optim.Optimizer) -> bool:
    """True where a fused optimizer is known to skip its step; on an accelerator nobody is asked."""
    found_inf = getattr(optimizer, "found_inf", None)
    if not isinstance(found_inf, torch.Tensor):
        return False
    with invisible():
        return bool(number_on_host(found_inf))
