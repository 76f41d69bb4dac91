"""Lives of ranks that end by exit codes, start together, or run two programs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.launcher.launches import command_line, pids
from tests.launcher.test_lives import BIN, LIFE, TORCHRUN, left_in, start
from tests.launcher.ways import installed
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("lives"),
    installed,
]


def companions(*folders: Path) -> list[int]:
    """Return the process numbers of the companions that work in these folders."""
    marks = [os.fsencode(folder) for folder in folders]
    return [
        pid
        for pid in pids()
        if b"rankscope.companion" in (words := command_line(pid))
        and any(word.startswith(mark) for word in words for mark in marks)
    ]


def test_lives_that_end_by_an_exit_code_are_followed_by_slow_ones_with_the_variable_alone(
    tmp_path: Path,
):
    """Nobody tells a rank that its exit code is 3, nor when the agent will have started it again:
    as long as that lives and has restarts left, the run is not over.
    """
    found = start(
        [*TORCHRUN, "--max-restarts", "1"], tmp_path, "1",
        RANKSCOPE="1", RANKSCOPE_DRAIN_SECONDS="1", SLOW="3", BY_EXIT="1",
    )  # fmt: skip
    ends = {(rank["rank"], rank["incarnation"]): rank["end"] for rank in found["ranks"]}
    assert [ends[rank, 1] for rank in (0, 1)] == ["exit", "exit"]
    assert {ends[rank, 0] for rank in (0, 1)} <= {"raised", "lost"}
    assert found["complete"] is True


def test_ranks_that_start_together_start_one_companion(tmp_path: Path):
    """Each asks before the companion of the first has loaded what it needs."""
    trace, spool, go = tmp_path / "trace", tmp_path / "spool", tmp_path / "go"
    code = f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    (tmp_path / "script.py").write_text(LIFE + code)
    job = forked.Popen(
        [*TORCHRUN, str(tmp_path / "script.py"), str(tmp_path / "life")],
        env={
            **os.environ,
            "RANKSCOPE": "1",
            "RANKSCOPE_OUT": str(trace),
            "RANKSCOPE_SPOOL": str(spool),
        },
    )
    try:
        assert wait_until(lambda: [*trace.glob("spool/*.cells")])
        assert wait_until(lambda: len(companions(trace, spool)) <= 1)  # any other has said why not
        logs = [*spool.glob("*/*/companion.log"), trace / "collector.log"]
        said = "".join(log.read_text() for log in logs)
        assert "writing run" in said
        assert "is at work there" not in said
    finally:
        go.touch()
        assert job.wait(120) == 0
    assert wait_until(lambda: not any(spool.iterdir())), left_in(spool)


def test_a_plain_script_that_raises_has_its_tree_when_it_returns(tmp_path: Path):
    code = "import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2)); raise ValueError('on purpose')"
    done = forked.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "RANKSCOPE": "1", "RANKSCOPE_OUT": str(tmp_path / "trace")},
    )
    assert done.returncode == 1
    document = json.loads((tmp_path / "trace/trace.json").read_text())
    assert [rank["end"] for rank in document["completeness"]["ranks"]] == ["raised"]
    assert document["completeness"]["complete"] is True


def test_two_programs_that_a_rank_runs_one_after_the_other_are_two_lives(tmp_path: Path):
    """As after a restart that another host began: this host's agent does not count that one."""
    code = "import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2))"
    python = f"{sys.executable} -c '{code}'"
    command = [str(BIN / "rankscope"), "run", "--rs-out", str(tmp_path / "trace")]
    command += ["--nproc-per-node", "1", "--no-python", "sh", "-c", f"{python} && {python}"]
    forked.run(command, check=True, timeout=300)
    found = json.loads((tmp_path / "trace/trace.json").read_text())["completeness"]
    lives = [(rank["incarnation"], rank["end"]) for rank in found["ranks"]]
    assert lives == [(0, "exit"), (1, "exit")]
    assert found["complete"] is True
