"""Of two ranks the one that left what both held is named, where a record tells it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankscope.record.finding import Finding
from rankscope.record.phases import Phase
from tests.diagnosis.paper import collective, event, judged, module, numbers, setup, told
from tests.tree.ranks_on_paper import PaperRank

WEIGHT = numbers(1)
GRADIENT = numbers(2)


def final(what: str, rank: int) -> np.ndarray:
    """The gradient that a rank steps with: rank 1 keeps its own."""
    return own(rank) if "kept" in what and rank else GRADIENT


def own(rank: int) -> np.ndarray:
    """The gradient before it is averaged."""
    return GRADIENT + numbers(4) * np.float32(-1 if rank else 1)


def step(what: str, rank: int) -> np.ndarray:
    """What the weight is after a step, which rank 1 takes otherwise."""
    before, rate = WEIGHT, np.float32(0.1)
    if "adam" in what:
        return before - rate * np.sign(GRADIENT) + ("moved" in what) * rank * numbers(3)
    if rank and "stayed" in what:
        return before
    if rank and "moved" in what:
        before = before + numbers(3)
    if rank and "rate" in what:
        rate = np.float32(0.2)
    return before - rate * final(what, rank)


def first(folder: Path, what: str) -> Finding:
    def write(rank: PaperRank) -> None:
        setup(rank, {"fc.weight": WEIGHT}, wrappers=["DDP"])
        with rank.call(class_name="Model") as root:
            module(rank, "fc", numbers(10 + rank.rank), numbers(20 + rank.rank))
            if "reduced" in what:
                collective(rank, "fc", 1, own(rank.rank), GRADIENT, parent=root, reduce="avg")
        event(rank, Phase.GRADS, "grad", {"fc.weight": final(what, rank.rank)})
        event(rank, Phase.PARAMS, "param", {"fc.weight": step(what, rank.rank)})

    return judged(folder, 2, write).findings[0]


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("stayed", "parameter-not-updated", "was not moved"),
        ("moved", "replica-mismatch", "moved elsewhere than its gradient says"),
    ],
)
def test_the_rank_whose_gradient_does_not_explain_its_step_is_named(
    tmp_path: Path, what: str, kind: str, words: str
):
    found = first(tmp_path, what)
    assert told(found) == (kind, "params", "fc", "param:weight", (1,))
    assert words in found.message
    assert "rank_resolution" not in found.evidence


@pytest.mark.parametrize("what", ["rate", "adam moved"])
def test_where_both_or_neither_follow_their_gradient_both_are_named(tmp_path: Path, what: str):
    found = first(tmp_path, what)
    assert told(found) == ("replica-mismatch", "params", "fc", "param:weight", (0, 1))
    assert found.evidence["rank_resolution"] == "none"


def test_a_gradient_that_is_not_what_the_reduction_gave_names_its_rank(tmp_path: Path):
    found = first(tmp_path, "reduced kept")
    assert told(found) == ("replica-mismatch", "grads", "fc", "grad:weight", (1,))
    assert "changed the gradient that the reduction gave" in found.message


def test_gradients_that_nothing_was_seen_to_reduce_name_both(tmp_path: Path):
    assert told(first(tmp_path, "kept"))[4] == (0, 1)
