"""What a standard deviation sums, by the compiled kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rankscope.capture.kernel import load

__all__ = ["kernel_squares"]


def kernel_squares() -> Callable[[torch.Tensor, float], float] | None:
    """Return a function of a contiguous float32 tensor on the host and a center: the sum of
    (x - center)**2, every difference and sum in double. None where there is no kernel.
    """
    kernel = load()
    if kernel is None:
        return None
    squares = kernel.squares_around
    return lambda tensor, center: squares(tensor.data_ptr(), tensor.numel(), center)
