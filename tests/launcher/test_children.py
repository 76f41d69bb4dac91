"""What a traced process starts does not trace, does not hang it and does not harm it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope import open_trace
from tests.launcher.launches import before_verdict
from tests.launcher.ways import RANKSCOPE, TORCHRUN, document_of, installed, start_forked
from tests.torches import of_program

pytestmark = [installed, pytest.mark.launch, pytest.mark.xdist_group("children")]

JOB = Path(__file__).parent / "children_job.py"


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ([RANKSCOPE, "run", "--nproc-per-node", "2", JOB, "few"], {}),
        pytest.param(
            [*TORCHRUN, "--nproc-per-node", "2", JOB, "before"],
            {"RANKSCOPE": "1"},
            marks=pytest.mark.lab,
        ),
    ],
    ids=["run", "variable, children before the first step"],
)
def test_loaders_pools_forks_subprocesses_and_jobs_of_a_rank_are_not_traced(
    command: list[str | Path], variables: dict[str, str], tmp_path: Path
):
    """Workers that run a module, of all start methods; a Python and a torchrun with more ranks than
    the job, both with the rank's variables inherited.
    """
    out = tmp_path / "trace"
    done = start_forked(command, out, RANKSCOPE_SPOOL=str(tmp_path / "spool"), **variables)
    assert sorted(of_program(done.stdout).splitlines()) == ["trained 0", "trained 1"]
    lives = [(r["rank"], r["incarnation"]) for r in document_of(out)["completeness"]["ranks"]]
    assert lives == [(0, 0), (1, 0)]
    trace = open_trace(out)
    assert [step.step for step in trace.steps] == [0, 1]
    assert {node.path for step in trace.steps for node in step.nodes} == {""}
    said = before_verdict(done.stderr.splitlines())
    assert len(said) == 2, said  # where it goes, and where it went
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("trace")] == ["trace"]


def test_a_launcher_that_was_given_the_rank_of_its_node_has_traced_ranks(tmp_path: Path):
    """Cluster templates set RANK and WORLD_SIZE to the node's number, and run torchrun there."""
    script = tmp_path / "script.py"
    script.write_text("import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()")
    start_forked(
        [*TORCHRUN, "--nproc-per-node", "2", script], tmp_path / "trace",
        RANKSCOPE="1", RANK="0", WORLD_SIZE="1",
    )  # fmt: skip
    found = document_of(tmp_path / "trace")["completeness"]["ranks"]
    assert [rank["rank"] for rank in found] == [0, 1]
