"""How the program has torch print tensors (`torch.set_printoptions`)."""

from __future__ import annotations

import sys
from typing import NamedTuple

__all__ = ["PrintOptions", "print_options"]


class PrintOptions(NamedTuple):
    """torch's own values, where the program has not set others."""

    precision: int = 4
    """Digits behind the point."""
    threshold: float = 1000
    """A tensor of more elements is shown by its edges."""
    edgeitems: int = 3
    """Items at each edge."""


def print_options() -> PrintOptions:
    """Return what counts now; without torch's name for it, what torch begins with."""
    options = getattr(sys.modules.get("torch._tensor_str"), "PRINT_OPTS", PrintOptions())
    return PrintOptions(options.precision, options.threshold, options.edgeitems)
