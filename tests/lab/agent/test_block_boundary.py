"""Blocks whose folders, descriptors or peers fail them at their begin or end."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import rankscope
from tests import forked
from tests.distributed.pool import RankPool


def test_a_process_without_a_descriptor_left_runs_the_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with rankscope.trace(out=tmp_path / "before"):
        pass
    capsys.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with rankscope.trace(out=tmp_path / "t") as handle:
            path = handle.path
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert path is None
    assert capsys.readouterr().err.count("rankscope: not tracing: ") == 1


def fill(folder: Path) -> None:
    """Write until the disk takes no more."""
    with suppress(OSError), (folder / "ballast").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("tensors", [{}, {"tensors": "**"}], ids=["digests", "tensors"])
@pytest.mark.parametrize("what", ["gone", "full"])
def test_a_block_whose_folder_fails_it_at_its_end_says_what_makes_the_tree(
    what: str,
    tensors: dict[str, Any],
    small_disk: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The records are kept on the spools' disk, and the command that is named reads them."""
    model, out = torch.nn.Linear(2, 2), small_disk / "t"

    def run() -> None:
        with rankscope.trace(model, out=out, spool=tmp_path / "spool", **tensors):
            model(torch.ones(1, 2))
            shutil.rmtree(out) if what == "gone" else fill(small_disk)
            raise KeyError("the user's own")

    with pytest.raises(KeyError) as raised:
        run()
    assert raised.value.args == ("the user's own",) and raised.value.__context__ is None
    said = capsys.readouterr().err
    assert "the tree could not be built" in said and "rankscope recover " in said
    (run_folder,) = (tmp_path / "spool").glob("*/*")
    done = forked.run(
        [sys.executable, "-m", "rankscope", "recover", run_folder, "--out", tmp_path / "made"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert rankscope.open_trace(tmp_path / "made").find("", phase="forward")


def leave(folder: str, what: str) -> tuple[list[str], list[float]]:
    """Train in a block whose trace folder is gone, or its disk full, at the end."""
    out = Path(folder) / "t"
    torch.manual_seed(0)
    model, losses = torch.nn.Linear(2, 2), []
    with rankscope.trace(out=out, spool=Path(folder).parent / "spool", finish_seconds=1):
        for _ in range(2):
            losses.append(model(torch.ones(1, 2)).sum().item())
            rankscope.step()
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(out) if what == "gone" else fill(Path(folder))
        torch.distributed.barrier()
    torch.distributed.barrier()
    return [str(path) for path in Path(folder).iterdir()], losses


@pytest.mark.parametrize("what", ["gone", "full"])
def test_ranks_whose_common_folder_fails_them_leave_the_block_as_ever(
    what: str, ranks: RankPool, small_disk: Path
) -> None:
    (_, plain), (_, other) = ranks.run(leave, str(small_disk), what, world_size=2)
    assert len(plain) == 2 and plain == other


NO_DESCRIPTOR = """
import resource, torch, rankscope
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
rankscope.attach(steps="0")
try:
    with rankscope.trace() as handle:
        raise KeyError("the user's own")
except KeyError as error:
    print(handle.path, error.__context__)
"""


def test_a_first_use_without_a_descriptor_left_runs_the_program(tmp_path: Path) -> None:
    """Nothing of ours can be imported then: no guard of ours is there to say so."""
    done = subprocess.run(
        [sys.executable, "-c", NO_DESCRIPTOR],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("RANKSCOPE")},
    )
    assert (done.returncode, done.stdout) == (0, "None None\n"), done.stderr
    assert done.stderr.count("rankscope: not tracing: ") == 2
    assert done.stderr.count("\n") == 2 and "Too many open files" in done.stderr
    assert [*tmp_path.rglob("*")] == []
