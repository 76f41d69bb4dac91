"""`clean` removes what dead runs left, and nothing in use, another's, or in no trace and
young."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankscope.run.folders import (
    LAUNCHER_LOCK_NAME,
    FolderLock,
    RunHeader,
    host_run_folder,
    run_key,
    spool_base,
    write_run_header,
)
from rankscope.run.processes import process_name
from rankscope.tree.build import build
from tests import forked
from tests.cli.test_commands import rankscope
from tests.tree.ranks_on_paper import PaperRank

DAY_S = 86400


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return spool_base(tmp_path / "disk")


def dead_run(base: Path, name: str, *, days: float = 1, cut: int = 0, agent: str = "") -> Path:
    """Leave the run folder of a job whose trace is `base/../../NAME`, but for `cut` bytes."""
    out = base.parents[1] / name
    folder = host_run_folder(base, run_key(name))
    header = RunHeader(run_id=name, out=out, collector="shared", world_size=1, agent=agent)
    write_run_header(folder, header)
    rank = PaperRank(folder)
    with rank.call():
        pass
    rank.end()
    rank.ship(out, cut=cut)
    build(out)
    aged(folder, days)
    return folder


def aged(folder: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then))


def clean(base: Path, *words: object) -> tuple[int, str, str]:
    return rankscope("clean", "--spool", base.parent, *words)


def test_what_is_in_a_trace_goes_and_what_is_nowhere_else_is_named_and_goes_when_it_is_old(
    base: Path,
) -> None:
    copied = dead_run(base, "copied")
    young, old = dead_run(base, "young", cut=64), dead_run(base, "old", days=9, cut=64)
    code, out, _ = clean(base, "--dry-run")
    assert code == 0 and copied.is_dir() and young.is_dir() and old.is_dir()
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert f"all of it is in {base.parents[1] / 'copied'}" in lines[str(copied)]
    for folder, name in ((young, "young"), (old, "old")):
        trace = base.parents[1] / name
        command = f"rankscope recover {folder} {trace} --out {trace}-recovered"
        assert lines[str(folder)].endswith(f"records that are in no finished trace: {command}")
    assert "  stays (younger" in lines[str(young)] and "  goes: " in lines[str(old)]
    code, out, _ = clean(base, "--older", "30d", "--yes")
    assert code == 0 and not copied.exists() and old.is_dir()
    code, out, _ = clean(base, "--yes")
    assert code == 0 and not old.exists() and young.is_dir()
    assert out.splitlines()[-1].startswith("removed 1 folder, ")
    (line,) = [line for line in out.splitlines() if line.startswith(str(young))]
    assert rankscope(*shlex.split(line.partition("finished trace: rankscope ")[2]))[0] == 0


def test_a_run_in_use_one_just_begun_and_what_is_not_rankscopes_stay(base: Path) -> None:
    held, begun = dead_run(base, "held", days=9, cut=64), dead_run(base, "begun", days=0)
    owned = dead_run(base, "owned", days=9, agent=process_name(os.getpid()))
    other = base / "notes"
    other.mkdir()
    (other / "000000.cells").touch()
    aged(other, 90)
    (base / "link").symlink_to(other)
    lock = FolderLock(held / LAUNCHER_LOCK_NAME, "launcher")
    aged(held, 9)
    code, out, _ = clean(base, "--yes")
    assert code == 0 and "nothing to remove" in out
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "stays (in use)" in lines[str(held)] and "stays (in use)" in lines[str(owned)]
    assert "stays (younger than a minute)" in lines[str(begun)]
    assert held.is_dir() and begun.is_dir() and owned.is_dir() and (base / "link").is_symlink()
    assert f"{other}" not in out and (other / "000000.cells").exists()
    lock.release()
    assert clean(base, "--yes")[0] == 0
    assert not held.exists() and begun.is_dir()


def test_old_traces_go_where_they_are_asked_for_and_hold_nothing_else(
    base: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    for name in ("old", "young", "noted", "running"):
        rank = PaperRank(tmp_path / f"spool-{name}")
        rank.end()
        rank.ship(folder / name)
        build(folder / name)
        aged(folder / name, 1 if name == "young" else 9)
    lost = folder / "lost"
    PaperRank(tmp_path / "spool-lost").ship(lost)
    aged(lost, 9)
    (folder / "noted/notes.txt").write_text("mine")
    aged(folder / "noted", 9)
    (folder / "code").mkdir()
    (folder / "code/trace.json").write_text('{"traceEvents": []}')
    aged(folder / "code", 9)
    running = dead_run(base, "runs/running", days=9)
    aged(folder / "running", 9)
    lock = FolderLock(running / LAUNCHER_LOCK_NAME, "launcher")
    code, out, _ = clean(base, "--yes")
    assert code == 0 and (folder / "old").is_dir(), "nobody asked for traces"
    code, out, _ = clean(base, "--traces", folder, "--yes")
    lock.release()
    assert code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["code", "noted", "running", "young"]
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "stays (it holds notes.txt)" in lines[str(folder / "noted")]
    assert "rankscope recover" in lines[str(lost)] and str(folder / "code") not in lines


def test_nothing_goes_before_somebody_said_yes(base: Path) -> None:
    copied = dead_run(base, "copied")
    command = [sys.executable, "-m", "rankscope", "clean", "--spool", str(base.parent)]
    done = forked.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
    )
    assert done.returncode == 2 and "--yes" in done.stderr and copied.is_dir()
    for answer in (b"n\n", b"y\n"):
        ours, theirs = pty.openpty()
        os.write(ours, answer)
        done = forked.run(command, capture_output=True, text=True, stdin=theirs, timeout=300)
        assert done.returncode == 0, done.stderr
        assert copied.is_dir() is (answer == b"n\n")
        os.close(ours)
        os.close(theirs)


def test_an_age_that_is_none_is_refused(base: Path) -> None:
    for age in ("7", "d", "-1d", "7 years"):
        code, _, err = clean(base, "--older", age)
        assert code == 2 and "7d" in err, age
