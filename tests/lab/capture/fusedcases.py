"""Values read by fused kernels, interpreted, and by torch operations, beside the host's digest.

Run as a program: it has to decide whether Triton interprets before anything imports Triton.

    python -m tests.lab.capture.fusedcases SEED COUNT ELEMENTS    values of so many elements at most
    python -m tests.lab.capture.fusedcases shapes                 whole activations; minutes
    python -m tests.lab.capture.fusedcases spreads                small spreads, far first rows
    python -m tests.lab.capture.fusedcases broken                   a kernel that raises

Prints one JSON object: how many values, how many launches, the kernels used, and what went wrong.
"""

from __future__ import annotations

import json
import math
import random
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from rankscope.capture.device import fusedplan
from rankscope.capture.device.devicedigester import DeviceDigester
from rankscope.capture.device.fusedforms import FusedReader
from rankscope.capture.digest import Digester
from rankscope.capture.dtypestorage import elements, storage_of
from rankscope.capture.measuring import ValueNumbers
from rankscope.layout.placement import Ranges
from tests.capture.hashed import mix64
from tests.capture.test_device import (
    ACTIVATIONS,
    DTYPES,
    LARGE_ACTIVATIONS,
    MORE_DTYPES,
    SIZES,
    agree,
    values,
)
from tests.lab.capture import interpreteddriver

CPU = torch.device("cpu")
FOUND_BROKEN = [(4, 512, 512), (8, 512, 512), (2, 1024, 1024), (4, 2048, 4096), (32, 128, 1024)]


