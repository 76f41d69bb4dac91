"""Shards, and chunks that a kill left, read by somebody who has docs/trace-format.md alone."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
import torch

from tests import forked
from tests.launcher.launches import BIN
from tests.tree.test_plain_readers import numbers, read_plainly
from tests.waiting import wait_until


def test_the_shards_of_every_rank_are_read_with_safetensors_alone(ranks, tmp_path):
    from tests.distributed import global_tensors_job as job

    ranks.run(job.run, "tp", str(tmp_path / "trace"), world_size=2)
    found = read_plainly(tmp_path / "trace")
    whole = job.net().up.weight.detach().double()
    for rank, shard in enumerate(whole.chunk(2)):
        setup = [
            each["numbers"]
            for each in found["found"]
            if (each["path"], each["slot"], each["phase"], each["rank"])
            == ("up", "param:weight", "setup", rank)
        ]
        assert setup == [shard.flatten().tolist()]


SCRIPT = """
import os, pathlib, sys, time
import torch
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    output = model(torch.full((2, 4), step + 1.0))
    torch.save(output.detach(), f"{sys.argv[1]}/output.{rank}.{step}")
    output.sum().backward()
    optimizer.step()
pathlib.Path(f"{sys.argv[1]}/pid.{rank}").write_text(str(os.getpid()))
while True:
    time.sleep(0.02)
"""


@pytest.mark.launch
@pytest.mark.parametrize("victim", [0, 1])
def test_a_chunk_that_a_kill_left_unfinished_is_read_with_safetensors_alone(tmp_path, victim):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [
        BIN / "rankscope", "run", "--rs-out", tmp_path / "trace", "--rs-tensors", "**:output",
        "--rs-spool", tmp_path / "spool", "--nproc-per-node", 2, tmp_path / "script.py", tmp_path,
    ]  # fmt: skip
    job = forked.Popen([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert wait_until(lambda: all((tmp_path / f"pid.{rank}").exists() for rank in (0, 1)))
        assert wait_until(lambda: (tmp_path / f"pid.{victim}").read_text())
        os.kill(int((tmp_path / f"pid.{victim}").read_text()), signal.SIGKILL)
        job.communicate(timeout=300)
    finally:
        job.kill()
        job.wait()
    found = read_plainly(tmp_path / "trace")
    for rank in (0, 1):
        wanted = [torch.load(tmp_path / f"output.{rank}.{step}") for step in range(3)]
        held = numbers(found, "0", "output", rank)
        assert held == [each.double().flatten().tolist() for each in wanted]
    assert any("was left unfinished with" in text for text in found["said"])
