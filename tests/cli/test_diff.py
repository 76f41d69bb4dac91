"""The command `diff`: exit codes, the first lines, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import rankscope
from rankscope.cli.app import main


def run(folder: Path, *, epsilon: float = 1e-5) -> str:
    """Trace two training steps of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=epsilon), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(model, out=folder, steps="all"):
        for step in range(2):
            torch.manual_seed(step)
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return str(folder)


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(["diff", *words])
    return int(left.value.code or 0), capsys.readouterr().out


def test_the_same_run_twice_is_clean_and_exits_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = asked(capsys, run(tmp_path / "a"), run(tmp_path / "b"))
    assert code == 0
    assert text.startswith("clean (")


def test_a_wrong_constant_is_told_in_the_first_five_lines_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = run(tmp_path / "a"), run(tmp_path / "b", epsilon=1e-2)
    code, text = asked(capsys, *pair)
    lines = text.splitlines()
    assert code == 1
    assert lines[0].startswith("fault: ")
    assert lines[1].startswith("  before any number: ")
    assert lines[2].startswith("  first: 1:output: ")
    code, text = asked(capsys, *pair, "--json")
    report = json.loads(text)
    assert (code, report["command"], report["verdict"]) == (1, "diff", "fault")
    assert report["findings"][0]["path"] == "1"
    assert {line["what"] for line in report["preflight"]} >= {"samples", "start", "steps"}


def test_a_rule_that_is_none_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = run(tmp_path / "a")
    code, text = asked(capsys, trace, trace, "--map", "nothing", "--json")
    assert code == 2
    assert "write 'regex=replacement'" in json.loads(text)["error"]
