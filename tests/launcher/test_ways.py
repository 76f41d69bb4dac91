"""One unmodified script, every way of starting it: the same tree when the command returns."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.launcher.launches import before_verdict
from tests.launcher.ways import (
    BIN,
    EXAMPLES,
    RANKSCOPE,
    STEPS,
    TORCHRUN,
    installed,
    start,
    start_forked,
    steps_of,
)
from tests.torches import of_program

pytestmark = [installed, pytest.mark.launch]

ISOLATED = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import ddp; ddp.main()"
"""`python -I` does not look for modules where the script is."""


@pytest.mark.xdist_group("ways")
@pytest.mark.parametrize(
    ("begin", "command", "variables"),
    [
        pytest.param(
            start,
            [*TORCHRUN, "--nproc-per-node", "2", "ddp.py"],
            {"RANKSCOPE": "1"},
            marks=pytest.mark.lab,
        ),
        pytest.param(
            start_forked,
            [*TORCHRUN, "--nproc-per-node", "2", "-m", "ddp"],
            {"RANKSCOPE": "1"},
            marks=pytest.mark.lab,
        ),
        (
            start_forked,
            [*TORCHRUN, "--logs-specs", "rankscope", "--nproc-per-node", "2", "ddp.py"],
            {},
        ),
        (start, [RANKSCOPE, "run", "--nproc-per-node", "2", "-m", "ddp"], {}),
        pytest.param(
            start_forked,
            [RANKSCOPE, "run", "--nproc-per-node=2", "--run-path", "ddp.py"],
            {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{EXAMPLES}"},  # runpy adds no folder
            marks=pytest.mark.lab,
        ),
        pytest.param(
            start_forked,
            [RANKSCOPE, "run", "--standalone", "--nnodes", "1:1", "--nproc-per-node", "2"]
            + ["--local-ranks-filter", "0", "--redirects", "2", "ddp.py"],
            {},
            marks=pytest.mark.lab,
        ),
        pytest.param(
            start_forked,
            [*TORCHRUN, "--nproc-per-node", "2", "--redirects", "2"]
            + ["--no-python", sys.executable, "ddp.py"],
            {"RANKSCOPE": "1"},
            marks=pytest.mark.lab,
        ),
        pytest.param(
            start,
            [*TORCHRUN, "--logs-specs", "rankscope", "--nproc-per-node", "2"]
            + ["--no-python", sys.executable, "-I", "-c", ISOLATED],
            {},
            marks=pytest.mark.lab,
        ),
    ],
    ids=[
        "variable",
        "variable, module",
        "logs-specs",
        "run, module",
        "run, path",
        "run, a range of one host, filtered, redirected",
        "variable, redirected, no python",
        "logs-specs, standalone, isolated python",
    ],
)
def test_every_way_of_starting_gives_the_same_tree_and_the_same_stdout(
    begin: Callable[..., subprocess.CompletedProcess[str]],
    command: list[str],
    variables: dict[str, str],
    tmp_path: Path,
    ddp_run: tuple[Any, str],
):
    """A script under torchrun, a module under `rankscope run` and a command of an isolated Python
    are really started; the other ways differ from these in what torchrun does with its arguments.
    The script under torchrun is also in front of a pipe, below.
    """
    done = begin(command, tmp_path / "trace", **variables)
    assert of_program(done.stdout) == ddp_run[1]
    assert steps_of(tmp_path / "trace") == ddp_run[0]


@pytest.mark.xdist_group("ways")
def test_a_pipe_behind_the_job_sees_its_end_when_the_job_ends(
    tmp_path: Path, ddp_run: tuple[Any, str]
):
    """With the variable, whose companions outlive the ranks; the others' are the launcher's own."""
    begin = time.monotonic()
    done = subprocess.run(
        "RANKSCOPE=1 torchrun --standalone --nproc-per-node 2 ddp.py 2>&1 | cat",
        shell=True,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=EXAMPLES,
        env={
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RANKSCOPE_OUT": str(tmp_path / "trace"),
            "RANKSCOPE_STEPS": STEPS,
        },
    )
    assert {*ddp_run[1].splitlines()} <= {*done.stdout.splitlines()}
    assert steps_of(tmp_path / "trace") == ddp_run[0]
    assert time.monotonic() - begin < 150, "its companions live on, and hold no pipe of it"


@pytest.mark.xdist_group("ways")
def test_a_failed_job_keeps_its_exit_code_and_has_its_tree(tmp_path: Path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import sys, torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "sys.exit(3)\n"
    )
    done = forked.run(
        [RANKSCOPE, "run", "--rs-out", str(tmp_path / "trace"), str(script)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert (tmp_path / "trace/trace.json").exists()
    assert "ChildFailedError" in done.stderr
    assert before_verdict(done.stderr.splitlines())[-1].startswith("rankscope: trace in")
    assert done.stderr.splitlines()[-1].startswith("rankscope: fault: crash")
