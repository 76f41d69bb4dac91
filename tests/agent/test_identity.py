"""Who a process is, from the variables of each launcher."""

from __future__ import annotations

import pytest

from rankscope.agent.identity import identify, launcher_place

STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0"}


def numbers(environ: dict[str, str], group: tuple[int, int] | None = None) -> tuple[int, ...]:
    who = identify(group, environ)
    return who.rank, who.world_size, who.local_rank, who.local_world_size


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0, 1)),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            (5, 8, 1, 4),
        ),
        ({"RANK": "5"}, (0, 1, 0, 1)),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            (3, 4, 1, 2),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, 1, 2)),
        (
            {
                "MV2_COMM_WORLD_RANK": "3",
                "MV2_COMM_WORLD_SIZE": "4",
                "MV2_COMM_WORLD_LOCAL_RANK": "1",
                "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            },
            (3, 4, 1, 2),
        ),
    ],
    ids=["nobody", "torchrun", "half of it", "mpirun", "mpiexec", "mvapich"],
)
def test_variables_of_a_launcher_say_who_a_process_is(
    environ: dict[str, str], expected: tuple[int, ...]
):
    assert numbers(environ) == expected


@pytest.mark.parametrize(
    ("environ", "here"),
    [
        ({"SLURM_NTASKS_PER_NODE": "1"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "0"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "1"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_NODEID": "2"}, 1),
        ({"SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_NODEID": "1", "SLURM_NNODES": "3"}, 1),
        ({"SLURM_STEP_NUM_NODES": "3", "SLURM_NNODES": "9"}, 1),
        ({"SLURM_NNODES": "1"}, 3),
    ],
    ids=["per node", "uneven", "its end", "repeated", "the job's, not the step's", "nodes", "one"],
)
def test_slurm_says_in_many_ways_how_many_tasks_share_a_node(environ: dict[str, str], here: int):
    assert numbers({**STEP, "SLURM_PROCID": "1", **environ}) == (1, 3, 0, here)


def test_where_slurm_cannot_say_it_the_ranks_are_not_placed():
    found = launcher_place({**STEP, "SLURM_PROCID": "1", "SLURM_NNODES": "2"})
    assert found is not None
    assert (found.local_rank, found.local_world_size) == (0, None)


def test_a_step_of_fewer_tasks_than_the_job_counts_its_own():
    environ = {**STEP, "SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"}
    assert numbers(environ)[:2] == (1, 2)


def test_a_batch_script_is_no_rank_of_its_job():
    """What sbatch runs has the variables of task 0 without a step: `python train.py` in it is one
    process, not the first of eight.
    """
    environ = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert numbers(environ) == (0, 1, 0, 1)


def test_the_process_group_wins_and_then_nobody_says_which_ranks_share_the_host():
    """One Slurm task a node that spawns a rank for each of its accelerators."""
    environ = {**STEP, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
    assert numbers(environ, (5, 8)) == (5, 8, 5, 8)
    assert numbers(environ, (1, 2)) == (1, 2, 0, 1)
