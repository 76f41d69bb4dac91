"""The ranks other tests run on."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import RankFailure, RankPool


def gathers(value: int) -> list[int]:
    out: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value + dist.get_rank())
    return out  # type: ignore[return-value]


def reads(name: str) -> tuple[str | None, str | None]:
    return os.environ.get(name), os.environ.get("RANK")


def fails_on(rank: int) -> torch.Tensor:
    print("about to fail")
    if dist.get_rank() == rank:
        raise ValueError("as asked")
    return torch.ones(2)


def leaves(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def test_every_rank_returns_its_result_in_a_group_of_the_asked_size(ranks: RankPool):
    assert ranks.run(gathers, 10, world_size=3) == [[10, 11, 12]] * 3
    assert ranks.run(gathers, 0, world_size=2) == [[0, 1]] * 2


def test_the_environment_lasts_for_one_call(ranks: RankPool):
    assert ranks.run(reads, "SOME_NAME", world_size=2, env={"SOME_NAME": "x"}) == [
        ("x", "0"),
        ("x", "1"),
    ]
    assert ranks.run(reads, "SOME_NAME", world_size=2) == [(None, "0"), (None, "1")]


def test_a_failing_rank_shows_its_traceback_and_what_it_printed(ranks: RankPool):
    with pytest.raises(RankFailure, match=r"(?s)rank 1:.*ValueError: as asked.*about to fail"):
        ranks.run(fails_on, 1, world_size=2)


def test_a_rank_that_dies_is_named_and_replaced(ranks: RankPool):
    with pytest.raises(RankFailure, match="rank 1: died with exit code 7"):
        ranks.run(leaves, 1, world_size=2)
    assert ranks.run(gathers, 1, world_size=2) == [[1, 2]] * 2
