"""Compiles the fused kernels for one kind of GPU, without a GPU: `python -m ... cuda-90`.

This module and the kernels alone import Triton, and no rank imports either.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import Any, Final

from rankscope.capture.device.fusedcache import (
    CombineVariant,
    CompiledImage,
    ReadVariant,
    lock_for_building,
    missing_variants,
    obstacle,
    save_failure,
    save_image,
    triton_version,
    variants,
)
from rankscope.capture.device.fusedplan import BLOCK

COMBINE_BLOCK: Final = 128
_WARPS: Final = 4
_MOST_PROCESSES: Final = 8
_NICENESS: Final = 10
_MOST_SECONDS: Final = 3600
_MOST_CHARACTERS: Final = 300  # of what a compiler says
_TABLES: Final = {
    "table": "*fp32", "same": "*u8", "row_keys": "*i64", "row_offsets": "*i64",
    "row_limits": "*i32", "row_weights": "*fp32", "column_keys": "*i64",
    "column_offsets": "*i64", "column_factors": "*fp32", "counts": "*i64", "row": "*fp64",
}  # fmt: skip


def constants_of(variant: ReadVariant | CombineVariant) -> dict[str, Any]:
    """Return what a kernel is compiled for, by the names of its arguments."""
    if isinstance(variant, CombineVariant):
        return {"BLOCK": COMBINE_BLOCK}
    return {
        "KIND": variant.kind,
        "DOUBLE": variant.is_double,
        "FLOATING": variant.is_floating,
        "WIDE": variant.is_wide,
        "PLAIN": variant.is_plain,
        "FULL": variant.is_aligned,
        "ALIGN": variant.step,
        "BLOCK": BLOCK,
    }


def compile_for(architecture: str, variant: ReadVariant | CombineVariant) -> Any:
    """Return Triton's compiled kernel for an architecture: `cuda-90`, `hip-gfx942`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rankscope.capture.device import fusedkernels

    is_read = isinstance(variant, ReadVariant)
    kernel = fusedkernels.read_value if is_read else fusedkernels.combine_partials
    constants, names = constants_of(variant), kernel.arg_names
    words = f"*u{8 * variant.word_bytes}" if isinstance(variant, ReadVariant) else ""
    types = {"words": words, "numbers": "*fp64" if variant.is_double else "*fp32",
             "elements": "i64", **_TABLES}  # fmt: skip
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = [n for n in names if signature[n].startswith("*") and n not in ("words", "row")]
    if isinstance(variant, ReadVariant) and variant.is_aligned:
        aligned.append("words")
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    backend, _, name = architecture.partition("-")
    target = GPUTarget(
        backend, int(name) if backend == "cuda" else name, _lanes_of_warp(architecture)
    )
    # fused multiply and add: the sums are longer than they are exact to the last bit anyway
    return triton.compile(
        source, target=target, options={"num_warps": _WARPS, "enable_fp_fusion": True}
    )


def _lanes_of_warp(architecture: str) -> int:
    """Return how many threads run together: 64 on AMD's GPUs before gfx10, else 32."""
    backend, _, name = architecture.partition("-gfx")
    return 64 if backend == "hip" and int(name[:-2]) < 10 else 32


def image_of(compiled: Any) -> CompiledImage:
    """Return what the driver needs of Triton's compiled kernel."""
    metadata = compiled.metadata
    threads = metadata.num_warps * metadata.target.warp_size
    return CompiledImage(metadata.name, bytes(compiled.kernel), threads, metadata.shared)


def _compile_one(architecture: str, variant: ReadVariant | CombineVariant) -> None:
    save_image(architecture, variant, image_of(compile_for(architecture, variant)))


def _begin(folder: str) -> None:
    os.nice(_NICENESS)
    os.environ["TRITON_CACHE_DIR"] = folder  # the user's own stays as it is
    os.environ.pop("TRITON_INTERPRET", None)


def build(architecture: str) -> int:
    """Compile missing kernels for an architecture; return their number, 0 while another process
    compiles. The last line on stderr says why kernels are still missing."""
    if reason := obstacle():
        sys.stderr.write(f"no kernels for {architecture} can be compiled: {reason}\n")
        return 0
    with lock_for_building(architecture) as is_ours:
        if not is_ours:
            sys.stderr.write(f"another process compiles kernels for {architecture} now\n")
        absent = missing_variants(architecture) if is_ours else []
        if not absent:
            return 0
        processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
        with (
            tempfile.TemporaryDirectory(prefix="rankscope-triton-") as folder,
            # processes, not threads: LLVM may abort, and takes only its own variant along
            ProcessPoolExecutor(processes, initializer=_begin, initargs=(folder,)) as pool,
        ):
            running = {v.name: pool.submit(_compile_one, architecture, v) for v in absent}
            ended = [(name, future.exception()) for name, future in running.items()]
        failed = [(name, error) for name, error in ended if error is not None]
        sentence = ""
        for name, error in reversed(failed):  # one that does not compile stops no other
            words = " ".join(f"{name}: {type(error).__name__}: {error}".split())
            sentence = (
                f"Triton {triton_version()} cannot compile {len(failed)} of {len([*variants()])} "
                f"kernels for {architecture}: {words[:_MOST_CHARACTERS]}"
            )
            sys.stderr.write(f"{sentence}\n")
        # a full disk or a compiler that was killed says nothing of the next time
        if not any(isinstance(error, (OSError, BrokenExecutor)) for _, error in failed):
            save_failure(architecture, sentence)
        return len(absent)


if __name__ == "__main__":
    signal.alarm(_MOST_SECONDS)  # a compiler that hangs would hold the lock
    build(sys.argv[1])
