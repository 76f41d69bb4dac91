"""The fused digest: its tables, its kernels interpreted and compiled, what becomes of bad ones."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
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
from rankscope.capture.device.devicedigester import agree as rows_agree
from rankscope.capture.device.fusedcache import (
    CombineVariant,
    CompiledImage,
    ReadVariant,
    architectures_of_host,
    compiler_of,
    find_image,
    lock_for_building,
    missing_variants,
    obstacle,
    save_image,
    triton_version,
    variants,
)
from rankscope.capture.device.fusedforms import FusedReader, GpuDriver
from rankscope.capture.device.fusedplan import BASE, FusedPlan, make_fused_plan, powers
from rankscope.capture.digest import Digester
from rankscope.doctor.job import Status, _gpu_kernels
from rankscope.layout.placement import Ranges
from rankscope.record.phases import Phase
from rankscope.record.sketchfactors import product_factors
from tests.capture.hashed import mix64
from tests.capture.test_device import agree, held_ranges, values

CPU = torch.device("cpu")
SHAPES = [(2, 3), (4, 300), (700, 3), (5, 1100), (3, 2, 41), (2, 1, 600), (9, 4, 3, 2)]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


# -- tables


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


@pytest.mark.parametrize("shape", [(4, 512, 512), (4, 2048, 4096), (1 << 26,), (5_000_000, 5)])
def test_tables_and_partial_results_are_a_fraction_of_what_is_read(shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    strides = torch.empty(shape, device="meta").stride()
    plan = make_fused_plan(shape, strides, None, None)
    assert plan is not None
    read = plan.programs * 4 * 8 * len(plan.column_offsets) // plan.column_blocks
    rows = plan.row_keys.nbytes + plan.row_weights.nbytes + plan.row_offsets.nbytes
    assert rows + plan.programs * 160 < 0.1 * 2 * count
    assert plan.programs <= 8192 and read < 1 << 31


def test_a_value_of_thousands_of_pieces_is_left_to_torch_operations() -> None:
    pieces: Ranges = tuple((3 * i, 3 * i + 1) for i in range(40_000))
    assert make_fused_plan((40_000, 7), (7, 1), (pieces, ((0, 7),)), None) is None


# -- the hash


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


# -- bad kernels

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


def test_kernels_that_lie_ready_later_are_used_from_the_next_step_on() -> None:
    ready: list[ReadVariant | CombineVariant] = []
    driver = Driver()
    device = digester(driver, [], lambda v: image(v) if v in ready else None)
    x = values((40, 3), torch.float32)
    device.read(x, None, samples=True)
    device.flush()
    assert driver.launches == 0
    ready.extend(variants())
    device.flush()
    device.read(x, None, samples=True)
    assert driver.launches == 2


def test_tables_are_made_once_while_kernels_are_missing_and_once_more_when_they_lie_ready() -> None:
    ready: list[ReadVariant | CombineVariant] = []
    device = digester(Driver(), [], lambda v: image(v) if v in ready else None)
    x = values((40, 3), torch.float32)

    def form_of_a_step() -> object:
        device.read(x, None, samples=True)
        (form,) = device._forms.values()
        device.flush()
        return form

    without = form_of_a_step()
    assert form_of_a_step() is without
    ready.extend(variants())
    assert form_of_a_step() is without
    fused = form_of_a_step()
    assert fused is not without and form_of_a_step() is fused


def test_tables_on_the_device_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "rankscope.capture.device.devicedigester._MOST_TABLE_BYTES"
    monkeypatch.setattr(name, 1 << 16)
    driver = Driver()
    device = digester(driver, [])
    for rows in range(1, 60):
        device.read(torch.ones(rows, 700), None, samples=False)
        assert device._table_bytes < 1 << 18  # the last one may go beyond


def test_values_near_zero_in_float64_do_not_make_a_right_kernel_look_wrong() -> None:
    device = DeviceDigester(CPU, 0)
    x = values((300, 7), torch.float64) * 1e-320
    device.read(x, None, samples=False)
    ((_, one),) = device.collect(wait=True)
    assert one is not None
    step = 5e-324
    other = one._replace(std=one.std + step, l2=one.l2 - step, mean=one.mean + step)
    assert rows_agree(one, other)
    assert not rows_agree(one, one._replace(min=1.0))


# -- the cache


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


def test_one_process_at_a_time_compiles_for_an_architecture(cache: Path) -> None:
    with lock_for_building("cuda-90") as first, lock_for_building("cuda-90") as second:
        assert first and not second
    with lock_for_building("cuda-90") as third:
        assert third


def test_every_kernel_has_a_name_of_its_own_and_every_dtype_a_kernel() -> None:
    names = [variant.name for variant in variants()]
    assert len(set(names)) == len(names)
    plans: list[FusedPlan | None] = [make_fused_plan((4, 512), (512, 1), None, None)]
    assert plans[0] is not None and plans[0].is_full and plans[0].is_plain


# -- Triton


def child(*command: str, **variables: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command],
        capture_output=True, text=True, timeout=3000, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path),
             **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    if "cannot link" in said:
        pytest.skip(f"Triton {triton_version()} cannot link for AMD's GPUs: {said['cannot link']}")
    return said


def assert_right(said: Any) -> None:
    assert said["wrong"] == []
    assert said["launches"] <= 2 * said["values"]


@needs_triton
def test_interpreted_kernels_give_the_numbers_of_the_host_in_two_launches() -> None:
    said = child("tests.capture.fusedcases", "1", "50", "5000")
    assert_right(said)
    assert len(said["kernels"]) > 25


@needs_triton
def test_small_spreads_and_first_rows_far_from_all_others_keep_six_digits() -> None:
    assert_right(child("tests.capture.fusedcases", "spreads"))


@needs_triton
def test_what_a_launch_raises_is_told_as_what_it_is() -> None:
    (text,) = child("tests.capture.fusedcases", "broken")["wrong"]
    assert "no kernel for the grid" in text
    assert "refuses to launch" in text and "wrong numbers" not in text


@needs_triton
@pytest.mark.parametrize("architecture", ["cuda-90", "hip-gfx90a", "hip-gfx1100"])
def test_a_kernel_is_launched_with_the_threads_it_was_compiled_for(
    architecture: str, tmp_path: Path
) -> None:
    """A warp has 64 threads on AMD's data-centre GPUs, 32 on its others."""
    said = child("tests.capture.compiledkernels", architecture, TRITON_CACHE_DIR=str(tmp_path))
    assert said["launched"] == said["compiled"]


