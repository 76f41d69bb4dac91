"""Launchers other than torchrun: the same tree as `rankscope run`, with the variable alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.launcher.ways import STEPS, installed, start_forked, steps_of
from tests.ports import free_port

pytestmark = [installed, pytest.mark.launch, pytest.mark.xdist_group("ways")]

JOB = Path(__file__).parent / "launches_job.py"
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "2",
}

BINDS = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))"

ONE_TASK = {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.fixture(scope="module")
def expected(ddp_run: tuple[Any, str]) -> Any:
    """What `rankscope run` makes of the same training."""
    return ddp_run[0]


@pytest.mark.parametrize(
    ("method", "task"),
    [
        ("spawn", {}),
        pytest.param("fork", {}, marks=pytest.mark.lab),
        pytest.param("forkserver", {}, marks=pytest.mark.lab),
        ("fork", ONE_TASK),
    ],
    ids=["spawn", "fork", "forkserver", "fork in the one task of a host"],
)
def test_ranks_that_only_their_process_group_knows_give_the_same_tree(
    method: str, task: dict[str, str], tmp_path: Path, expected: Any
):
    done = start_forked(
        [sys.executable, JOB, method], tmp_path / "trace", RANKSCOPE="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port(), **task,
    )  # fmt: skip
    assert steps_of(tmp_path / "trace") == expected
    assert done.stderr.count("rankscope: ") == 2, "said where it goes, and where it is"


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), SLURM),
        pytest.param(
            ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
            {**SLURM, "SHELL_AROUND": "1"},
            marks=pytest.mark.lab,
        ),
        pytest.param(
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
            {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            marks=pytest.mark.lab,
        ),
        pytest.param(
            ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
            {"MPI_LOCALNRANKS": "2"},
            marks=pytest.mark.lab,
        ),
        pytest.param(("PMI_RANK", "PMI_SIZE", ""), {}, marks=pytest.mark.lab),
        (("RANK", "WORLD_SIZE", ""), {}),
    ],
    ids=["srun", "srun, a shell", "mpirun", "mpiexec", "mpiexec, no local ranks", "by hand"],
)
def test_ranks_that_a_launchers_variables_number_give_the_same_tree(
    names: tuple[str, str, str], shared: dict[str, str], tmp_path: Path, expected: Any
):
    """Each rank behind a script of its own that binds it to its cores."""
    command = [sys.executable, "-c", BINDS, str(JOB), "variables", *names[:2]]
    if "SHELL_AROUND" in shared:
        command = ["sh", "-c", f"{sys.executable} {JOB} variables {names[0]} {names[1]}; exit $?"]
    out = tmp_path / "trace"
    common = {
        "RANKSCOPE": "1", "RANKSCOPE_OUT": str(out), "RANKSCOPE_STEPS": STEPS,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), **shared,
    }  # fmt: skip
    ranks = [
        forked.Popen(
            command,
            env={**os.environ, **common}
            | {name: value for name, value in zip(names, (str(rank), "2", str(rank))) if name},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert steps_of(out) == expected, said
    assert "".join(said).count("rankscope: ") == 2, said
