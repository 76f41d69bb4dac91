"""Hosts that lack what others have: no compiler, a home that cannot be written, temporary files
that may not be run, and the 64 MB of shared memory that containers are given.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

IN_NAMESPACE = ["unshare", "--mount", "--propagation", "private"]
BARE = """
set -eu
mount -t tmpfs -o noexec,size=2g tmpfs "$TMPDIR"
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount --bind "$HOME" "$HOME"
mount -o remount,ro,bind "$HOME"
exec "$@"
"""
PROGRAM = """
import gc
import torch
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
del model, optimizer
gc.collect()  # else one small job of ten aborts in gloo's thread as Python ends, traced or not
torch.distributed.destroy_process_group()
"""

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        subprocess.run([*IN_NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
        reason="needs the right to mount file systems in a namespace of its own",
    ),
]


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("none", "there is no C compiler"),
        ("cc", "does not load (noexec?) or gives other numbers"),
    ],
)
def test_a_job_of_a_bare_host_has_its_verdict_and_what_is_slower_is_said_once(
    tmp_path: Path, compiler: str, reason: str
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    for name in ("home", "tmp", "bin"):
        (tmp_path / name).mkdir()
    for name in ("bash", "mount", *(["cc", "as", "ld"] if compiler == "cc" else [])):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    for variable, name in (("HOME", "home"), ("TMPDIR", "tmp"), ("PATH", "bin")):
        environment[variable] = str(tmp_path / name)
    command = [sys.executable, "-m", "rankscope", "run", "--rs-out", "trace"]
    command += ["--nproc-per-node", "2", "train.py"]
    bare = [shutil.which("unshare"), *IN_NAMESPACE[1:], "bash", "-c", BARE, "bash", *command]
    done = subprocess.run(
        bare, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "numpy takes the digests" in line]
    assert len(told) == 1 and reason in told[0]
    assert done.stderr.splitlines()[-1].startswith("rankscope: no fault found")
    trace = json.loads((tmp_path / "trace" / "trace.json").read_text())
    assert trace["completeness"]["complete"]
    assert not [*(tmp_path / "home").iterdir()]
