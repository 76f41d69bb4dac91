"""Compiles some fused kernels for GPUs that are not here, and prints their figures as JSON.

A program of its own: the tests beside it may have Triton interpret.
"""

from __future__ import annotations

import json

from rankscope.capture.device.fusedcache import ReadVariant
from tests.perf.devicedigest import FIGURES, figures

CASES = [
    *((f"cuda-{number}", "bfloat16", True) for number in (80, 90, 100)),
    ("hip-gfx942", "bfloat16", True),
    ("cuda-90", "float32", True),
    ("cuda-100", "float32", False),
    ("cuda-80", "table", True),
    ("hip-gfx942", "float16", True),
]

if __name__ == "__main__":
    found = {}
    for architecture, kind, is_plain in CASES:
        variant = ReadVariant(kind, is_plain, is_plain)
        numbers = dict(zip(FIGURES, figures(architecture, variant), strict=True))
        found[f"{architecture} {variant.name}"] = numbers
    print(json.dumps(found))
