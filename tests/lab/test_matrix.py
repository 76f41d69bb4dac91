"""The table of releases is what their result files give, and a run goes on where one stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.matrix import PAGE, REPOSITORY, floors_of, mended, row, summary, with_table

SUITE = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", [1, 2])
def test_passes(number):
    pathlib.Path("ran").open("a").write(f"{number} ")

def test_is_skipped():
    pytest.skip("there is no such thing here")

@pytest.mark.xfail(reason="known")
def test_is_known_to_fail():
    assert 0

@pytest.mark.parametrize("address", ["a@b"])
def test_stops_the_first_run(address):
    if not pathlib.Path("stopped").exists():
        pathlib.Path("stopped").touch()
        os._exit(9)
    assert address == "b"

@pytest.fixture
def broken():
    raise OSError("no room")

def test_has_a_broken_fixture(broken):
    pass
"""


def test_a_run_that_was_stopped_goes_on_behind_the_last_test_that_ended(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(SUITE)
    log, done = tmp_path / "outcomes.jsonl", tmp_path / "done.txt"
    command = [sys.executable, "-m", "pytest", "-p", "tests.lab.outcomes", "-p", "no:cacheprovider"]
    command += ["--rootdir", ".", "--outcomes", str(log), "--done", str(done), "test_small.py"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ends = []
    for _ in range(2):
        lines = log.read_text().splitlines() if log.exists() else []
        done.write_text("".join(json.loads(line)["test"] + "\n" for line in lines))
        ends.append(subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode)
    assert ends == [9, 1]
    assert (tmp_path / "ran").read_text() == "1 2 "
    given = summary([json.loads(line) for line in log.read_text().splitlines()])
    assert given == {
        "passed": 2,
        "expected failures": 1,
        "failed": {
            "test_small.py::test_stops_the_first_run[a@b]": "AssertionError: assert 'a@b' == 'b'",
            "test_small.py::test_has_a_broken_fixture": "OSError: no room",
        },
        "skipped": {"there is no such thing here": 1},
    }


def test_the_table_of_the_page_is_what_the_result_files_give() -> None:
    assert with_table(PAGE.read_text()) == PAGE.read_text()


def test_the_floors_are_those_of_pyproject() -> None:
    floors = floors_of((REPOSITORY / "pyproject.toml").read_text()).split()
    assert {"numpy==2.0.1", "safetensors==0.8", "pyarrow==17", "triton==3.4"} <= set(floors)
    assert not [line for line in floors if line.startswith(("torch", "pytest", "tomli"))]


def test_a_result_is_one_row() -> None:
    result = {"versions": {"torch": "2.8.0+cu128", "python": "3.11.7"}, "floors": True}
    result |= {"passed": 5000, "failed": {"a": "b"}, "skipped": {"c": 2, "d": 1}}
    result |= {"expected failures": 4, "minutes": 17, "date": "2026-11-25", "revision": "8cec96131"}
    first, rest = row(result).split(" | none | ")
    assert first == "| 2.8.0 (all else at its floor)"
    assert rest == "3.11.7 | 5,000 | 1 | 3 | 4 | 17 | 2026-11-25, 8cec96131 |"


def test_tests_that_failed_count_as_the_commit_of_their_mend_gives_them() -> None:
    before = {"passed": 10, "expected failures": 1, "failed": {"a": "x", "b": "y", "c": "z"}}
    before |= {"skipped": {"no browser": 2}, "revision": "old", "date": "2026-11-25"}
    again = {"passed": 1, "expected failures": 0, "failed": {"c": "z"}, "revision": "new"}
    result = mended(before, {**again, "skipped": {"no browser": 1}})
    assert (result["passed"], result["failed"], result["skipped"]) == (
        11,
        {"c": "z"},
        {"no browser": 3},
    )
    assert (result["revision"], result["again"]) == ("old", "3 of them at new")
    with pytest.raises(SystemExit, match="3 tests had failed, and 1 of them are here"):
        mended(before, {**again, "skipped": {}, "failed": {}})
