"""Entering and leaving a block: whatever fails in there, the program goes on as if untraced."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import rankscope
from tests import forked

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
    "a folder in the place of the model": lambda f, m: {"model": str(f / "t")},
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


# ---- a beginning that fails half-way -------------------------------------------------------------


@contextmanager
def no_file_may_grow() -> Iterator[None]:
    """As `ulimit -f 0`; Python ignores the signal that comes with it."""
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


HALF_WAY: dict[str, tuple[Callable[[], AbstractContextManager[None]], dict[str, Any]]] = {
    "no file may grow": (no_file_may_grow, {}),
    "no file may grow, and tensors are kept": (no_file_may_grow, {"tensors": "**"}),
    "too large a budget for tensors": (nullcontext, {"tensors": "**", "tensor_budget": "900000T"}),
    "a spool too large for its disk": (nullcontext, {"spool_bytes": "900000T"}),
}


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("case", HALF_WAY)
def test_a_beginning_that_fails_half_way_leaves_nothing_behind(
    case: str, is_there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty folder left behind would be the newest trace here, and a lock would keep the next
    block out."""
    around, settings = HALF_WAY[case]
    out, spool = tmp_path / "new" / "t", tmp_path / "spool"
    if is_there:
        out.mkdir(parents=True)
    with around(), rankscope.trace(out=out, spool=spool, **settings) as handle:
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    assert handle.path is None
    assert capsys.readouterr().err.count("rankscope: not tracing: ") == 1
    assert sorted(tmp_path.rglob("*")) == ([out.parent, out] if is_there else [])
    with rankscope.trace(out=out, spool=spool) as handle:
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    assert handle.open().is_complete


def test_a_trace_folder_that_cannot_be_written_leaves_nothing_behind(
    full_disk: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(full_disk)], check=True)
    for out in (full_disk, full_disk / "t"):
        with rankscope.trace(out=out, spool=tmp_path / "spool") as handle:
            pass
        assert handle.path is None
        assert "folder you may write" in capsys.readouterr().err
    assert [*full_disk.iterdir()] == [] and not (tmp_path / "spool").exists()


# ---- leaving -------------------------------------------------------------------------------------


ATTACHED = """
import resource, sys, torch, rankscope
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
rankscope.attach(out=sys.argv[1], spool=sys.argv[3])
print(torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape)
"""


@pytest.mark.parametrize("case", ["limit", "read-only"])
def test_attach_with_a_folder_it_cannot_use_says_so_once_and_leaves_nothing(
    case: str, tmp_path: Path
) -> None:
    place = Path("/proc") if case == "read-only" else tmp_path / "new"
    done = forked.run(
        [sys.executable, "-c", ATTACHED, place / "t", case, tmp_path / "spool"],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("RANKSCOPE")},
    )
    assert (done.returncode, done.stdout) == (0, "torch.Size([1, 2])\n"), done.stderr
    assert done.stderr.count("rankscope: not tracing: ") == 1
    assert [*tmp_path.rglob("*")] == []
