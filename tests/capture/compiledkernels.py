"""Compiles some fused kernels for GPUs that are not here, and prints their figures as JSON; with an
architecture, the threads of a block that one is launched with and was compiled for.

A program of its own: the tests beside it may have Triton interpret. With the argument `more` it
compiles those that differ less from these.
"""

from __future__ import annotations

import json
import re
import sys

from rankscope.capture.device.fusedcache import CombineVariant, ReadVariant
from rankscope.capture.device.fusedcompile import compile_for, image_of
from tests.perf.devicedigest import FIGURES, figures

CASES = [
    ("cuda-80", "bfloat16", True),
    ("cuda-80", "table", True),
    ("cuda-90", "float32", True),
    ("cuda-100", "float32", False),
    ("hip-gfx942", "bfloat16", True),
]
MORE = [
    ("cuda-90", "bfloat16", True),
    ("cuda-100", "bfloat16", True),
    ("hip-gfx942", "float16", True),
]


def threads(architecture: str) -> dict[str, int]:
    kernel = compile_for(architecture, CombineVariant(False))
    text = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
    (compiled,) = re.findall(r"(?:\.reqntid|\.max_flat_workgroup_size:)\s+(\d+)", text)
    return {"launched": image_of(kernel).threads, "compiled": int(compiled)}


def main() -> None:
    found = {}
    for architecture, kind, is_plain in MORE if sys.argv[1:] == ["more"] else CASES:
        variant = ReadVariant(kind, is_plain, is_plain)
        numbers = dict(zip(FIGURES, figures(architecture, variant), strict=True))
        found[f"{architecture} {variant.name}"] = numbers
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["more"]):
        main()
    else:
        print(json.dumps(threads(sys.argv[1])))