@pytest.mark.soak
@needs_triton
def test_three_hundred_interpreted_values_give_the_numbers_of_the_host() -> None:
    assert_right(child("tests.capture.fusedcases", "2", "300", "20000"))


@pytest.mark.soak
@needs_triton
def test_interpreted_kernels_read_whole_activations() -> None:
    assert_right(child("tests.capture.fusedcases", "shapes"))


@needs_triton
@pytest.mark.parametrize(
    ("which", "count"),
    [
        ("cuda", 4),
        ("hip", 1),
        pytest.param("cuda more", 2, marks=pytest.mark.soak),
        pytest.param("hip more", 1, marks=pytest.mark.soak),
    ],
)
def test_compiled_kernels_spill_nothing_load_once_and_compute_in_the_float_of_the_value(
    tmp_path: Path, which: str, count: int
) -> None:
    found = child("tests.capture.compiledkernels", which, TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == count
    for name, numbers in found.items():
        assert numbers["spills"] == 0, name
        assert numbers["value loads"] == 1, name
        assert numbers["float64"] == 0, name


@needs_triton
def test_the_compiler_files_what_is_missing(cache: Path) -> None:
    for variant in list(variants())[2:]:
        save_image("cuda-90", variant, image(variant))
    assert [v.name for v in missing_variants("cuda-90")] == ["combine-float32", "combine-float64"]
    module = "rankscope.capture.device.fusedcompile"
    command = [sys.executable, "-W", "ignore", "-m", module, "cuda-90"]
    subprocess.run(command, check=True, timeout=300)
    assert missing_variants("cuda-90") == []
    compiled = find_image("cuda-90", CombineVariant(False))
    assert compiled is not None and compiled.image.startswith(b"\x7fELF")
    assert compiled.threads == 128


@needs_triton
def test_what_triton_cannot_compile_is_told_with_its_reason_and_not_tried_in_every_job(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Triton compiles for a GPU of 2012."""
    for variant in list(variants())[1:]:
        save_image("cuda-30", variant, image(variant))
    assert compiler_of("cuda-30") is not None
    told = _gpu_kernels([sys.executable, "-W", "ignore"], ["cuda-30"])
    sentence = (
        f"Triton {triton_version()} cannot compile 1 of 41 kernels for cuda-30: combine-float"
    )
    assert told.status is Status.NOTE and told.answer.startswith(sentence)
    assert obstacle("cuda-30") in told.answer and obstacle("cuda-90") == ""
    assert compiler_of("cuda-30") is None

    (text,) = remarks_of_a_rank(monkeypatch, "cuda-30")
    assert sentence in text and "torch operations take the digests" in text


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


# -- the GPUs of a host


NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(long)(index + 1);
    return index == 2 ? 4 : 0;  /* one that this process may not see */
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    *major = (long)device == 1 ? 9 : 10;
    *minor = 0;
    return 0;
}
"""


def test_a_host_without_gpus_has_none_to_compile_for(tmp_path: Path) -> None:
    assert architectures_of_host("no-such-library.so", tmp_path / "nothing") == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_gpus_are_read_off_the_management_library_and_the_driver_of_amd(tmp_path: Path) -> None:
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvml.so"
    command = ["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"]
    subprocess.run(command, check=True, timeout=60)
    for number, version in enumerate((0, 90402, 90010, 110000)):
        (tmp_path / "nodes" / str(number)).mkdir(parents=True)
        text = f"cpu_cores_count 0\ngfx_target_version {version}\nvendor_id 4098\n"
        (tmp_path / "nodes" / str(number) / "properties").write_text(text)
    (tmp_path / "nodes" / "9").mkdir()
    (tmp_path / "nodes" / "9" / "properties").write_text("gfx_target_version what\n")
    expected = ["cuda-100", "cuda-90", "hip-gfx1100", "hip-gfx90a", "hip-gfx942"]
    assert architectures_of_host(str(library), tmp_path / "nodes") == expected
