"""Activations that nobody declared: what all siblings do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnosis.paper import judged, module, numbers, origins, setup
from tests.tree.ranks_on_paper import PaperRank


def rows(rank: PaperRank, *, layers: int, lost: int, tokens: int = 0) -> None:
    """Hand-written row-parallel layers: each rank its own inputs, the sum of all as output."""
    weights = {f"layers.{n}.o_proj.weight": numbers(100 * n + rank.rank) for n in range(layers)}
    setup(rank, weights)
    with rank.call(class_name="Model") as top:
        rank.value(top, "input.0", numbers(7 + tokens * rank.rank))
        for n in range(layers):
            made = numbers(50 + n + 10 * (n == lost) * (1 + rank.rank))
            module(rank, f"layers.{n}.o_proj", numbers(20 + 5 * n + rank.rank), made)


@pytest.mark.parametrize(("layers", "lost"), [(2, 0), (2, 1), (5, 3)])
def test_a_layer_that_lost_its_reduction_is_named(tmp_path: Path, layers: int, lost: int):
    report = judged(tmp_path, 2, lambda rank: rows(rank, layers=layers, lost=lost))
    path = f"layers.{lost}.o_proj"
    assert origins(report) == [("replica-mismatch", "forward", path, "output", (0, 1))]
    assert report.findings[0].evidence["layout"] == "inferred"


def test_nothing_is_inferred_where_ranks_were_handed_other_data(tmp_path: Path):
    report = judged(tmp_path, 2, lambda rank: rows(rank, layers=4, lost=1, tokens=1))
    assert origins(report) == []


def test_dropout_with_a_seed_per_rank_is_left_alone(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model") as top:
            rank.value(top, "input.0", numbers(7))
            for n, same in enumerate((True, False)):
                made = numbers(30 + n + (0 if same else 5 * rank.rank))
                module(rank, f"layers.{n}.dropout", numbers(20 + n), made, class_name="Dropout")

    assert origins(judged(tmp_path, 2, write)) == []


def test_one_layer_of_many_that_differs_by_itself_is_named(tmp_path: Path):
    def write(rank: PaperRank) -> None:
        with rank.call(class_name="Model") as top:
            rank.value(top, "input.0", numbers(7))
            for n in range(4):
                made = numbers(30 + n + (5 * rank.rank if n == 2 else 0))
                module(rank, f"layers.{n}.norm", numbers(20 + n), made, class_name="Norm")

    (found,) = origins(judged(tmp_path, 2, write))
    assert found[2:] == ("layers.2.norm", "output", (0, 1))
