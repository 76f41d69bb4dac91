"""`mix64`, the hash of values that an accelerator reads: order-sensitive, and a sum.

With w[i] the normalized word of element i as an unsigned 64-bit number (-0 is +0, every NaN the
same one) and fold(w) = w ^ (w >> half of its bits) for words of 32 and 64 bits, fold(w) = w for
shorter ones,

    hash = mix(count + sum over i of fold(w[i]) * BASE**(i + 1))        modulo 2**64

A place in the sum is a power, and powers multiply where places add: a row and a column each bring a
factor, and the sum may be taken in any order. BASE is 5 modulo 8, so its powers differ for 2**62
places. The xxh3 of the host cannot be had that way; hashes of different algorithms never compare.
Neither keeps out somebody who looks for two values of one hash.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

BASE: Final = 0x9E6D4F0B8A3C7525
FIRST: Final = 0x05FE0D58184DD27D
SECOND: Final = 0xFEAE2DAA5057C593
SHIFTS: Final = (31, 29, 32)
"""mix(z): z ^= z >> 31, z *= FIRST, z ^= z >> 29, z *= SECOND, z ^= z >> 32."""


def powers(exponents: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return BASE to these powers, modulo 2**64; negative ones are inverses."""
    found = np.ones(exponents.shape, dtype=np.uint64)
    left = np.abs(exponents)
    inverse = pow(BASE, -1, 1 << 64)
    step = np.where(exponents < 0, np.uint64(inverse), np.uint64(BASE))
    while left.any():
        found = np.where(left & 1, found * step, found)
        step = step * step
        left >>= 1
    return found
