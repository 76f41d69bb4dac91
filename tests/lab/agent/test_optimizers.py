"""Optimizers that are copied, thrown away, or fail to be made."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope.agent.steps.optimizers import (
    OptimizerSearch,
)
from rankscope.record.call import Mode
from tests.agent.test_optimizers import no_optimizer_stays as no_optimizer_stays
from tests.agent.test_optimizers import search as search
from tests.agent.test_optimizers import sgd
from tests.models import Net, trace

Making = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]


def unpickled(optimizer: torch.optim.Optimizer) -> Any:
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("make", [copy.deepcopy, copy.copy, unpickled])
def test_a_copy_counts_as_an_optimizer_that_was_made(search: OptimizerSearch, make: Making) -> None:
    first = sgd()
    assert search.exists()
    second = make(first)
    del first
    gc.collect()
    assert search.exists(), type(second)
    del second
    gc.collect()
    assert not search.exists(), "one that is gone is no optimizer"


def test_a_class_once_used_and_thrown_away_makes_no_later_inference_one_step(
    tmp_path: Path,
) -> None:
    """Of an optimizer that is gone torch keeps a mark on the class alone."""
    model = Net()

    def forwards_around_an_optimizer() -> None:
        for _ in range(2):
            model(torch.ones(4, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        del optimizer
        gc.collect()
        for _ in range(2):
            model(torch.ones(4, 8))

    sgd()
    gc.collect()
    found = trace(tmp_path, forwards_around_an_optimizer, steps="all")
    assert [step.mode for step in found.steps] == [Mode.TRAIN] * 4


def test_a_constructor_that_raises_raises_the_same_and_leaves_nothing(
    search: OptimizerSearch,
) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        torch.optim.SGD([], lr=0.1)
    gc.collect()
    assert not search.exists()


def test_what_somebody_put_over_ours_stays_and_ours_looks_at_nothing_below_it(
    search: OptimizerSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = torch.optim.Optimizer.__init__
    calls: list[object] = []

    def theirs(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(optimizer)
        ours(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Optimizer, "__init__", theirs)
    search.uninstall()
    assert torch.optim.Optimizer.__init__ is theirs
    made = sgd()
    assert calls == [made]
    assert made not in search
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", ours.__wrapped__)  # type: ignore[attr-defined]