def random_cases(seed: int, count: int, most: int) -> Iterator[tuple[str, tuple]]:
    chance = random.Random(seed)
    for number in range(count):
        shape: list[int] = []
        for _ in range(chance.randint(0, 5)):
            room = most // max(1, math.prod(shape))
            sizes = [n for n in SIZES if 0 < n <= room] or [1]
            shape.append(chance.choice(sizes) if chance.random() < 0.98 else 0)
        chance.shuffle(shape)
        dtype = chance.choice(DTYPES + MORE_DTYPES)
        x = values(tuple(shape), dtype)
        how = []
        if dtype.is_floating_point and x.numel() and chance.random() < 0.4:
            scale = chance.choice([1e-44, 1e-30, 1e-20, 1e-12, 1e15, 1e25, 1e38])
            how.append(f"times {scale}")
            x = (x.double() * scale).to(dtype)
        if dtype.is_floating_point and x.numel() and chance.random() < 0.4:
            flat = x.reshape(-1)
            for number_ in (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e30):
                if chance.random() < 0.5 and dtype.itemsize > 1:
                    flat[chance.randrange(len(flat))] = number_
                    how.append(str(number_))
        if x.dim() > 1 and chance.random() < 0.5:
            first, second = chance.sample(range(x.dim()), 2)
            x = x.transpose(first, second)
            how.append(f"transposed {first} {second}")
        if x.dim() and chance.random() < 0.3:
            x = x[::2]
            how.append("every second")
        if x.dim() and x.shape[0] > 1 and chance.random() < 0.3:
            x = x[1:]
            how.append("without the first")
        if x.dim() and x.shape[0] and chance.random() < 0.1:
            x = x[:1].expand(min(7, max(1, most // max(1, x[:1].numel()))), *x.shape[1:])
            how.append("expanded")
        if x.dtype.is_complex and x.dtype != torch.complex32 and chance.random() < 0.5:
            x = x.conj()
            how.append("conjugate")
        batch_dim, samples = chance.choice([0, 1, -1]), chance.random() < 0.6
        ranges = random_ranges(chance, tuple(x.shape))
        text = f"{number}: {dtype} {shape} {how} {batch_dim} {samples} {ranges}"
        yield text, (x, ranges, batch_dim, samples)


def random_ranges(chance: random.Random, shape: tuple[int, ...]) -> tuple[Ranges, ...] | None:
    if chance.random() < 0.5:
        return None
    starts = [chance.randint(0, 1100) for _ in shape]
    held: list[Ranges] = [((start, start + n),) for start, n in zip(starts, shape, strict=True)]
    for dim, n in enumerate(shape):
        if n > 1 and chance.random() < 0.4:
            start, cut = starts[dim], chance.randint(1, n - 1)
            held[dim] = ((start, start + cut), (start + cut + 512, start + n + 512))
    return tuple(held)


def shape_cases() -> Iterator[tuple[str, tuple]]:
    for shape in dict.fromkeys([*FOUND_BROKEN, *ACTIVATIONS, *LARGE_ACTIVATIONS]):
        for dtype, samples in ((torch.float32, True), (torch.bfloat16, False)):
            if math.prod(shape) > 1 << 23 and not samples:
                continue
            yield f"{dtype} {shape} {samples}", (values(shape, dtype), None, 0, samples)


def spread_cases() -> Iterator[tuple[str, tuple]]:
    """Values whose spread is lost where numbers about a wrong one are added up."""
    for shape in ((40, 300), (200, 512)):
        x = values(shape, torch.float32)
        for mean, spread in ((1e4, 1e-2), (-3.0, 1e-4)):
            yield f"{mean} {spread} {shape}", (mean + spread * x, None, 0, False)
        for scale in (1e3, 1e36):
            first = x.clone()
            first[::512] *= scale
            yield f"first rows times {scale} {shape}", (first, None, 0, False)
        few = x.clone()
        few[0, :3] *= 1e5
        yield f"three columns {shape}", (few, None, 0, False)
        yield f"constant {shape}", (torch.full(shape, 3e38), None, 0, False)
        whole = (x * 10).to(torch.int16)
        whole[0] = 30_000
        yield f"int16 {shape}", (whole, None, 0, False)


def judge_spread(told: list[str], x: torch.Tensor, *rest: Any) -> None:
    reading = judge(told, x, *rest)
    double = x.double()
    about = float(double.square().mean().sqrt())
    std = float(double.std()) if bool((double != double.reshape(-1)[0]).any()) else 0.0
    assert math.isclose(reading.std, std, rel_tol=1e-6), (reading.std, std)
    assert math.isclose(reading.mean, float(double.mean()), rel_tol=0, abs_tol=1e-6 * about)


def judge(told: list[str], x: torch.Tensor, ranges: tuple[Ranges, ...] | None, batch_dim: int,
          samples: bool) -> ValueNumbers:  # fmt: skip
    fused = FusedReader(CPU, interpreteddriver.driver(), interpreteddriver.find)
    digester = DeviceDigester(CPU, batch_dim, fused, told.append)
    before = len(interpreteddriver.launches)
    digester.read(x, ranges, samples=samples)
    ((_, reading),) = digester.collect(wait=True)
    if interpreteddriver.failures:
        raise RuntimeError(told) from interpreteddriver.failures.pop()
    assert len(interpreteddriver.launches) - before == (2 if x.numel() else 0), "launches"
    assert reading is not None, told
    host = Digester(batch_dim).read(x, ranges, samples=samples)
    agree(reading, host)
    operations = DeviceDigester(CPU, batch_dim)
    operations.read(x, ranges, samples=samples)
    ((_, by_operations),) = operations.collect(wait=True)
    assert by_operations is not None and by_operations.hash == reading.hash
    agree(by_operations, host)
    storage = storage_of(x.dtype)
    if storage is not None and x.numel():
        words = elements(x, storage).reshape(-1).copy()
        assert reading.hash == mix64(storage.normalize(words) if storage.normalize else words)
    return reading


class BrokenKernel:
    """A kernel with the arguments of `read_value` that cannot be interpreted."""

    def __init__(self, kernels: Any) -> None:
        self.arg_names = kernels.read_value.arg_names

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        raise TypeError(f"no kernel for the grid {grid}")


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    wrong, count = [], 0
    cases, judged = shape_cases(), judge
    if arguments == ["spreads"]:
        fusedplan._FEWEST_ROWS = 512  # as large values have them
        cases, judged = spread_cases(), judge_spread
    elif arguments == ["broken"]:
        interpreteddriver.fusedkernels.read_value = BrokenKernel(interpreteddriver.fusedkernels)
        cases = random_cases(1, 1, 50)
    elif arguments != ["shapes"]:
        cases = random_cases(*map(int, arguments))
    for text, case in cases:
        count += 1
        try:
            judged([], *case)
        except Exception:
            wrong.append(f"{text}\n{traceback.format_exc(limit=-2)[-1500:]}")
    kernels = sorted(set(interpreteddriver.launches))
    launches = len(interpreteddriver.launches)
    print(json.dumps({"values": count, "launches": launches, "kernels": kernels, "wrong": wrong}))


if __name__ == "__main__":
    main(sys.argv[1:])
