"""Which sibling of a folder that is taken all hosts of a run take."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.launcher.test_again import (
    ON_ONE_HOST,
    RUN,
    TORCHRUN,
    ended,
    ranks_in,
    start,
)
from tests.launcher.test_again import place as place
from tests.launcher.ways import installed
from tests.ports import free_port
from tests.torches import of_program

pytestmark = [pytest.mark.launch, pytest.mark.xdist_group("again"), installed]


BLOCKS = """
import sys
import torch
import torch.distributed as dist
import rankscope
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
for _ in range(2):
    with rankscope.trace(model, out="blocks") as traced:
        model(torch.ones(1, 2))
    dist.barrier()
    sys.stdout.write(f"{traced.path.name} {traced.open().run['world_size']}\\n")
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("way", "is_one_machine"),
    [("wrapper", True), ("wrapper", False), ("logs-specs", False), ("variable", False)],
)
def test_all_hosts_of_a_run_take_the_sibling_that_the_first_chose(
    place: Path, way: str, is_one_machine: bool
):
    """A run of the same name died in `trace-2` with all its processes: what it left lies there."""
    if not is_one_machine and subprocess.run(["unshare", "--uts", "true"]).returncode:
        pytest.skip("needs the right to make a namespace for a host name")
    out, port = str(place / "trace"), free_port()
    meet = ["--master-addr", "127.0.0.1", "--master-port", port]
    if is_one_machine:  # each host takes itself for the head
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    begin = {
        "wrapper": [*RUN, "--rs-out", out],
        "logs-specs": [*TORCHRUN, "--logs-specs", "rankscope"],
        "variable": TORCHRUN,
    }[way]

    def hosts() -> list[forked.Popen]:
        jobs = []
        for node in range(2):
            command = [*begin, *meet, "--nnodes", "2", "--nproc-per-node", "1"]
            command += [] if is_one_machine else ["--node-rank", str(node)]
            command = [*command, "script.py"]
            if node and not is_one_machine:
                line = f"hostname other && exec {shlex.join(command)}"
                command = ["unshare", "--uts", "sh", "-c", line]
            alone = {"RANKSCOPE": "1"} if way == "variable" else {}
            spool = str(place / f"spool{node}")
            given = {"RANKSCOPE_OUT": out, "RANKSCOPE_SPOOL": spool, "RANKSCOPE_KEEP_SPOOL": "1"}
            jobs.append(start(place, command, **given, **alone))
        return jobs

    ended(*hosts())
    assert ranks_in(place / "trace-2") == [0, 1]
    (place / "trace-2" / "trace.json").unlink()
    ended(*hosts())
    assert ranks_in(place / "trace-3") == [0, 1]
    assert sorted(path.name for path in place.glob("trace*")) == ["trace", "trace-2", "trace-3"]


def test_the_folder_may_have_the_schedulers_job_id_in_its_name_else_that_of_the_run(place: Path):
    alone = [*RUN, "--rs-out", "runs/%j/trace", "script.py"]
    ended(start(place, alone, SLURM_JOB_ID="4711"))
    assert ranks_in(place / "runs/4711/trace") == [0]
    ended(start(place, [sys.executable, "script.py"], RANKSCOPE="1", RANKSCOPE_OUT="one-%j"))
    (made,) = place.glob("one-*")
    assert "%" not in made.name and ranks_in(made) == [0]
    document = json.loads((made / "trace.json").read_text())
    assert made.name == f"one-{document['run']['id']}"


def test_blocks_of_several_ranks_one_after_the_other_open_each_its_own_folder(place: Path):
    (place / "script.py").write_text(BLOCKS)
    done = forked.run(
        [*ON_ONE_HOST, "script.py"], cwd=place, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(of_program(done.stdout).splitlines()) == [
        "blocks 2", "blocks 2", "blocks-2 2", "blocks-2 2"
    ], done.stderr  # fmt: skip
