"""The kernel gives the numbers of numpy, and is built and trusted only where that is safe."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.capture import kernel
from rankscope.capture.digest import Digester

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)
DTYPES = [
    getattr(torch, name)
    for name in (
        *("float32", "bfloat16", "float16", "complex64", "bool", "uint8", "int8", "int16"),
        *("uint16", "float8_e4m3fn", "float8_e5m2", "float64", "int32", "int64", "complex128"),
    )
]
SPECIAL = {
    "plain": [],
    "zeros": [0.0, -0.0],
    "nan": [math.nan],
    "infinite": [math.inf, -math.inf],
    "far": [3e38, -1e-40],
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, with the fallback beside it."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(folder))
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))
    yield folder
    for path in [path for path in kernel._TRUSTED if tmp_path in path.parents]:
        del kernel._TRUSTED[path]


def compiler_that(tmp_path: Path, body: str) -> str:
    script = tmp_path / "compiler"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o700)
    return os.fspath(script)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(
        st.one_of(
            st.lists(st.integers(1, 9), max_size=4),
            st.tuples(st.integers(1, 70), st.integers(1, 700)),
            st.tuples(st.integers(1, 5), st.integers(1, 30), st.integers(1, 130)),
            st.tuples(st.integers(2050, 70_000)),
            st.tuples(st.integers(2, 5), st.integers(2050, 9000)),
        )
    )
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    x = torch.randn(tuple(shape), generator=generator) * draw(st.sampled_from([1e-3, 1.0, 30.0]))
    x += draw(st.sampled_from([0.0, 5.0, 1000.0]))
    special = SPECIAL[draw(st.sampled_from(sorted(SPECIAL)))]
    if dtype.is_floating_point:
        for value in special:
            x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    elif not dtype.is_complex:
        x = x.clamp(0, 100)
    x = torch.complex(x, x.flip(0) if x.dim() else x) if dtype.is_complex else x.to(dtype)
    layout = draw(st.sampled_from(["contiguous", "transposed", "stepped"]))
    if layout == "transposed" and x.dim() > 1:
        x = x.transpose(0, -1)
    elif layout == "stepped" and x.dim() and x.shape[-1] > 3:
        x = x[..., 1::2]
    return x


def same(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance or (math.isnan(a) and math.isnan(b))


@given(tensors(), st.sampled_from([None, 0, 1, -1]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_kernel_and_numpy_agree_on_any_value(
    kernel_cache: Path, x: torch.Tensor, batch_dim: int | None
) -> None:
    """Counts, extrema and hash exactly; sums to 1e-6; sketches to 1e-6 of the norm."""
    readings = []
    for switch in ("on", "off"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", os.fspath(kernel_cache))
            patch.setenv("RANKSCOPE_KERNEL", switch)
            digester = Digester(batch_dim or 0)
            assert (digester.arithmetic.kernel is not None) == (switch != "off")
        readings.append(digester.read(x, None, samples=batch_dim is not None))
    by_kernel, by_numpy = readings
    exact = ("count", "hash", "nan", "posinf", "neginf", "zero")
    assert [getattr(by_kernel, n) for n in exact] == [getattr(by_numpy, n) for n in exact]
    assert same(by_kernel.min, by_numpy.min, 0.0)
    assert same(by_kernel.max, by_numpy.max, 0.0)
    norm = by_numpy.l2
    root_mean_square = norm / math.sqrt(max(by_numpy.count, 1))
    assert same(by_kernel.l2, norm, 1e-6 * norm)
    assert same(by_kernel.mean, by_numpy.mean, 1e-6 * root_mean_square)
    assert same(
        by_kernel.std, by_numpy.std, 1e-6 * abs(by_numpy.std) + 1e-7 * abs(by_numpy.mean) + 1e-300
    )
    assert np.allclose(by_kernel.sketch, by_numpy.sketch, rtol=0, atol=2e-6 * norm)
    assert (by_kernel.samples is None) == (by_numpy.samples is None)
    if by_kernel.samples is not None and by_numpy.samples is not None:
        assert by_kernel.samples.dtype == by_numpy.samples.dtype
        assert np.allclose(by_kernel.samples, by_numpy.samples, rtol=0, atol=2e-6 * norm)


def test_threads_that_share_a_kernel_do_not_mix_their_results(way: str) -> None:
    x = [torch.randn(300, 500) + i for i in range(4)]
    expected = [Digester().read(y, None, samples=False) for y in x]
    digester = Digester()
    wrong: list[int] = []

    def read(i: int) -> None:
        for _ in range(20):
            reading = digester.read(x[i], None, samples=False)
            if reading._replace(reused=False) != expected[i]:
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_compiler
def test_nothing_is_loaded_before_it_is_built_and_then_the_same_library_is(cache: Path) -> None:
    assert kernel.load() is None
    path = kernel.build()
    assert path is not None
    loaded = kernel.load()
    assert loaded is not None
    assert loaded.path == path == kernel.build()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert path.parent.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_the_switch_keeps_everything_to_numpy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_KERNEL", "off")
    assert kernel.build() is None
    assert list(cache.iterdir()) == []
    monkeypatch.delenv("RANKSCOPE_KERNEL")
    assert kernel.build() is not None
    monkeypatch.setenv("RANKSCOPE_KERNEL", "off")
    assert kernel.load() is None


@needs_compiler
def test_a_library_that_others_can_write_or_that_is_a_link_is_not_loaded(cache: Path) -> None:
    path = kernel.build()
    assert path is not None
    path.chmod(0o722)
    assert kernel.load() is None
    path.chmod(0o700)
    path.parent.chmod(0o777)
    assert kernel.load() is None
    path.parent.chmod(0o700)
    cache.chmod(0o777)
    assert kernel.load() is None
    cache.chmod(0o700)
    assert kernel.load() is not None
    elsewhere = cache / "elsewhere.so"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert kernel.load() is None


@needs_compiler
def test_an_unsafe_cache_is_passed_over_for_the_folder_of_the_spools(
    cache: Path, tmp_path: Path
) -> None:
    cache.chmod(0o777)
    path = kernel.build()
    assert path is not None
    assert path.parent == tmp_path / f"rankscope-{os.getuid()}" / "kernel"
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_a_damaged_library_is_refused_and_built_anew(cache: Path) -> None:
    path = kernel.build()
    assert path is not None
    del kernel._TRUSTED[path]
    path.unlink()  # never in place: it is mapped into this process
    path.write_bytes(b"not a library")
    assert kernel.load() is None
    assert kernel.build() == path
    assert kernel.load() is not None


@needs_compiler
def test_a_library_with_other_numbers_is_never_used(cache: Path, tmp_path: Path) -> None:
    wrong = compiler_that(
        tmp_path,
        'for last; do :; done; echo "int rankscope_read(void) { return 0; }"'
        ' | cc -shared -fPIC -x c - -o "$last"; cat > /dev/null',
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", wrong)
        assert kernel.build() is None
    assert kernel.load() is None
    assert kernel.build() is not None


@pytest.mark.parametrize("body", ["exit 1", "cat > /dev/null; exit 1", "exec sleep 60"])
def test_a_compiler_that_fails_or_hangs_leaves_no_kernel_and_no_rubbish(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(kernel, "_BUILD_TIMEOUT_S", 0.2)
    monkeypatch.setenv("CC", compiler_that(tmp_path, body))
    assert kernel.build() is None
    assert kernel.load() is None
    assert not list(tmp_path.rglob("*.so*"))


def test_without_any_compiler_digests_are_numpys(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert kernel.build() is None
    x = torch.randn(20, 300)
    assert Digester().read(x, None, samples=False).l2 == pytest.approx(x.norm().item(), rel=1e-5)


@needs_compiler
def test_many_processes_build_at_once_and_all_load_it(cache: Path, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom rankscope.capture import kernel\npath = kernel.build()\n"
        "loaded = kernel.load()\nassert loaded and loaded.path == path\n"
        "assert 'torch' not in sys.modules\nprint(path)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    paths = {process.communicate(timeout=300)[0] for process in running}
    assert all(process.returncode == 0 for process in running)
    assert len(paths) == 1
    folder = Path(paths.pop().strip()).parent
    assert len(list(folder.iterdir())) == 1
