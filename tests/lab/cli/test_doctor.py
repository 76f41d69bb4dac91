"""`rankscope doctor`: interpreters, sources and start-up files that are wrong in rarer ways."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.doctor.job import interpreter_conditions
from tests.cli.test_doctor import (
    BARE,
    LINE,
    SOURCES,
    TORCH,
    asked,
    environment,
    names,
    wrong,
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(point)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def test_a_disk_that_is_really_small_is_named(tmp_path: Path, small_disk: Path) -> None:
    assert asked(tmp_path, spool=str(small_disk)) == {}
    names(asked(tmp_path, spool=str(small_disk), spool_bytes="16M"), "spool space", "needs 32 MiB")
    (small_disk / "hog").write_bytes(bytes(7 << 20))
    names(asked(tmp_path, spool=str(small_disk)), "spool space", "needs 2 MiB")


def test_an_interpreter_that_is_not_there_or_has_no_site_packages_is_named() -> None:
    found = wrong(interpreter_conditions(("/nowhere/python",), BARE))
    names(found, "python", "--python")
    names(wrong(interpreter_conditions((sys.executable, "-S"), BARE)), "python", "without -S")
    names(wrong(interpreter_conditions(("false",), BARE)), "python", "ended with 1")


def test_sources_that_an_isolated_interpreter_cannot_see_are_named(tmp_path: Path) -> None:
    python = environment(tmp_path, a=TORCH)
    seen = BARE | {"PYTHONPATH": os.pathsep.join(SOURCES)}
    assert list(wrong(interpreter_conditions(python, seen))) == ["start-up file"]
    names(wrong(interpreter_conditions((*python, "-I"), seen)), "rankscope", "cannot import it")


def test_other_sources_that_stand_in_front_are_named(tmp_path: Path) -> None:
    shutil.copytree(SOURCES[0], tmp_path / "old", ignore=shutil.ignore_patterns("__pycache__"))
    python = environment(tmp_path / "e", a="\n".join([*SOURCES, TORCH]), rankscope=LINE)
    in_front = BARE | {"PYTHONPATH": str(tmp_path / "old")}
    names(wrong(interpreter_conditions(python, in_front)), "rankscope", f"{tmp_path}/old/rankscope")


def test_a_copy_without_its_start_up_file_is_named(tmp_path: Path) -> None:
    python = environment(tmp_path, a="\n".join([*SOURCES, TORCH]))
    names(wrong(interpreter_conditions(python, BARE)), "start-up file", "rankscope.attach()")
