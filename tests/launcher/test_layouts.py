"""Layouts given at trace time, from the command line and from a variable, to the tree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.layout.placement import LayoutSource
from rankscope.tracing import open_trace
from tests import forked
from tests.launcher.launches import BIN

pytestmark = pytest.mark.launch
SCRIPT = """
import os
os.chdir("/")
import torch
rank = int(os.environ["RANK"])
torch.manual_seed(0)
whole = torch.nn.Linear(4, 6, bias=False)
mine = torch.nn.Linear(4, 3, bias=False)
mine.weight.data.copy_(whole.weight.data.chunk(2)[rank])
model = torch.nn.Sequential(mine)
model(torch.ones(2, 4)).sum().backward()
torch.save(whole.weight.detach(), os.environ["WHOLE"])
"""
LAYOUT = """
axes = "tp=2"
[[layout]]
path = "0"
slot = "param:weight"
placements = { tp = "Shard(0)" }
"""


def train(folder: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    return forked.run(
        [*map(str, words), "--nproc-per-node", "2", str(folder / "script.py")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "WHOLE": str(folder / "whole.pt"), **variables},
    )


@pytest.mark.parametrize("way", ["option", pytest.param("variable", marks=pytest.mark.lab)])
def test_a_file_named_from_here_goes_into_the_trace_and_places_what_was_cut_by_hand(
    tmp_path: Path, way: str
) -> None:
    import torch

    (tmp_path / "layout.toml").write_text(LAYOUT)
    run = [BIN / "rankscope", "run", "--rs-out", "trace", "--rs-tensors", "**:param:*"]
    given = ["--rs-layout", "layout.toml"] if way == "option" else []
    variables = {} if given else {"RANKSCOPE_LAYOUT": str(tmp_path / "layout.toml")}
    done = train(tmp_path, *run, *given, **variables)
    assert done.returncode == 0, done.stderr
    trace = open_trace(tmp_path / "trace")
    assert trace.run["layout"] == {"file": str(tmp_path / "layout.toml"), "text": LAYOUT}
    value = trace.value("0", "param:weight", phase="setup")
    assert value.layout.source is LayoutSource.DECLARED
    with pytest.warns(UserWarning, match="given at trace time, declares it: tp=Shard"):
        assert value.full().equal(torch.load(tmp_path / "whole.pt"))


def test_a_bad_file_in_a_variable_is_said_once_and_the_job_trains_untraced(tmp_path: Path) -> None:
    (tmp_path / "layout.toml").write_text("axes = 2")
    done = train(
        tmp_path, sys.executable, "-m", "torch.distributed.run", "--standalone",
        RANKSCOPE="1", RANKSCOPE_LAYOUT=str(tmp_path / "layout.toml"),
        RANKSCOPE_OUT=str(tmp_path / "trace"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "RANKSCOPE_LAYOUT" in line]
    assert len(said) == 1 and "layout.toml: axes = 2: write axes =" in said[0]
    assert (tmp_path / "whole.pt").exists() and not (tmp_path / "trace").exists()


def test_axes_of_another_number_of_ranks_are_said_and_the_job_is_traced_without(
    tmp_path: Path,
) -> None:
    (tmp_path / "layout.toml").write_text(LAYOUT.replace("tp=2", "tp=3"))
    done = train(
        tmp_path, sys.executable, "-m", "torch.distributed.run", "--standalone",
        RANKSCOPE="1", RANKSCOPE_LAYOUT=str(tmp_path / "layout.toml"),
        RANKSCOPE_OUT=str(tmp_path / "trace"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "are those of 3 ranks" in line]
    assert len(said) == 1 and said[0].endswith("it is not used")
    trace = open_trace(tmp_path / "trace")
    assert trace.value("0", "param:weight", phase="setup").layout.source is LayoutSource.UNKNOWN
    assert "it is not used" in trace.run["layout"]["notes"][0]
