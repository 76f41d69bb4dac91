"""Entering and leaving a block: whatever fails in there, the program goes on as if untraced."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rankscope

Break = Callable[[Path, pytest.MonkeyPatch], dict[str, Any]]


def gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    return {}


class Unprintable:
    def __str__(self) -> str:
        raise KeyError("no text")


BROKEN: dict[str, Break] = {
    "the working folder is gone": gone,
    "the same, with a name below it": lambda f, m: gone(f, m) | {"out": "t"},
    "a zero byte": lambda f, m: {"out": "a\0b"},
    "a zero byte in another path": lambda f, m: {"out": f / "t", "spool": "a\0b"},
    "a lone surrogate": lambda f, m: {"out": f"{f}/\ud800"},
    "nobody's home": lambda f, m: {"out": "~nobody-of-that-name/t"},
    "an argument without a text": lambda f, m: {"out": Unprintable()},
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_block_that_cannot_begin_says_so_once_and_runs(
    broken: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = BROKEN[broken](tmp_path, monkeypatch)
    kept = []

    def run() -> None:
        with rankscope.trace(**given) as handle:
            kept.append(handle)
            raise KeyError("the user's own")

    with pytest.raises(KeyError) as raised:
        run()
    monkeypatch.chdir(tmp_path)
    assert kept[0].path is None
    assert raised.value.args == ("the user's own",) and raised.value.__context__ is None
    said = capsys.readouterr().err
    assert said.startswith("rankscope: not tracing: ") and said.count("\n") == 1


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for a folder or so, and for no more."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=2", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_under_the_trace_folder_is_said_and_the_block_runs(
    full_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with rankscope.trace(out=full_disk / "t") as handle:
        ran = torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape
    assert ran == (1, 2) and handle.path is None
    assert "No space left" in capsys.readouterr().err


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
