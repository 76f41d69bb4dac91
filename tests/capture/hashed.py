"""`mix64` in numpy: what the device's hashes are held to."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rankscope.capture.device.fusedplan import FIRST, SECOND, SHIFTS, powers

_BLOCK: Final = 1 << 12


def mix64(words: npt.NDArray[Any]) -> int:
    """Return the `mix64` hash of normalized flat words."""
    size = words.dtype.itemsize
    wide = words.view(f"<u{size}").astype(np.uint64)
    if size >= 4:
        wide ^= wide >> np.uint64(4 * size)
    low = powers(np.arange(1, _BLOCK + 1))
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        starts = powers(np.arange(0, wide.size, _BLOCK))
        for number, start in enumerate(range(0, wide.size, _BLOCK)):
            part = wide[start : start + _BLOCK]
            total += (part * low[: part.size]).sum(dtype=np.uint64) * starts[number]
        return int(_mix(np.array([total + np.uint64(wide.size)], dtype=np.uint64))[0])


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(SHIFTS[0]))) * np.uint64(FIRST)
    z = (z ^ (z >> np.uint64(SHIFTS[1]))) * np.uint64(SECOND)
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(SHIFTS[2]))
    return mixed
