"""The digest by torch operations agrees with the one by numpy, and never waits for the device."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rankscope.capture.describe import Describer
from rankscope.capture.device import DeviceDigester, mix64
from rankscope.capture.digest import Digester
from rankscope.capture.elements import storage_of
from rankscope.capture.reading import Reading

CPU = torch.device("cpu")
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool,
    torch.uint8, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
SHAPES = [(), (5,), (2, 128, 96), (3, 70_001), (65, 1, 300), (0, 4), (9000, 3)]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    return (
        torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32) * 3 + 1
    ).to(dtype)


def agree(device: Reading, host: Reading) -> None:
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


def read_all(
    tensors: list[torch.Tensor], device: torch.device, batch_dim: int = 0
) -> list[Reading]:
    digester = DeviceDigester(device, batch_dim=batch_dim)
    tickets = [digester.read(x, None, samples=True) for x in tensors]
    found = dict(digester.collect(wait=True))
    return [found[ticket] for ticket in tickets if ticket is not None]


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_and_sketch_agree_with_the_host_digest(dtype: torch.dtype) -> None:
    tensors = [values(shape, dtype) for shape in SHAPES]
    for x, reading in zip(tensors, read_all(tensors, CPU), strict=True):
        agree(reading, Digester().read(x, None, samples=True))


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_a_gpu_nothing_synchronizes_and_the_numbers_agree() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = [values(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    digester = DeviceDigester(device)
    on_device = [x.to(device) for x in tensors]
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
        assert ticket is not None
        agree(found[ticket], Digester().read(x, None, samples=True))
    described, _ = Describer(0).describe(on_device[0])
    assert described.can_digest_on_device
    assert not described.can_digest
