"""Digests of shards and partial sums, each taken on its rank, combine to that of the whole."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from tests.capture import composition_job
from tests.distributed.pool import RankPool

Rank = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(ranks: RankPool) -> list[Rank]:
    """What each of the four ranks read, with lists for tuples."""
    found = ranks.run(composition_job.run, world_size=composition_job.WORLD)
    return [json.loads(json.dumps(each)) for each in found]


def cases(ranks: list[Rank], *, partial: bool, composable: bool = True) -> list[list[Rank]]:
    """Return, per case of the kind asked for, what every rank read."""
    by_case = list(zip(*(rank["cases"] for rank in ranks), strict=True))
    return [
        list(of_ranks)
        for of_ranks in by_case
        if of_ranks[0]["composable"] == composable
        and any("Partial" in p for p in of_ranks[0]["placements"].values()) == partial
    ]


def pieces(of_ranks: list[Rank]) -> list[Rank]:
    """Return one rank's reading for every different piece: replicas count once."""
    held = []
    for rank in of_ranks:
        placements = rank["placements"].values()
        if not any(
            index
            for index, p in zip(rank["coordinate"], placements, strict=True)
            if p == "Replicate()"
        ):
            held.append(rank)
    return held


def share(rank: Rank) -> float:
    """Return what a partial piece counts for: an average is of as many as its axes have ranks."""
    factors = (
        1 / n
        for n, p in zip(rank["mesh_shape"], rank["placements"].values(), strict=True)
        if p == "Partial(avg)"
    )
    return math.prod(factors)


def test_composed_sketches_equal_the_sketch_of_the_whole(ranks: list[Rank]) -> None:
    everything = cases(ranks, partial=False) + cases(ranks, partial=True)
    assert len(everything) > 60
    for case in everything:
        whole = case[0]["whole"]
        total = sum(share(rank) * np.array(rank["reading"]["sketch"]) for rank in pieces(case))
        assert np.abs(total - whole["sketch"]).max() <= 1e-5 * whole["l2"], case[0]["name"]


def test_combined_statistics_of_shards_equal_those_of_the_whole(ranks: list[Rank]) -> None:
    for case in cases(ranks, partial=False):
        whole, held = (
            case[0]["whole"],
            [rank["reading"] for rank in pieces(case) if rank["reading"]["count"]],
        )
        count = sum(r["count"] for r in held)
        mean = sum(r["count"] * r["mean"] for r in held) / count
        around = sum(
            (r["std"] ** 2 * (r["count"] - 1) if r["count"] > 1 else 0)
            + r["count"] * (r["mean"] - mean) ** 2
            for r in held
        )
        assert count == whole["count"], case[0]["name"]
        assert sum(r["zero"] for r in held) == whole["zero"]
        assert min(r["min"] for r in held) == whole["min"]
        assert max(r["max"] for r in held) == whole["max"]
        assert math.hypot(*(r["l2"] for r in held)) == pytest.approx(whole["l2"], rel=1e-6, abs=0)
        assert mean == pytest.approx(
            whole["mean"], rel=0, abs=1e-6 * max(abs(whole["min"]), abs(whole["max"]))
        )
        if count > 1:
            assert math.sqrt(around / (count - 1)) == pytest.approx(
                whole["std"], rel=1e-6, abs=1e-12
            )


def test_means_of_partial_sums_and_averages_combine(ranks: list[Rank]) -> None:
    for case in cases(ranks, partial=True):
        whole, held = case[0]["whole"], pieces(case)
        total = sum(
            share(rank) * rank["reading"]["mean"] * rank["reading"]["count"] for rank in held
        )
        assert total / whole["count"] == pytest.approx(whole["mean"], rel=1e-5, abs=1e-6), case[0][
            "name"
        ]


def test_other_partials_are_marked_as_not_composable(ranks: list[Rank]) -> None:
    marked = {
        case[0]["name"]: case[0]["placements"]
        for case in cases(ranks, partial=True, composable=False)
    }
    assert "MaskPartial(" in marked.pop("vocabulary parallel embedding")["dp"]
    assert marked
    assert all("Partial(max)" in placements.values() for placements in marked.values())


def test_fsdp2_over_tensor_parallel_is_read_as_strided_shards(ranks: list[Rank]) -> None:
    texts = {
        text for case in cases(ranks, partial=False) for text in case[0]["placements"].values()
    }
    assert "StridedShard(0, split_factor=2)" in texts
    counts = [
        rank["reading"]["count"]
        for case in cases(ranks, partial=False)
        for rank in case
        if "fsdp" in rank["name"]
    ]
    assert 0 in counts, "the cases are meant to include empty shards"


def test_no_layout_contradicts_what_the_ranks_hold(ranks: list[Rank]) -> None:
    assert {case["note"] for rank in ranks for case in rank["cases"]} == {None}


def test_an_in_place_all_reduce_on_a_digested_value_shows_the_new_value(ranks: list[Rank]) -> None:
    for rank in ranks:
        seen = rank["all_reduce"]
        assert seen["version_unchanged"], "torch changed: the reason to hash every time may be gone"
        assert not seen["reused"]
        assert seen["after"] != seen["before"]
        assert seen["after"] == pytest.approx(seen["expected"], rel=1e-5)


def test_a_value_in_flight_is_pending_and_is_not_waited_for(ranks: list[Rank]) -> None:
    for rank in ranks:
        assert rank["pending"] == {
            "is_pending": True,
            "can_digest": False,
            "inside_dtensor": True,
            "completed_before_wait": False,
        }


def test_a_rank_outside_a_values_mesh_holds_nothing_of_it(ranks: list[Rank]) -> None:
    assert ranks[0]["outside"] == {"note": None, "ranges": [[[0, 2]], [[0, 2]]], "count": 4}
    assert ranks[3]["outside"] == {
        "note": "this rank is not in the mesh",
        "ranges": None,
        "count": 0,
    }


def test_process_groups_are_listed_with_their_members_in_order(ranks: list[Rank]) -> None:
    for index, rank in enumerate(ranks):
        members = [group[1] for group in rank["groups"]]
        assert [0, 1, 2, 3] in members
        assert ([0, 2] in members) == (index in (0, 2))
        assert all("gloo" in group[2] for group in rank["groups"])
    assert "evens" in [group[3] for group in ranks[0]["groups"] if group[1] == [0, 2]]
