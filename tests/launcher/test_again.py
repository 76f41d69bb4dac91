"""The same command again trains, and is traced: where its folder is taken, in a sibling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rankscope
from tests import forked
from tests.launcher.ways import BIN, installed
from tests.waiting import wait_until

pytestmark = [pytest.mark.launch, pytest.mark.xdist_group("again"), installed]

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
is_group = "RANK" in os.environ and not sys.argv[1:]
if is_group:
    dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2)).sum().backward()
if is_group:
    dist.all_reduce(model.weight.grad)
print("trained", flush=True)
if sys.argv[1:] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(7)
"""
RUN = [str(BIN / "rankscope"), "run"]
TORCHRUN = [str(BIN / "torchrun")]
ON_ONE_HOST = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]


def start(folder: Path, command: list[str], **variables: str) -> forked.Popen:
    return forked.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "RANKSCOPE_DRAIN_SECONDS": "2", **variables},
    )  # fmt: skip


def ended(*jobs: forked.Popen) -> list[str]:
    """Wait for jobs; return what each said on stderr."""
    said = [job.communicate(timeout=300) for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs), said
    assert all("trained" in out for out, _ in said), said
    return [err for _, err in said]


def ranks_in(out: Path) -> list[int]:
    """Return the ranks of a trace that is complete."""
    assert wait_until(lambda: (out / "trace.json").exists()), [*out.rglob("*")]
    found = json.loads((out / "trace.json").read_text())["completeness"]
    assert found["complete"], found
    return sorted({rank["rank"] for rank in found["ranks"]})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a script, and a `trace` that is somebody's."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "mine").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ([*RUN, "--rs-out", "trace", "--nproc-per-node", "2"], {}),
        pytest.param(
            [*ON_ONE_HOST, "--logs-specs", "rankscope"],
            {"RANKSCOPE_OUT": "trace"},
            marks=pytest.mark.lab,
        ),
        pytest.param(
            ON_ONE_HOST,
            {"RANKSCOPE_OUT": "trace", "RANKSCOPE": "1"},
            marks=pytest.mark.lab,
        ),
        ([sys.executable], {"RANKSCOPE_OUT": "trace", "RANKSCOPE": "1"}),
    ],
    ids=["wrapper", "logs-specs", "variable", "one process"],
)  # fmt: skip
def test_a_job_beside_a_folder_that_is_taken_is_traced_into_a_sibling(
    place: Path, command: list[str], variables: dict[str, str]
):
    """Two at once, as a sweep starts them: no folder is of both."""
    jobs = [start(place, [*command, "script.py"], **variables) for _ in range(2)]
    said = ended(*jobs)
    world = 1 if command == [sys.executable] else 2
    for name in ("trace-2", "trace-3"):
        assert ranks_in(place / name) == [*range(world)]
        line = f"{place / 'trace'} is not empty: tracing into {place / name}\n"
        assert sum(one.count(line) for one in said) == 1, said
    assert sorted(path.name for path in place.glob("trace*")) == ["trace", "trace-2", "trace-3"]
    assert [path.name for path in (place / "trace").iterdir()] == ["mine"]


def test_an_elastic_restart_stays_in_the_sibling(place: Path):
    command = [*RUN, "--rs-out", "trace", "--max-restarts", "1", "--nproc-per-node", "2"]
    ended(start(place, [*command, "script.py", "fails"]))
    found = json.loads((place / "trace-2/trace.json").read_text())["completeness"]["ranks"]
    assert sorted({rank["incarnation"] for rank in found}) == [0, 1]
    assert not (place / "trace-3").exists()


def test_a_folder_or_a_disk_that_cannot_be_used_costs_the_trace_and_not_the_training(place: Path):
    (place / "file").touch()
    for options, words in (
        (["--rs-out", "file"], "is a file, not a folder"),
        (["--rs-out", "new", "--rs-spool-bytes", "9000T"], "choose another disk with --rs-spool"),
    ):
        (said,) = ended(start(place, [*RUN, *options, "script.py"]))
        (line,) = [one for one in said.splitlines() if one.startswith("rankscope")]
        assert line.startswith("rankscope: not tracing: ") and words in line
    assert not (place / "new").exists()


def test_a_block_beside_a_folder_that_is_taken_opens_its_sibling(
    place: Path, capsys: pytest.CaptureFixture[str]
):
    import torch

    model = torch.nn.Linear(2, 2)
    for name in ("trace-2", "trace-3"):
        with rankscope.trace(model, out=place / "trace") as traced:
            model(torch.ones(1, 2))
        assert traced.path == place / name
        assert traced.open().path == place / name
        said = capsys.readouterr().err
        assert said == (f"rankscope: {place / 'trace'} is not empty: tracing into {place / name}\n")
