"""The fused digest: its tables, its kernels interpreted and compiled, what becomes of bad ones."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.agent.values import valuereader
from rankscope.capture.describe import Describer
from rankscope.capture.device.devicedigester import DeviceDigester
from rankscope.capture.device.fusedcache import (
    CombineVariant,
    CompiledImage,
    ReadVariant,
    architectures_of_host,
    find_image,
    save_image,
    variants,
)
from rankscope.capture.device.fusedforms import FusedReader, GpuDriver
from rankscope.capture.device.fusedplan import BASE, make_fused_plan, powers
from rankscope.capture.digest import Digester
from rankscope.layout.placement import Ranges
from rankscope.record.phases import Phase
from rankscope.record.sketchfactors import product_factors
from tests.capture.hashed import mix64
from tests.capture.test_device import agree, held_ranges, values

CPU = torch.device("cpu")
SHAPES = [(2, 3), (4, 300), (700, 3), (5, 1100), (3, 2, 41), (2, 1, 600), (9, 4, 3, 2)]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    shape=st.sampled_from(SHAPES),
    first=st.integers(0, 3),
    second=st.integers(0, 3),
    has_samples=st.booleans(),
)
def test_rows_and_columns_hold_every_element_once_with_its_key_and_its_factor(
    data: st.DataObject, shape: tuple[int, ...], first: int, second: int, has_samples: bool
) -> None:
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    x = x.transpose(first % x.dim(), second % x.dim())
    ranges = data.draw(held_ranges(tuple(x.shape)))
    plan = make_fused_plan(x.shape, x.stride(), ranges, 0 if has_samples else None)
    assert plan is not None
    memory = torch.arange(x.numel())
    column = np.arange(len(plan.column_offsets))
    held = (column >= plan.row_limits[:, :1]) & (column < plan.row_limits[:, 1:])
    at = (plan.row_offsets[:, None] + plan.column_offsets)[held]
    assert sorted(at.tolist()) == memory.tolist()
    place = np.argsort(x.reshape(-1).numpy())  # of what lies there, in row-major order
    keys = (plan.row_keys[:, None] * plan.column_keys)[held]
    assert np.array_equal(keys, powers(place[at] + 1))
    whole = [(d, held) for d, held in enumerate(ranges or [((0, n),) for n in x.shape])]
    if has_samples:
        ones = np.ones((8, x.shape[0], 1), dtype=np.float32)
        rest = product_factors(whole[1:])
        expected = (ones * rest[:, None, :]).reshape(8, -1)
    else:
        expected = product_factors(whole)
    for k in range(8):
        found = (plan.row_weights[:, k : k + 1] * plan.column_factors[k])[held]
        assert np.allclose(found, expected[k][place[at]], rtol=1e-5)
    sample = np.repeat(np.arange(plan.samples), plan.rows_per_sample)[:, None] + 0 * column
    if has_samples:
        assert np.array_equal(sample[held], np.unravel_index(place[at], x.shape)[0])


def test_a_value_of_thousands_of_pieces_is_left_to_torch_operations() -> None:
    pieces: Ranges = tuple((3 * i, 3 * i + 1) for i in range(40_000))
    assert make_fused_plan((40_000, 7), (7, 1), (pieces, ((0, 7),)), None) is None


def test_powers_of_the_base_are_those_of_python() -> None:
    exponents = np.array([0, 1, 2, 63, 4096, 123_456_789, -1, -77], dtype=np.int64)
    expected = [pow(BASE, int(e), 1 << 64) for e in exponents]
    assert powers(exponents).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_hash_tells_swaps_scales_signs_and_shifts_apart(dtype: torch.dtype) -> None:
    """Differences that are powers of two at distances that are powers of two cancel in a plain
    polynomial modulo 2**64."""
    x = torch.ones(1 << 15, dtype=dtype)
    x[5] = 2
    seen = {}
    others = {"itself": x, "doubled": 2 * x, "negated": -x, "zeros": 0 * x, "rolled": x.roll(3)}
    for distance in (1, 2, 64, 1024, 1 << 12, 1 << 13):
        swapped = x.clone()
        swapped[5], swapped[5 + distance] = x[5 + distance], x[5]
        others[f"swapped {distance}"] = swapped
        for scale in (2.0, -1.0, 0.0):
            changed = x.clone()
            changed[distance] *= scale
            changed[2 * distance] *= scale
            others[f"two changed {distance} {scale}"] = changed
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for name, other in others.items():
        hashed = mix64((other + 0.0).view(width).numpy())
        assert hashed not in seen, (name, seen[hashed])
        seen[hashed] = name


_THREE = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 3)
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *(ctypes.c_uint,) * 7, *(ctypes.c_void_p,) * 3
)


class Driver:
    """A driver that answers with these numbers and does nothing else."""

    def __init__(self, load: int = 0, find: int = 0, launch: int = 0) -> None:
        self.launches = 0
        self._kept = (_THREE(lambda *_: load), _THREE(lambda *_: find), _LAUNCH(self._launch))
        self._status = launch
        names = ("load", "find", "launch")
        self.driver = GpuDriver(SimpleNamespace(**dict(zip(names, self._kept))), *names)

    def _launch(self, *_: Any) -> int:
        self.launches += 1
        return self._status


def image(variant: ReadVariant | CombineVariant) -> CompiledImage:
    return CompiledImage(variant.name, b"", 128, 0)


def digester(driver: Driver, told: list[str], find: Any = image) -> DeviceDigester:
    reader = FusedReader(CPU, driver.driver, find)
    return DeviceDigester(CPU, 0, reader, told.append)


def test_what_a_kernel_that_computes_nonsense_read_is_left_out_and_said_once() -> None:
    """Nothing is written by this driver: rows hold what lay in memory."""
    driver, told = Driver(), list[str]()
    x, y = values((40, 3), torch.float32), values((7,), torch.bfloat16)
    device = digester(driver, told)
    tickets = [device.read(v, None, samples=True) for v in (x, x, y)]
    assert device.collect(wait=True) == [(ticket, None) for ticket in tickets]
    assert len(told) == 2 and all("gives wrong numbers on this machine" in t for t in told)
    assert driver.launches == 6
    for again in (x, y, x):
        device.read(again, None, samples=True)
        ((_, reading),) = device.collect(wait=True)
        assert reading is not None
        agree(reading, Digester().read(again, None, samples=True))
    assert driver.launches == 10 and len(told) == 2


@pytest.mark.parametrize(
    ("refused", "message"),
    [({"load": 209}, "refuses the kernel"), ({"find": 500}, "refuses the kernel"),
     ({"launch": 701}, "refuses to launch read-float32-plain with status 701")],
)  # fmt: skip
def test_where_the_driver_refuses_torch_operations_read(
    refused: dict[str, int], message: str
) -> None:
    told: list[str] = []
    device = digester(Driver(**refused), told)
    x = values((40, 3), torch.float32)
    for _ in range(3):
        device.read(x, None, samples=True)
    for _, reading in device.collect(wait=True):
        assert reading is not None
        agree(reading, Digester().read(x, None, samples=True))
    assert len(told) == 1 and message in told[0]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RANKSCOPE_KERNEL", raising=False)
    return tmp_path / "rankscope"


def test_a_filed_kernel_is_found_again_and_one_that_others_could_have_put_there_is_not(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = ReadVariant("bfloat16", True, True)
    wanted = CompiledImage("read_value", b"\x00image", 128, 32)
    path = save_image("cuda-90", variant, wanted)
    assert path is not None and path.parent == cache
    assert find_image("cuda-90", variant) == wanted
    assert find_image("cuda-80", variant) is None
    monkeypatch.setenv("RANKSCOPE_KERNEL", "off")
    assert find_image("cuda-90", variant) is None
    monkeypatch.delenv("RANKSCOPE_KERNEL")
    path.chmod(0o666)
    assert find_image("cuda-90", variant) is None
    path.chmod(0o600)
    cache.chmod(0o777)
    assert find_image("cuda-90", variant) is None
    cache.chmod(0o700)
    path.write_bytes(b"no kernel")
    assert find_image("cuda-90", variant) is None


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_host_without_triton_is_told_so_where_kernels_are_missing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, has_kernels: bool
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    for variant in variants() if has_kernels else ():
        save_image("cuda-90", variant, image(variant))
    remarks = remarks_of_a_rank(monkeypatch, "cuda-90")
    if has_kernels:  # what the driver of this test does not compute is told
        assert all("gives wrong numbers" in text for text in remarks)
    else:
        (text,) = remarks
        assert "Triton is not installed" in text


def remarks_of_a_rank(monkeypatch: pytest.MonkeyPatch, architecture: str) -> list[str]:
    """What the trace of a rank with such a GPU says besides its values."""
    driver = Driver()
    monkeypatch.setattr(f"{valuereader.__name__}.driver_of", lambda device: driver.driver)
    monkeypatch.setattr(f"{valuereader.__name__}.architecture_of", lambda device: architecture)
    rank = valuereader.DeviceValues(batch_dim=0)
    described, local = Describer(rank=0).describe(values((40, 3), torch.float32))
    place = valuereader.ValuePlace(0, "output", described, Phase.FORWARD, 0, 0)
    assert rank.read(local, place, samples=True)
    assert len(rank.collect(wait=True)) == 1
    remarks = rank.failures()
    assert rank.failures() == [], "each is told once"
    return remarks


def test_a_host_without_gpus_has_none_to_compile_for(tmp_path: Path) -> None:
    assert architectures_of_host("no-such-library.so", tmp_path / "nothing") == []
