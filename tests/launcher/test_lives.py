"""Ranks that raise, come back, or are not traced: what of it is in the tree, and who waits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.launcher.ways import installed
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("lives"),
    installed,
]

BIN = Path(sys.executable).parent
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
RUN = [str(BIN / "rankscope"), "run", "--nproc-per-node", "2"]
LIFE = """
import os, pathlib, sys, time, torch
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    time.sleep(float(os.environ.get("SLOW", "0")))
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
life, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
pathlib.Path(f"{sys.argv[1]}.{life}.{rank}").touch()
while not all(os.path.exists(f"{sys.argv[1]}.{life}.{other}") for other in "01"):
    time.sleep(0.01)
if len(sys.argv) > 2 and life < sys.argv[2]:
    if "BY_EXIT" in os.environ:
        sys.exit(3)
    raise ValueError("on purpose")
"""


def left_in(spool: Path) -> str:
    """Name what lies in a spool, and what the relays said: why a test failed."""
    found = sorted(path for path in spool.rglob("*") if path.is_file())
    said = [log.read_text() for log in found if log.suffix == ".log"]
    return "\n".join([*map(str, found), *said])


def start(command: list[str], folder: Path, *arguments: str, **variables: str) -> Any:
    """Run the script; return the completeness of its trace, after looking into every folder."""
    script = folder / "script.py"
    script.write_text(LIFE)
    spool = folder / "spool"
    done = forked.run(
        [*command, str(script), str(folder / "life"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "RANKSCOPE_OUT": str(folder / "trace"),
            "RANKSCOPE_SPOOL": str(spool),
            "RANKSCOPE_LIVE_CHECK": "0",  # whose findings.jsonl would tell of lives that crash
            **variables,
        },
    )
    assert done.returncode == 0, done.stderr
    assert f"trace in {folder / 'trace'}" in done.stderr
    tree = {"trace.json", "tree.json", "steps"}  # it is whole before the collector has left
    assert wait_until(lambda: {path.name for path in (folder / "trace").iterdir()} == tree)
    assert wait_until(lambda: not any(spool.iterdir())), left_in(spool)
    return json.loads((folder / "trace/trace.json").read_text())["completeness"]


@pytest.mark.parametrize(
    ("command", "restarts", "variables"),
    [
        (TORCHRUN, 1, {"RANKSCOPE": "1", "RANKSCOPE_DRAIN_SECONDS": "100"}),
        # the launcher's side of `rankscope run`, in a torchrun of its own
        pytest.param([*TORCHRUN, "--logs-specs", "rankscope"], 1, {}, marks=pytest.mark.lab),
        ([*RUN, "--rs-drain-seconds", "0"], 2, {}),
    ],
    ids=["variable", "logs-specs", "run"],
)
def test_every_life_of_ranks_that_raised_and_were_restarted_is_in_the_tree_and_listed(
    command: list[str], restarts: int, variables: dict[str, str], tmp_path: Path
):
    found = start([*command, "--max-restarts", str(restarts)], tmp_path, str(restarts), **variables)
    ends = {(rank["rank"], rank["incarnation"]): rank["end"] for rank in found["ranks"]}
    assert set(ends) == {(rank, life) for rank in (0, 1) for life in range(restarts + 1)}
    assert [ends[rank, restarts] for rank in (0, 1)] == ["exit", "exit"]
    for life in range(restarts):
        of_life = {ends[rank, life] for rank in (0, 1)}
        assert "raised" in of_life
        assert of_life <= {"raised", "lost"}  # the agent ends the others as soon as one failed
    assert found["complete"] is True
    listed = forked.run(
        [str(BIN / "rankscope"), "verify", str(tmp_path / "trace")], capture_output=True, text=True
    )
    assert listed.returncode == 0
    assert [line.split()[:2] for line in listed.stdout.splitlines() if line.endswith("exit")] == [
        [str(rank), str(restarts)] for rank in (0, 1)
    ]


def test_ranks_that_could_be_restarted_and_end_well_have_their_tree_when_it_is_read(
    tmp_path: Path,
):
    """While restarts are left no rank may wait for the tree: the agent waits for the rank."""
    (tmp_path / "script.py").write_text(LIFE)
    done = forked.run(
        [*TORCHRUN, "--max-restarts", "2", str(tmp_path / "script.py"), str(tmp_path / "life")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "RANKSCOPE": "1", "RANKSCOPE_OUT": str(tmp_path / "trace")},
    )
    assert done.returncode == 0, done.stderr
    assert f"the trace follows in {tmp_path / 'trace'}" in done.stderr
    shown = forked.run(
        [str(BIN / "rankscope"), "verify", str(tmp_path / "trace")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert shown.returncode == 0, shown
    assert (tmp_path / "trace/trace.json").exists()


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ([*RUN, "--rs-ranks", "1"], {}),
        (TORCHRUN, {"RANKSCOPE": "1", "RANKSCOPE_RANKS": "1"}),
    ],
    ids=["run", "variable"],
)
def test_ranks_that_are_not_traced_are_not_waited_for_and_not_missing(
    command: list[str], variables: dict[str, str], tmp_path: Path
):
    found = start(command, tmp_path, RANKSCOPE_DRAIN_SECONDS="100", **variables)
    assert [rank["rank"] for rank in found["ranks"]] == [1]
    assert (found["complete"], found["missing"]) == (True, "")
    verified = forked.run(
        [str(BIN / "rankscope"), "verify", str(tmp_path / "trace")], capture_output=True, text=True
    )
    assert verified.returncode == 0
    assert "complete" in verified.stdout
