"""Tensors put together from what ranks hold, against what torch's own full_tensor gathers there.

Left to the truth alone (the tensor that was distributed), because there full_tensor of torch 2.13
raises, hangs or permutes: dtypes gloo has no collective for, meshes whose ranks do not ascend, dims
cut along two axes with a strided shard in any other form than FSDP2's, and FSDP2 over a
tensor-parallel shard of no width.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from rankscope.layout.plan import plan_assemblies
from rankscope.tree.tensors.rebuild import assemble
from tests.distributed.pool import RankPool
from tests.lab.distributed.reassembly_job import Case, run
from tests.torches import GATHERS_STRIDED_SHARDS

CASES = 90
EPSILONS = 8
"""Roundings that separate two orders of adding up to four numbers, with room."""


@pytest.fixture(scope="module", params=[2, 4])
def by_case(request: pytest.FixtureRequest, ranks: RankPool) -> list[list[Case]]:
    """Every case as its ranks hold it."""
    held = ranks.run(run, CASES, world_size=request.param)
    cases = [torch.load(io.BytesIO(of_rank), weights_only=False) for of_rank in held]
    return [list(of_ranks) for of_ranks in zip(*cases, strict=True)]


def rebuilt(by_case: list[list[Case]]) -> Iterator[tuple[Case, torch.Tensor]]:
    """Yield each global value with what one of its ranks says it is."""
    for of_ranks in by_case:
        for plan in plan_assemblies({rank: case.piece for rank, case in enumerate(of_ranks)}):
            found = assemble(plan, lambda rank: of_ranks[rank].local)  # noqa: B023
            assert found.mismatches == (), of_ranks[0].name
            assert plan.missing == ()
            for rank in plan.ranks:
                yield of_ranks[rank], found.tensor


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
    return flat[0].equal(flat[1])


def test_every_shard_and_replica_gives_what_full_tensor_gives_bit_for_bit(
    by_case: list[list[Case]],
) -> None:
    compared: Counter[str] = Counter()
    for case, tensor in rebuilt(by_case):
        if case.full is not None and case.is_exact and "Partial" not in case.name:
            assert is_same(tensor, case.full), case.name
            compared[case.name.split()[0]] += 1
    assert compared["shards"] > 100
    assert compared["strided"] > (100 if GATHERS_STRIDED_SHARDS else 20)
    assert compared["fsdp"] > 20
    assert compared["tp"] > 20
    assert compared["both"] > 20


def test_what_was_distributed_comes_back_also_where_full_tensor_breaks(
    by_case: list[list[Case]],
) -> None:
    alone: Counter[str] = Counter()
    for case, tensor in rebuilt(by_case):
        if case.truth is not None:
            assert is_same(tensor, case.truth), case.name
            alone[case.name.split()[0]] += case.full is None
    kinds = ["shards", "backward", "both"] + ["strided"] * (len(by_case[0]) > 2)
    assert min(alone[kind] for kind in kinds) > 1, alone


def test_partials_of_integers_reduce_to_what_all_reduce_gives_bit_for_bit(
    by_case: list[list[Case]],
) -> None:
    compared: Counter[str] = Counter()
    for case, tensor in rebuilt(by_case):
        if "Partial" in case.name and case.is_exact:
            assert case.full is not None
            assert tensor.equal(case.full), case.name
            compared[case.name.split("Partial(")[1].split(")")[0]] += 1
    assert all(compared[op] > 10 for op in ("sum", "avg", "product", "min", "max")), compared


def test_partials_of_anything_agree_with_all_reduce_to_round_off(
    by_case: list[list[Case]],
) -> None:
    compared = 0
    for of_ranks in by_case:
        if of_ranks[0].is_exact:
            continue
        largest = max(float(case.local.abs().max()) for case in of_ranks)
        for case, tensor in rebuilt([of_ranks]):
            assert case.full is not None
            assert tensor.dtype is case.full.dtype
            room = EPSILONS * torch.finfo(tensor.dtype).eps * max(largest, largest**4)
            assert float((tensor.double() - case.full.double()).abs().max()) <= room, case.name
            compared += 1
    assert compared > 30


def test_every_mesh_of_a_family_has_a_value_of_its_own(by_case: list[list[Case]]) -> None:
    """Outputs on the tp rows of a (dp, tp) mesh are of different batches."""
    outputs = [case for case in by_case if case[0].name.startswith("tp 16x8 output")]
    for of_ranks in outputs:
        plans = plan_assemblies({rank: case.piece for rank, case in enumerate(of_ranks)})
        assert [plan.ranks for plan in plans] == [(0, 1), (2, 3)][: len(of_ranks) // 2]
        found = [
            assemble(plan, lambda rank: of_ranks[rank].local).tensor  # noqa: B023
            for plan in plans
        ]
        assert len(found) == 1 or not found[0].equal(found[1])
    assert outputs
