"""Lives of ranks on several hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.tree.reader import open_trace
from tests import forked
from tests.launcher.test_hosts import BIN
from tests.launcher.ways import installed
from tests.ports import free_port

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("lives"),
    installed,
]


ROUNDS = """
import os, pathlib, sys, time
import torch
folder, node = pathlib.Path(sys.argv[1]), os.environ["NODE"]
(folder / f"start.{node}.{os.getpid()}").touch()
round = len([*folder.glob(f"start.{node}.*")]) - 1
if node == "1" or round != 1:
    torch.nn.Linear(2 + round, 2)(torch.ones(1, 2 + round))
    (folder / f"called.{node}.{round}").touch()
others = "1" if round == 1 else "01"
while not all((folder / f"called.{other}.{round}").exists() for other in others):
    time.sleep(0.02)
if round < 2 and node == "1":
    sys.exit(3)
time.sleep(600 if round < 2 else 0)
"""


def test_a_life_is_the_same_round_on_every_host_whoever_counted_its_restarts(tmp_path: Path):
    """torchelastic (2.13) counts the restarts of each agent: here two on one host, none on the
    other. A rank that called no module in a round does not count for it.
    """
    (tmp_path / "script.py").write_text(ROUNDS)
    endpoint = f"127.0.0.1:{free_port()}"
    hosts = [
        forked.Popen(
            [str(BIN / "rankscope"), "run", "--rs-out", str(tmp_path / "trace")]
            + ["--rs-spool", str(tmp_path / f"spool{node}"), "--rs-drain-seconds", "2"]
            + ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
            + ["--rdzv-id", "rounds", "--max-restarts", "2", "--nproc-per-node", "1"]
            + [str(tmp_path / "script.py"), str(tmp_path)],
            env={**os.environ, "NODE": str(node)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        said = [host.communicate(timeout=300)[1] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], said
    trace = open_trace(tmp_path / "trace")
    ranks = trace.completeness["ranks"]
    assert sorted(rank["incarnation"] for rank in ranks) == [0, 0, 1, 2, 2]
    for group in trace.setup:
        (node,) = group.walk()
        (weight,) = (slot for slot in node.slots if slot.slot == "param:weight")
        shapes = {fold.shape for fold in weight.folds}
        assert shapes == {(2, 2 + group.incarnation)}


SPAWN = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = torch.nn.Linear(2, 2)  # in DDP it would keep the group's threads beyond its end
    model(torch.ones(1, 2)).sum().backward()
    dist.all_reduce(model.weight.grad)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""


def test_ranks_that_only_their_process_group_knows_make_one_trace(tmp_path: Path):
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    forked.run(
        [sys.executable, str(script), free_port()],
        env={**os.environ, "RANKSCOPE": "1", "RANKSCOPE_OUT": str(tmp_path / "trace")},
        check=True,
        timeout=300,
    )
    found = json.loads((tmp_path / "trace/trace.json").read_text())["completeness"]
    assert [(rank["rank"], rank["end"]) for rank in found["ranks"]] == [(0, "exit"), (1, "exit")]
    assert found["complete"] is True
