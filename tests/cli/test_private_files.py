"""What commands write out of a trace is for its owner alone, as the trace is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import rankscope
from rankscope.testing import save_golden
from tests.cli.test_commands import rankscope as command
from tests.diagnosis.paper import module, numbers
from tests.tree.ranks_on_paper import PaperRank


@pytest.fixture(scope="module", autouse=True)
def open_to_others() -> Iterator[None]:
    """Files are for everybody to read where a program says nothing."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with full tensors."""
    out = tmp_path_factory.mktemp("private") / "trace"
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with rankscope.trace(model, out=out, tensors="**", keep_spool=True):
        model(torch.ones(2, 4)).sum().backward()
    return out


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two ranks."""
    folder = tmp_path_factory.mktemp("pair")
    for number in range(2):
        rank = PaperRank(folder, number, 2)
        with rank.call(class_name="Model"):
            module(rank, "a", numbers(1), numbers(2))
        rank.end()
        rank.ship(folder / "records")
    assert command("recover", folder / "records", "--out", folder / "trace")[0] == 0
    return folder / "trace"


def open_files(place: Path) -> list[str]:
    """Return the files and folders from `place` on that others may read, or enter."""
    found = [place, *place.rglob("*")] if place.is_dir() else [place]
    return [f"{path} {path.stat().st_mode:o}" for path in found if path.stat().st_mode & 0o077]


WAYS: dict[str, Callable[[Path, Path], tuple[object, ...]]] = {
    "tensor": lambda trace, out: ("tensor", trace, "**", "--out", out),
    "jsonl": lambda trace, out: ("export", trace, "--format", "jsonl", "--out", out),
    "perfetto": lambda trace, out: ("export", trace, "--format", "perfetto", "--out", out),
    "parquet": lambda trace, out: ("export", trace, "--format", "parquet", "--out", out),
    "hf": lambda trace, out: ("export", trace, "--format", "hf", "--out", out),
    "safetensors": lambda trace, out: (
        *("export", trace, "--format", "hf", "--safetensors", "--out", out),
    ),
    "report": lambda trace, out: ("report", trace, "--out", out),
    "recover": lambda trace, out: ("recover", trace, "--out", out),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_a_command_writes_is_its_owners(way: str, trace: Path, tmp_path: Path):
    if way == "parquet" and find_spec("pyarrow") is None:
        pytest.skip("needs pyarrow, of the extra parquet")
    code, _, errors = command(*WAYS[way](trace, tmp_path / "out"))
    assert code in (0, 1), errors
    assert open_files(tmp_path / "out") == []


def test_so_is_a_proposed_layout(pair: Path, tmp_path: Path):
    code, _, errors = command("layout", pair, "--out", tmp_path / "out.toml")
    assert code == 0, errors
    assert open_files(tmp_path / "out.toml") == []


def test_so_is_a_golden_file_and_what_replaces_the_file_that_a_link_names(
    trace: Path, tmp_path: Path
):
    (tmp_path / "kept").mkdir()
    for name in ("golden", "tensors"):
        (tmp_path / "kept" / name).write_text("before")
        (tmp_path / name).symlink_to(tmp_path / "kept" / name)
    save_golden(trace, tmp_path / "golden")
    assert command("tensor", trace, "**", "--out", tmp_path / "tensors", "--force")[0] == 0
    for name in ("golden", "tensors"):
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "kept" / name).stat().st_size > len("before")
        assert open_files(tmp_path / "kept" / name) == []


def test_so_is_what_is_recovered_onto_another_disk(trace: Path, tmp_path: Path):
    other = Path("/dev/shm") / f"rankscope-{os.getpid()}"
    if not other.parent.is_dir() or other.parent.stat().st_dev == trace.stat().st_dev:
        pytest.skip("needs a second disk at /dev/shm")
    try:
        assert command("recover", trace, "--out", other / "out")[0] in (0, 1)
        assert open_files(other / "out") == []
    finally:
        shutil.rmtree(other, ignore_errors=True)
