"""The digest by torch operations agrees with the one by numpy, and never waits for the device."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.capture.describe import Describer
from rankscope.capture.device.devicedigester import DeviceDigester
from rankscope.capture.device.fusedcache import CompiledImage, find_image
from rankscope.capture.device.fusedforms import FusedReader, architecture_of, driver_of
from rankscope.capture.digest import Digester
from rankscope.capture.dtypestorage import storage_of
from rankscope.capture.measuring import ValueNumbers
from rankscope.layout.placement import Ranges
from tests.capture.hashed import mix64

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU]),
    pytest.param("cuda fused", marks=[pytest.mark.gpu, NO_GPU]),
]
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool,
    torch.uint8, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
MORE_DTYPES = [
    torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64,
    torch.complex32, torch.complex128,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
SHAPES = [(), (5,), (2, 128, 96), (3, 70_001), (65, 1, 300), (0, 4), (9000, 3)]
ACTIVATIONS = [(4, 512, 512), (2, 1024, 1024), (2, 4100, 256), (64, 1, 9000)]
LARGE_ACTIVATIONS = [(8, 512, 512), (32, 128, 1024), (4, 2048, 4096), (3, 9001, 300)]
SIZES = [0, 1, 2, 3, 5, 7, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1024, 2049, 4096, 4097, 8193]
"""Around the limits at which a fold changes: samples, columns, the radix, rows."""


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    return (
        torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32) * 3 + 1
    ).to(dtype)


def agree(device: ValueNumbers, host: ValueNumbers) -> None:
    assert (device.count, device.nan, device.posinf, device.neginf, device.zero) == host[:1] + host[
        2:6
    ]
    for name in ("min", "max", "mean", "std", "l2"):
        assert getattr(device, name) == pytest.approx(
            getattr(host, name), rel=1e-6, nan_ok=True, abs=1e-7 * host.l2
        )
    assert np.allclose(device.sketch, host.sketch, rtol=0, atol=2e-6 * host.l2)
    assert (device.samples is None) == (host.samples is None)
    if host.samples is not None and device.samples is not None:
        assert np.allclose(device.samples, host.samples, rtol=0, atol=4e-6 * host.l2)


@functools.cache
def fused_finder(architecture: str) -> Callable[[Any], CompiledImage | None]:
    """Compile what is missing for a GPU, and give what finds it."""
    module = "rankscope.capture.device.fusedcompile"
    subprocess.run([sys.executable, "-m", module, architecture], check=True, timeout=600)
    return functools.partial(find_image, architecture)


def digester_on(device: str, batch_dim: int = 0) -> DeviceDigester:
    """A digester by torch operations, or by fused kernels: `cpu`, `cuda`, `cuda fused`."""
    where = torch.device(device.split()[0])
    if not device.endswith("fused"):
        return DeviceDigester(where, batch_dim)
    where = torch.device("cuda", torch.cuda.current_device())
    driver = driver_of(where)
    assert driver is not None
    find = fused_finder(architecture_of(where))
    return DeviceDigester(where, batch_dim, FusedReader(where, driver, find), pytest.fail)


def read_all(
    tensors: list[torch.Tensor], device: torch.device, batch_dim: int = 0
) -> list[ValueNumbers]:
    digester = DeviceDigester(device, batch_dim=batch_dim)
    tickets = [digester.read(x, None, samples=True) for x in tensors]
    found = dict(digester.collect(wait=True))
    return [found[ticket] for ticket in tickets if ticket is not None]


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_and_sketch_agree_with_the_host_digest(dtype: torch.dtype) -> None:
    tensors = [values(shape, dtype) for shape in SHAPES]
    for x, reading in zip(tensors, read_all(tensors, CPU), strict=True):
        agree(reading, Digester().read(x, None, samples=True))


@pytest.mark.parametrize("shape", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_activations_of_any_size_are_read_with_and_without_samples(
    device: str, shape: tuple[int, ...]
) -> None:
    """From 2**19 elements on the host folds sample by sample; one product serves the device."""
    x = values(shape, torch.float32)
    for batch_dim, samples in ((0, True), (1, True), (0, False)):
        digester = digester_on(device, batch_dim)
        digester.read(x.to(device.split()[0]), None, samples=samples)
        ((_, reading),) = digester.collect(wait=True)
        agree(reading, Digester(batch_dim).read(x, None, samples=samples))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """A shape of up to five dims and 700,000 elements, one of them often at a limit."""
    shape: list[int] = []
    for _ in range(draw(st.integers(0, 5))):
        most = 700_000 // max(1, math.prod(shape))
        shape.append(draw(st.sampled_from([n for n in SIZES if n <= most] or [1])))
    return tuple(draw(st.permutations(shape)))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any shape, dtype and strides."""
    x = values(draw(shapes()), draw(st.sampled_from(DTYPES + MORE_DTYPES)))
    if x.dim() > 1 and draw(st.booleans()):
        first, second = draw(st.permutations(range(x.dim())))[:2]
        x = x.transpose(first, second)
    if x.dim() and draw(st.booleans()):
        x = x[::2]
    if x.dtype.is_complex and x.dtype != torch.complex32 and draw(st.booleans()):
        x = x.conj()
    return x


