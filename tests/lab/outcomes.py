"""A plugin of pytest that writes each test's outcome to a file at once.

A run that was stopped can go on behind the last of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the two files; pytest-xdist hands these options to its workers."""
    parser.addoption(
        "--outcomes", type=Path, help="append one JSON line for each test to this file"
    )
    parser.addoption(
        "--done", type=Path, help="leave out the tests that this file names, one a line"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what an earlier run has done.

    The file stays as it is while this run goes on: a worker that starts later, in place of one that
    crashed, has to collect the same tests as the others.
    """
    done = config.getoption("done")
    if done is None:
        return
    names = set(done.read_text().splitlines())
    left_out = [item for item in items if _name(item.nodeid) in names]
    items[:] = [item for item in items if _name(item.nodeid) not in names]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Write where the reports of all workers arrive."""
    if config.getoption("outcomes") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Log(config.getoption("outcomes")))


class _Log:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._worst: dict[str, tuple[str, str]] = {}
        """What the phases of a test that goes on have given: its outcome, and why."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test; write a line when it was the last one."""
        name = _name(report.nodeid)
        outcome, why = self._worst.get(name, ("passed", ""))
        if report.failed:
            outcome = "error" if report.when != "call" else "failed"
            why = _what_it_says(report.longreprtext)
        elif report.skipped:
            expected = getattr(report, "wasxfail", None)
            outcome = "skipped" if expected is None else "expected failure"
            why = report.longrepr[2] if expected is None else expected  # type: ignore[index]
        self._worst[name] = outcome, why
        is_crash = report.failed and report.when not in {"setup", "call", "teardown"}
        if report.when == "teardown" or is_crash:
            del self._worst[name]
            line = {"test": name, "outcome": outcome, "why": why.removeprefix("Skipped: ")}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _what_it_says(traceback: str) -> str:
    lines = [line[1:].strip() for line in traceback.splitlines() if line.startswith("E ")]
    return (lines or traceback.strip().splitlines()[-1:] or [""])[0]


def _name(nodeid: str) -> str:
    """Return a test's name without the group that pytest-xdist writes behind it."""
    before, _, group = nodeid.rpartition("@")
    return before if before and "/" not in group and "]" not in group else nodeid
