"""What a digest costs: nanoseconds an element by dtype and shape, microseconds a small value.

    OMP_NUM_THREADS=1 python tests/lab/perf/digest.py [--samples]

A benchmark, not a test: it asserts nothing. Medians of many repeats, with the memory of the
digester cleared before each, so that nothing is reused except in the line that says so.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from rankscope.capture.describe import Describer
from rankscope.capture.digest import Digester
from rankscope.capture.torch_internals.tensors import invisible

LARGE = [
    (2, 128, 512),
    (2, 128, 1536),
    (2, 128, 4096),
    (2, 8, 128, 64),
    (254, 1000),
    (1_000_003,),
    (200_000, 3),
    (4, 300_001),
]
SMALL = [(), (8,), (512,), (2, 128), (2, 128, 8), (64, 64)]
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def microseconds(call: Callable[[], object], repeats: int = 60) -> float:
    call()
    taken = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        taken.append(time.thread_time() - start)
    return statistics.median(taken) * 1e6


def line(name: str, us: float, count: int) -> None:
    print(f"{name:42s} {us:9.1f} us {us * 1e3 / max(count, 1):9.3f} ns/element")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", action="store_true", help="keep per-sample sketches too")
    samples = parser.parse_args().samples
    torch.set_num_threads(1)
    digester, describer = Digester(), Describer(0)

    def fresh(x: torch.Tensor) -> None:
        digester.end_step()
        digester.read(x, None, samples=samples)

    for shape in LARGE + SMALL:
        x = torch.randn(shape)
        line(f"float32 {list(shape)}", microseconds(lambda x=x: fresh(x)), x.numel())  # type: ignore[misc]
    for dtype in DTYPES:
        x = (torch.randn(2, 128, 512) * 10).to(dtype)
        line(
            f"{str(dtype).removeprefix('torch.')} [2, 128, 512]",
            microseconds(lambda x=x: fresh(x)),
            x.numel(),
        )  # type: ignore[misc]
    x = torch.randn(512, 256).t()
    line("float32 [256, 512] transposed", microseconds(lambda: fresh(x)), x.numel())
    y = torch.randn(2, 128, 512)
    z = y.clone()
    z[0, 0, 0] = float("nan")
    line("float32 [2, 128, 512] with a NaN", microseconds(lambda: fresh(z)), z.numel())
    r = y.relu()
    line("float32 [2, 128, 512] after relu", microseconds(lambda: fresh(r)), y.numel())  # type: ignore[misc]
    digester.read(y, None, samples=samples)
    line(
        "the same object again (hash only)",
        microseconds(lambda: digester.read(y, None, samples=samples)),
        y.numel(),
    )
    line("describe a known kind", microseconds(lambda: describer.describe(y)), 1)

    def enter() -> None:
        with invisible():
            pass

    line("with invisible()", microseconds(enter), 1)


if __name__ == "__main__":
    main()
