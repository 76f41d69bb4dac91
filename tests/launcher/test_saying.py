"""What each way of starting says when something is wrong: once, in the words it was asked in, and
the program trains.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.launcher.ways import RANKSCOPE, TORCHRUN, installed

pytestmark = [installed, pytest.mark.launch, pytest.mark.xdist_group("saying")]

TRAINS = (
    "import sys, torch; torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward(); "
    "sys.stdout.write('trained\\n')"  # one write: two ranks share a pipe
)


def said(
    command: list[str], folder: Path, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run `train.py` with a command; return what happened and rankscope's own lines."""
    (folder / "train.py").write_text(TRAINS)
    done = forked.run(
        [*command, "train.py"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, **variables},
    )
    return done, [line for line in done.stderr.splitlines() if line.startswith("rankscope")]


TWO = [*TORCHRUN, "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (TWO, {"RANKSCOPE": "1"}),
        pytest.param([*TWO, "--logs-specs", "rankscope"], {}, marks=pytest.mark.lab),
        ([sys.executable], {"RANKSCOPE": "1"}),
    ],
    ids=["variable", "logs-specs", "python"],
)
@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"RANKSCOPE_STEPS": "x"}, "RANKSCOPE_STEPS: 'x' is not a step: write"),
        ({"RANKSCOPE_OUT": "train.py"}, "give another name with RANKSCOPE_OUT"),
    ],
    ids=["setting", "folder"],
)
def test_what_is_wrong_is_said_once_in_variables_and_the_job_trains_untraced(
    command: list[str],
    variables: dict[str, str],
    wrong: dict[str, str],
    line: str,
    tmp_path: Path,
):
    spool = tmp_path / "spool"
    done, lines = said(command, tmp_path, RANKSCOPE_SPOOL=str(spool), **variables, **wrong)
    assert done.returncode == 0
    assert done.stdout == "trained\n" * (1 if command == [sys.executable] else 2)
    assert len(lines) == 1, lines
    assert line in lines[0]
    assert "--rs-" not in lines[0]
    assert not spool.exists() or list(spool.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} <= {"train.py", "spool"}


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (TWO, {"RANKSCOPE": "1"}),
        pytest.param([*TWO, "--logs-specs", "rankscope"], {}, marks=pytest.mark.lab),
        ([RANKSCOPE, "run", "--nproc-per-node", "2"], {}),
    ],
    ids=["variable", "logs-specs", "run"],
)
def test_a_misspelt_variable_is_said_once_and_the_job_is_traced(
    command: list[str], variables: dict[str, str], tmp_path: Path
):
    done, lines = said(
        command, tmp_path, RANKSCOPE_OUT="trace", RANKSCOPE_STEPSS="all", **variables
    )
    assert done.returncode == 0
    assert (
        sum("RANKSCOPE_STEPSS is not a setting, did you mean RANKSCOPE_STEPS?" in x for x in lines)
        == 1
    )
    assert (tmp_path / "trace/trace.json").exists(), lines


def test_calls_in_code_are_told_in_keywords_and_attach_without_the_variable_does_nothing(
    tmp_path: Path,
):
    """As in the cells of a notebook; the second mistake is said although the first one was."""
    (tmp_path / "file").touch()
    code = f"""
import sys, torch, rankscope
model = torch.nn.Linear(2, 2)
rankscope.attach()
print("rankscope.agent.activation" in sys.modules)
with rankscope.trace(model, out="file") as trace:
    model(torch.ones(1, 2))
with rankscope.trace(model, out="new", steps="x"):
    pass
rankscope.attach(step="all")
rankscope.attach(step="all")
with rankscope.trace(model, out="new") as trace:
    {TRAINS.partition(";")[2]}
print([step.step for step in trace.open().steps])
rankscope.attach(out="attached", steps="0")
for _ in range(2):
    model(torch.ones(1, 2))
"""
    done = forked.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False", "trained", "[0]"]
    lines = done.stderr.splitlines()
    assert "file is a file, not a folder: give another name with out=" in lines[0]
    assert "steps: 'x' is not a step" in lines[1]
    assert lines[2] == lines[3]
    assert "'step' is not a setting" in lines[2]
    assert "--rs-" not in done.stderr
    assert (tmp_path / "attached/trace.json").exists(), lines
