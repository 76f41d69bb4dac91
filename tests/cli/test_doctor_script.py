"""`rankscope doctor --script`: a script is held to itself, untraced and traced."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.launcher.ways import RANKSCOPE, installed

pytestmark = [installed, pytest.mark.launch]

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn

if "RANK" in os.environ:
    dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
if "RANK" in os.environ:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
for step in range(6):
    x = torch.randn(4, 8)
    if "--by-the-clock" in sys.argv:
        x = x + time.time_ns() % 1_000_003
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
open("reached the end", "w").close()
if "--fail" in sys.argv:
    raise ValueError("the script's own")
"""


def doctor(folder: Path, *words: str, **variables: str) -> tuple[int, dict[str, Any]]:
    """Ask about the script; return the exit code and the conditions by name."""
    (folder / "train.py").write_text(SCRIPT)
    done = forked.run(
        [RANKSCOPE, "doctor", "--json", *words],
        capture_output=True,
        text=True,
        timeout=600,
        generations=2,  # torchrun, and its ranks
        cwd=folder,
        env={**os.environ, "RANKSCOPE_SPOOL": str(folder), **variables},
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)["result"]
    return done.returncode, {c["name"]: c for c in report["conditions"]}


def statuses(found: dict[str, Any]) -> dict[str, str]:
    return {name: condition["status"] for name, condition in found.items()}


def test_a_script_of_two_ranks_is_the_same_and_is_stopped_after_its_steps(tmp_path: Path):
    code, found = doctor(tmp_path, "--nproc-per-node", "2", "--script", "train.py")
    assert code == 0
    assert statuses(found) == {"script": "ok", "repeatable": "ok", "traced": "ok"}
    assert "on 2 ranks ran until it had made 3 optimizer steps" in found["script"]["found"]
    assert "8 losses, 24 gradients, 24 parameters" in found["repeatable"]["found"]
    assert "calls recorded in 4 steps" in found["traced"]["found"]
    assert {path.name for path in tmp_path.iterdir()} <= {"train.py", f"rankscope-{os.getuid()}"}
