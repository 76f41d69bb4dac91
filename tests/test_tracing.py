"""The block as a notebook uses it: run again and again, and asked for what is not there."""

from __future__ import annotations

import os
import pty
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rankscope
from rankscope.errors import TraceError
from tests import forked
from tests.conftest import REPOSITORY


class Layer(nn.Module):
    """What the README's example names."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


def test_the_example_of_the_readme_runs_twice_and_prints_short_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "rankscope.trace(" in block]
    for _ in range(2):
        exec(compile(example, "README.md", "exec"), {"model": Model(), "batch": torch.ones(2, 4)})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all("output float32[2, 4]" in line for line in lines[::2])
    assert max(map(len, lines)) < 100
    assert len([*tmp_path.glob("rankscope-*/trace.json")]) == 2


def test_what_could_not_be_traced_says_why_where_it_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").touch()
    with rankscope.trace(out=tmp_path / "notes.txt") as refused:
        pass
    with rankscope.trace(out=tmp_path / "new") as traced, rankscope.trace() as inner:
        pass
    said = capsys.readouterr().err
    for handle, words in ((refused, "is a file"), (inner, "is traced already")):
        assert handle.path is None
        with pytest.raises(TraceError, match=words):
            handle.open()
        assert words in repr(handle)
        assert words in said
    assert repr(traced) == f"TraceHandle({tmp_path / 'new'})"


def test_a_refused_block_leaves_no_trace_in_the_exception_of_what_runs_in_it(
    tmp_path: Path,
) -> None:
    """The reason is no context of the user's exception: a traceback would show both."""
    (tmp_path / "notes.txt").touch()
    with pytest.raises(KeyError) as raised, rankscope.trace(out=tmp_path / "notes.txt"):
        raise KeyError("the user's own")
    assert raised.value.__context__ is None


ON_A_SLOW_DISK = """
import rankscope, sys, time, torch
def slow(event, given, waited=[]):
    if event == "open" and "000000.safetensors" in str(given[0]) and not waited:
        waited.append(time.sleep(1.5))
model = torch.nn.Linear(4, 4)
with rankscope.trace(model, out=sys.argv[1], steps="all"):
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
    sys.addaudithook(slow)
"""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_leaving_a_block_shows_on_a_terminal_how_far_the_tree_is(
    tmp_path: Path, is_terminal: bool
) -> None:
    (tmp_path / "script.py").write_text(ON_A_SLOW_DISK)
    reading, writing = pty.openpty() if is_terminal else os.pipe()
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "trace")]
    with forked.Popen(command, stderr=writing) as job:
        os.close(writing)
        said = b""
        try:
            while more := os.read(reading, 4096):
                said += more
        except OSError:
            pass  # that is how a terminal ends
        os.close(reading)
    assert job.returncode == 0
    shown = [line for line in said.decode().split("\r") if "writing" in line]
    assert bool(shown) is is_terminal
    line_of_progress = r"rankscope: writing (steps|the tree) +\d+% \(\d+ s\) *$"
    assert all(re.match(line_of_progress, line) for line in shown)
    assert not said.strip() or said.endswith(b" \r"), "the line is taken away again"
