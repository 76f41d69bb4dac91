"""The fused digest: its kernels interpreted and compiled, and its tables while they are missing."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rankscope.capture.device.devicedigester import DeviceDigester
from rankscope.capture.device.devicedigester import agree as rows_agree
from rankscope.capture.device.fusedcache import (
    CombineVariant,
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
from rankscope.capture.device.fusedplan import FusedPlan, make_fused_plan
from rankscope.doctor.job import Status, _gpu_kernels
from tests.capture.test_device import values
from tests.capture.test_fused import (
    CPU,
    Driver,
    digester,
    image,
    remarks_of_a_rank,
)
from tests.capture.test_fused import cache as cache

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


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
    said = child("tests.lab.capture.fusedcases", "1", "50", "5000")
    assert_right(said)
    assert len(said["kernels"]) > 25


@needs_triton
def test_small_spreads_and_first_rows_far_from_all_others_keep_six_digits() -> None:
    assert_right(child("tests.lab.capture.fusedcases", "spreads"))


@needs_triton
def test_what_a_launch_raises_is_told_as_what_it_is() -> None:
    (text,) = child("tests.lab.capture.fusedcases", "broken")["wrong"]
    assert "no kernel for the grid" in text
    assert "refuses to launch" in text and "wrong numbers" not in text


@needs_triton
@pytest.mark.parametrize("architecture", ["cuda-90", "hip-gfx90a", "hip-gfx1100"])
def test_a_kernel_is_launched_with_the_threads_it_was_compiled_for(
    architecture: str, tmp_path: Path
) -> None:
    """A warp has 64 threads on AMD's data-centre GPUs, 32 on its others."""
    said = child("tests.lab.capture.compiledkernels", architecture, TRITON_CACHE_DIR=str(tmp_path))
    assert said["launched"] == said["compiled"]


@pytest.mark.soak
@needs_triton
def test_three_hundred_interpreted_values_give_the_numbers_of_the_host() -> None:
    assert_right(child("tests.lab.capture.fusedcases", "2", "300", "20000"))


@pytest.mark.soak
@needs_triton
def test_interpreted_kernels_read_whole_activations() -> None:
    assert_right(child("tests.lab.capture.fusedcases", "shapes"))


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
    found = child("tests.lab.capture.compiledkernels", which, TRITON_CACHE_DIR=str(tmp_path))
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
