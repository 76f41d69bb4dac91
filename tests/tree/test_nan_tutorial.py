"""The recipes of docs/tutorials/nan.md for a loss that is flat or NaN, run as they stand there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rankscope.tree.build import build
from tests.conftest import REPOSITORY
from tests.tree.ranks_on_paper import PaperRank

FINE, BAD = np.ones(3, np.float32), np.array([1, np.nan, np.inf], np.float32)
PAGE = REPOSITORY / "docs" / "tutorials" / "nan.md"


def written(tmp_path: Path, wanted_tree: str) -> None:
    """A trace of two ranks; in its second step `down` is handed a NaN on rank 1."""
    for number in range(2):
        rank = PaperRank(tmp_path / "spools", number, 2)
        for step in range(2):
            is_bad = number == 1 and step == 1
            with rank.call(step=step) as root:
                rank.value(root, "input.0", FINE)
                with rank.call("up", step=step) as up:
                    rank.value(up, "output", FINE)
                with rank.call("down", step=step) as down:
                    rank.value(down, "input.0", BAD if is_bad else FINE)
                rank.value(root, "output", BAD if is_bad else FINE)
        rank.end()
        rank.ship(tmp_path / "trace")
    build(tmp_path / "trace", tree_mode=wanted_tree)


@pytest.mark.parametrize("wanted_tree", ["always", "never"])
def test_the_first_value_that_is_not_finite_is_found_inside_what_hands_it_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wanted_tree: str,
) -> None:
    written(tmp_path, wanted_tree)
    (recipe,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(recipe, "nan.md", "exec"), {})
    assert capsys.readouterr().out == "Step(train 1) forward down input.0 rank 1\n"


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_the_command_of_jq_lists_what_is_not_finite(tmp_path: Path) -> None:
    written(tmp_path, "always")
    (command,) = re.findall(
        r"^\$ (jq (?:.*\n)+?.*trace/tree\.json)$", PAGE.read_text(), re.MULTILINE
    )
    not_finite = subprocess.run(
        command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert not_finite.stdout == "1\tforward\t\toutput\t1\n1\tforward\tdown\tinput.0\t1\n"
