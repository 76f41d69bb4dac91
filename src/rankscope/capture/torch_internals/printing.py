"""How the program has torch print tensors: `torch.set_printoptions`."""

from __future__ import annotations

import sys
from typing import NamedTuple


class PrintOptions(NamedTuple):
    """As torch names and begins with them."""

    precision: int = 4
    threshold: float = 1000
    edgeitems: int = 3


def print_options() -> PrintOptions:
    """Return what counts now; without torch's name for it, what torch begins with."""
    options = getattr(sys.modules.get("torch._tensor_str"), "PRINT_OPTS", PrintOptions())
    return PrintOptions(options.precision, options.threshold, options.edgeitems)
