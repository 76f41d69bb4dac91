"""Every private name of torch that rankscope uses, in one place, each with what happens where it is missing.

torch's own tracing tools live off the same names; they change between releases. Nothing here raises
for a missing name: the feature falls back, and `MISSING` says which.
"""

from __future__ import annotations

import torch

__all__ = ["optional_dtypes"]


def optional_dtypes(*names: str) -> tuple[torch.dtype, ...]:
    """Return those of the named dtypes this torch has."""
    found = (getattr(torch, name, None) for name in names)
    return tuple(dtype for dtype in found if isinstance(dtype, torch.dtype))