@st.composite
def held_ranges(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Ranges, ...] | None:
    """Global indices of a shard of that shape: its first rows lie apart from the others."""
    if draw(st.booleans()):
        return None
    starts = [draw(st.integers(0, 1100)) for _ in shape]
    held: list[Ranges] = [((start, start + n),) for start, n in zip(starts, shape, strict=True)]
    if shape and shape[0] > 1:
        start, cut = starts[0], draw(st.integers(1, shape[0] - 1))
        held[0] = ((start, start + cut), (start + cut + 512, start + shape[0] + 512))
    return tuple(held)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), x=tensors(), batch_dim=st.sampled_from([0, 1, -1]), samples=st.booleans())
def test_any_tensor_gets_the_numbers_of_the_host_digest(
    device: str, data: st.DataObject, x: torch.Tensor, batch_dim: int, samples: bool
) -> None:
    ranges = data.draw(held_ranges(tuple(x.shape)))
    digester = digester_on(device, batch_dim)
    digester.read(x.to(device.split()[0]), ranges, samples=samples)
    ((_, reading),) = digester.collect(wait=True)
    agree(reading, Digester(batch_dim).read(x, ranges, samples=samples))


@pytest.mark.parametrize("samples", [True, False])
def test_nothing_on_the_way_asks_the_device_for_a_number(samples: bool) -> None:
    """A tensor on the meta device has no numbers: whatever would wait for one (`item`, `cpu`,
    `bool`, `nonzero`, a mask as an index) raises there.
    """
    digester = DeviceDigester(torch.device("meta"))
    cases = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    for shape, dtype in cases + [(s, torch.bfloat16) for s in ACTIVATIONS + LARGE_ACTIVATIONS]:
        x = torch.empty(shape, dtype=dtype, device="meta")
        assert digester.read(x, None, samples=samples) is not None


@pytest.mark.parametrize("name", ["item", "cpu", "nonzero", "__bool__", "tolist"])
def test_the_meta_device_refuses_every_call_that_waits(name: str) -> None:
    """What the test above rests on."""
    with pytest.raises((NotImplementedError, RuntimeError)):
        getattr(torch.empty((), device="meta"), name)()


def test_nonfinite_and_extreme_values_agree_with_the_host_digest() -> None:
    x = values((300,), torch.float32)
    x[:6] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 7.0])
    tensors = [
        x,
        torch.full((9,), math.nan),
        torch.zeros(5),
        1e300 * x.double(),
        x[:1].clone(),
        x.reshape(20, 15).t(),
    ]
    for tensor, reading in zip(tensors, read_all(tensors, CPU), strict=True):
        agree(reading, Digester().read(tensor, None, samples=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_hash_equals_its_numpy_twin_over_normalized_words(dtype: torch.dtype) -> None:
    x = values((70, 33), dtype)
    if dtype.is_floating_point:
        x[0, 0], x[0, 1], x[0, 2] = 0.0, -0.0, math.nan
    if dtype == torch.bool:
        x = torch.randn(70, 33) > 0
    storage = storage_of(dtype)
    assert storage is not None
    words = np.frombuffer(x.contiguous().view(torch.uint8).numpy().tobytes(), dtype=storage.dtype)
    expected = mix64(storage.normalize(words) if storage.normalize else words)
    assert read_all([x], CPU)[0].hash == expected
    assert read_all([x.flip(0)], CPU)[0].hash != expected


def test_readings_arrive_by_ticket_after_a_flush_and_only_once() -> None:
    digester = DeviceDigester(CPU)
    tickets = [digester.read(torch.full((4,), float(i)), None, samples=False) for i in range(3000)]
    digester.flush()
    found = digester.collect()
    assert [ticket for ticket, _ in found] == tickets
    assert [reading.min for _, reading in found] == [float(i) for i in range(3000)]
    assert digester.collect(wait=True) == []


def test_deterministic_mode_gives_the_same_sketch() -> None:
    x = values((50, 70), torch.float32)
    plain = read_all([x], CPU)[0]
    torch.use_deterministic_algorithms(True)
    try:
        assert np.allclose(read_all([x], CPU)[0].sketch, plain.sketch, rtol=1e-9)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("route", ["cuda", "cuda fused"])
def test_on_a_gpu_nothing_synchronizes_and_the_numbers_agree(route: str) -> None:
    tensors = [values(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    digester = digester_on(route)
    on_device = [x.to("cuda") for x in tensors]
    for x in on_device:  # builds the tables; pinned memory may be allocated once
        digester.read(x, None, samples=True)
    digester.collect(wait=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tickets = [digester.read(x, None, samples=True) for x in on_device]
        digester.flush()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = dict(digester.collect(wait=True))
    for x, ticket in zip(tensors, tickets, strict=True):
        reading = found[ticket or 0]
        assert reading is not None
        agree(reading, Digester().read(x, None, samples=True))
    described, _ = Describer(0).describe(on_device[0])
    assert described.can_digest_on_device
    assert not described.can_digest
