"""The recipe of docs/questions.md for a loss that is NaN, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from rankscope.tree.build import build
from tests.conftest import REPOSITORY
from tests.tree.ranks_on_paper import PaperRank

FINE, BAD = np.ones(3, np.float32), np.array([1, np.nan, np.inf], np.float32)


@pytest.mark.parametrize("inline_limit_bytes", [1 << 20, 100], ids=["small", "large"])
def test_the_first_value_that_is_not_finite_is_found_inside_what_hands_it_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    inline_limit_bytes: int,
) -> None:
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
    build(tmp_path / "trace", inline_limit_bytes=inline_limit_bytes)
    page = (REPOSITORY / "docs" / "questions.md").read_text()
    (recipe,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(recipe, "questions.md", "exec"), {})
    assert capsys.readouterr().out == "Step(train 1) forward down input.0 rank 1\n"
