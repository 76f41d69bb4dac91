"""Collectives of real training loops: numbers as without tracing, each under the module that
issued it, in backward too; and what a stuck job leaves behind.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.distributed import collectives_training_job as job
from tests.distributed.pool import RankFailure, RankPool
from tests.distributed.test_collectives import collectives, digests, read
from tests.waiting import wait_until

Found = dict[str, Any]


def issued(found: Found, rank: int = 0, step: int = 0) -> list[tuple[str, str, str, str]]:
    """Return (issuer, path, op, phase of the parent) of what a rank issued in a traced step."""
    return [
        (c["issuer"], c["path"], c["op"], c["parent"][0] if c["parent"] else "")
        for c in collectives(found, rank, step)
    ]


def traced(ranks: RankPool, folder: Path, name: str, steps: str = "1", world: int = 2) -> Found:
    ends = ranks.run(job.hold, str(folder / "trace"), name, steps, world_size=world)
    assert ends == [([False, True, steps != "1"], False)] * world
    return read(folder / "trace")


def test_tensor_parallel_layers_reduce_where_they_stand_forward_and_backward(
    ranks: RankPool, tmp_path: Path
) -> None:
    found = traced(ranks, tmp_path, "tensor_parallel", steps="1-2")
    of_modules = [
        ("forward", "blocks.0.down", "all_reduce", "forward"),
        ("forward", "blocks.1.down", "all_reduce", "forward"),
        ("backward", "blocks.1.up", "all_reduce", "backward"),
        ("backward", "blocks.0.up", "all_reduce", "backward"),
    ]
    of_the_loss = ("outside", "", "all_reduce", "")  # behind the optimizer's step
    assert issued(found, step=0) == [*of_modules, of_the_loss]
    assert issued(found, step=1) == of_modules  # the last that is traced
    first, second = (collectives(found, rank)[0] for rank in (0, 1))
    assert digests(first["inputs"]) != digests(second["inputs"])
    assert digests(first["outputs"]) == digests(second["outputs"])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.lab)])
def test_fsdp2_gathers_and_scatters_under_the_module_it_works_for(
    ranks: RankPool, tmp_path: Path, world: int
) -> None:
    found = traced(ranks, tmp_path, "sharded", world=world)
    for rank in range(world):
        scattered = [
            (path, phase)
            for issuer, path, op, phase in issued(found, rank)
            if op == "reduce_scatter_tensor" and issuer == "backward"
        ]
        assert scattered == [("blocks.1", "backward"), ("blocks.0", "backward"), ("", "backward")]
        gathered = [
            path
            for issuer, path, op, _ in issued(found, rank)
            if op == "all_gather_into_tensor" and issuer == "forward"
        ]
        assert gathered == ["", "blocks.0", "blocks.1"]


def test_what_is_written_by_hand_stands_where_it_was_issued(
    ranks: RankPool, tmp_path: Path
) -> None:
    found = traced(ranks, tmp_path, "ByHand")
    seen = issued(found)
    assert seen[:2] == [
        ("forward", "plain", "all_reduce", "forward"),
        ("forward", "again", "all_reduce", "forward"),
    ]
    assert ("recompute", "again", "all_reduce", "recompute") in seen
    assert seen.count(("backward", "plain", "all_reduce", "backward")) == 1
    hooks = [path for issuer, path, _, _ in seen if issuer == "backward" and path.endswith("layer")]
    assert sorted(hooks) == ["again.layer"] * 2 + ["plain.layer"] * 2
    assert seen[-1] == ("optimizer", "", "all_reduce", "")


def test_a_stuck_job_leaves_the_collective_it_is_stuck_in_open(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Other processes read it while the job hangs on."""
    with ThreadPoolExecutor(1) as pool:
        job_ends = pool.submit(ranks.run, job.run_stuck, str(tmp_path), world_size=2)
        assert wait_until((tmp_path / "left1").exists)
        assert wait_until(lambda: live(tmp_path / "trace"))
        assert not (tmp_path / "left0").exists()
        done, stuck = live(tmp_path / "trace")
        assert (done, stuck) == (["all_reduce", "returned", 0], ["all_reduce", "unfinished", 1])
        spools = [str(path) for path in (tmp_path / "spool").glob("*/*")]
        new = str(tmp_path / "new")
        recover = [sys.executable, "-m", "rankscope", "recover", *spools, "--out", new]
        forked.run(recover, check=False, timeout=300)
        assert not job_ends.done(), "the job was not stuck all the while"
        ranks.kill_ranks()
        with pytest.raises(RankFailure):
            job_ends.result()
    found = json.loads((tmp_path / "new" / "tree.json").read_text())
    done, stuck = collectives(found, 0)
    assert (done["op"], done["status"], done["sequence"]) == ("all_reduce", "returned", 0)
    assert (stuck["op"], stuck["status"], stuck["sequence"]) == ("all_reduce", "unfinished", 1)
    assert stuck["parent"] == ("forward", "", 0) and stuck["members"] == [0, 1]
    assert len(stuck["inputs"]) == 1 and not stuck["outputs"]
    assert [c["status"] for c in collectives(found, 1)] == ["returned"]


READ = """
import json, sys, rankscope
nodes = [n for s in rankscope.open_trace(sys.argv[1]).steps for n in s.walk()]
found = [n for n in nodes if n.phase.word == "collective"]
facts = [n.collectives[0][1] for n in found]
status = [next(o.status for o in n.outcomes if 0 in o.ranks) for n in found]
print(json.dumps([[f["op"], s, f["sequence"]] for f, s in zip(facts, status)]))
"""


def live(folder: Path) -> list[list[Any]]:
    """Return what another process reads of a job that runs: op, status, sequence; [] too early."""
    command = [sys.executable, "-c", READ, str(folder)]
    found = forked.run(command, capture_output=True, text=True, timeout=300, check=False)
    seen: list[list[Any]] = json.loads(found.stdout or "[]")
    return seen if len(seen) == 2 else []
