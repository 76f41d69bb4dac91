"""Compiles some fused kernels for GPUs that are not here, and prints their figures as JSON; with an
architecture, the threads of a block that one is launched with and was compiled for.

A program of its own: the tests beside it may have Triton interpret. With the argument `more` it
compiles those that differ less from these. Where this Triton cannot link for AMD's GPUs, it prints
its words for that under `cannot link`.
"""

from __future__ import annotations

import json
import re
import sys
import traceback

from rankscope.capture.device.fusedcache import CombineVariant, ReadVariant
from rankscope.capture.device.fusedcompile import compile_for, image_of
from tests.lab.perf.devicedigest import FIGURES, figures

CASES = {
    "cuda": [
        ("cuda-80", "bfloat16", True),
        ("cuda-80", "table", True),
        ("cuda-90", "float32", True),
        ("cuda-100", "float32", False),
    ],
    "cuda more": [("cuda-90", "bfloat16", True), ("cuda-100", "bfloat16", True)],
    "hip": [("hip-gfx942", "bfloat16", True)],
    "hip more": [("hip-gfx942", "float16", True)],
}


def threads(architecture: str) -> dict[str, int]:
    kernel = compile_for(architecture, CombineVariant(False))
    text = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
    (compiled,) = re.findall(r"(?:\.reqntid|\.max_flat_workgroup_size:)\s+(\d+)", text)
    return {"launched": image_of(kernel).threads, "compiled": int(compiled)}


def kernels(which: str) -> dict[str, dict[str, object]]:
    found = {}
    for architecture, kind, is_plain in CASES[which]:
        variant = ReadVariant(kind, is_plain, is_plain)
        numbers = dict(zip(FIGURES, figures(architecture, variant), strict=True))
        found[f"{architecture} {variant.name}"] = numbers
    return found


if __name__ == "__main__":
    which = " ".join(sys.argv[1:])
    try:
        print(json.dumps(kernels(which) if which in CASES else threads(which)))
    except Exception as error:
        if not re.search(r"ROCm linker .* not found", str(error)):
            raise
        traceback.print_exc()
        print(json.dumps({"cannot link": str(error)}))
