"""What rules are given does not change under them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

import rankscope
from rankscope.diagnosis.check import check
from rankscope.diagnosis.context import CheckContext, JudgedStep
from rankscope.diagnosis.evidence.stepview import StepView


def trained(folder: Path) -> Path:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(model, out=folder / "trace"):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    return folder / "trace"


def test_a_step_and_its_history_refuse_to_be_written(tmp_path: Path) -> None:
    lives = []

    def write(step_view: StepView, context: CheckContext) -> None:
        assert isinstance(step_view, JudgedStep)
        for owner, name in (
            (step_view, "step"),
            (step_view, "life"),
            (step_view.life, "is_spoiled"),
            (context, "layouts"),
        ):
            with pytest.raises(FrozenInstanceError):
                setattr(owner, name, getattr(owner, name))
        lives.append(step_view.life)

    check(trained(tmp_path), each_step=write)
    assert len({id(life) for life in lives}) == len(lives) == 3


def test_a_step_has_the_history_that_the_steps_before_left(tmp_path: Path) -> None:
    lives = []
    check(trained(tmp_path), each_step=lambda step_view, _: lives.append(step_view.life))
    at_setup, at_first, at_second = lives
    assert at_setup.setup is None and not at_setup.parameters
    assert at_first.setup.is_setup and not at_first.stepped
    assert at_second.stepped == {0} and not at_second.begins_late
    assert (at_second.parameters["", "param:weight"].hashes
            != at_first.parameters["", "param:weight"].hashes).all()  # fmt: skip
