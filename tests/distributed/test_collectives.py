"""Real gloo ranks issue every collective; what the tree says of them is what really happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import rankscope.tree
from rankscope.capture.digest import Digester
from rankscope.diagnosis.check import check
from rankscope.record.finding import Verdict
from rankscope.record.ranks import parse_ranks
from rankscope.tree.reader import open_trace
from tests.distributed import collectives_job as job
from tests.distributed.pool import RankPool
from tests.torches import COALESCED_GATHERS_ARE_ASYNC

SCHEMA = json.loads((Path(rankscope.tree.__file__).parent / "trace.schema.json").read_text())
Found = dict[str, Any]


def read(folder: Path) -> Found:
    """Return a trace that is whole and valid, without a failure of rankscope's own."""
    found: Found = json.loads((folder / "tree.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert found["completeness"]["complete"]
    assert not [rank["errors"] for rank in found["completeness"]["ranks"] if rank["errors"]]
    return found


def walk(nodes: list[Found], parent: Found | None = None) -> Iterator[tuple[Found, Found | None]]:
    for node in nodes:
        yield node, parent
        yield from walk(node["children"], node)


def collectives(found: Found, rank: int, step: int = 0) -> list[Found]:
    """Return what one rank issued in a step, in order: the facts, and "path", "status", "parent",
    "inputs", "outputs" (values of the rank) beside them.
    """
    made = []
    for node, parent in walk(found["steps"][step]["nodes"]):
        if node["phase"] != "collective" or rank not in parse_ranks(node["ranks"]):
            continue
        every = node.get("collectives") or [{"ranks": node["ranks"], **node["collective"]}]
        (facts,) = (each for each in every if rank in parse_ranks(each["ranks"]))
        values = {
            slot["slot"]: value
            for slot in node["slots"]
            for value in slot["values"]
            if rank in parse_ranks(value["ranks"])
        }
        made.append(
            {
                **facts,
                "path": node["path"],
                "ordinal": node["ordinal"],
                "micro_batch": node["micro_batch"],
                "status": node["status"],
                "parent": parent and (parent["phase"], parent["path"], parent["ordinal"]),
                "inputs": [values[f"input.{i}"] for i in range(99) if f"input.{i}" in values],
                "outputs": [values[f"output.{i}"] for i in range(99) if f"output.{i}" in values],
            }
        )
    return made


def digest_of(value: torch.Tensor) -> tuple[list[int], str, float]:
    reading = Digester(batch_dim=0).read(value, None, samples=False)
    return list(value.shape), f"{reading.hash:016x}", reading.l2


def digests(values: list[Found]) -> list[tuple[list[int], str, float]]:
    return [(v["shape"], v["digest"]["hash"], v["digest"]["l2"]) for v in values]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.lab), 4])
def every_collective(
    request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Found]:
    world = request.param
    folder = tmp_path_factory.mktemp("collectives")
    standing = ranks.run(job.run_all, str(folder), world_size=world)
    assert standing == [[]] * world, "something of ours stayed on torch's classes"
    return world, read(folder / "trace")


def test_every_collective_is_a_call_of_the_module_that_issued_it(
    every_collective: tuple[int, Found],
) -> None:
    world, found = every_collective
    for rank in range(world):
        seen = collectives(found, rank)
        assert [c["path"] for c in seen] == [f"calls.{i}" for i in range(len(job.ORDER))]
        assert [c["sequence"] for c in seen] == list(range(len(job.ORDER)))
        for call, (name, is_async) in zip(seen, job.ORDER):
            case = job.CASES[name]
            assert call["parent"] == ("forward", call["path"], 0)
            assert (call["ordinal"], call["micro_batch"], call["status"]) == (0, 0, "returned")
            if name == "gathers_coalesced":
                is_async |= COALESCED_GATHERS_ARE_ASYNC
            facts = {"async": is_async, "issuer": "forward", **case.facts, "op": case.op}
            assert facts.items() <= call.items(), name
            assert call["members"] == list(range(world))
            assert not {"src", "dst", "peer", "tag", "reduce"} & (call.keys() - facts.keys()), name


def test_its_values_are_digests_of_what_was_handed_in_and_of_what_came_out(
    every_collective: tuple[int, Found],
) -> None:
    world, found = every_collective
    for rank in range(world):
        for call, (name, _) in zip(collectives(found, rank), job.ORDER):
            case = job.CASES[name]
            taken = [digest_of(value) for value in case.takes(rank, world)]
            assert digests(call["inputs"]) == taken, (name, rank)
            given = case.gives(rank, world)
            if given is not None:
                assert digests(call["outputs"]) == [digest_of(value) for value in given], name
            assert not [value for value in call["outputs"] if "flags" in value], name


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.lab)])
def test_sends_and_receives_are_numbered_by_what_they_match(
    ranks: RankPool, tmp_path: Path, world: int
) -> None:
    ranks.run(job.run_pairs, str(tmp_path), world_size=world)
    found = read(tmp_path / "trace")
    sent: dict[Any, Any] = {}
    received: dict[Any, Any] = {}
    for rank in range(world):
        for call in collectives(found, rank):
            if call["op"] == "send":
                key = (rank, call["peer"], call["tag"], call["sequence"])
                assert key not in sent
                sent[key] = digests(call["inputs"])
            elif call["peer"] >= 0:
                key = (call["peer"], rank, call["tag"], call["sequence"])
                assert key not in received
                received[key] = digests(call["outputs"])
            else:
                assert digests(call["outputs"]) == [digest_of(job.own(0, 3))]
    from_anybody = (0, 1, 0, 2)
    assert sent.pop(from_anybody) == [digest_of(job.own(0, 3))]
    assert sent == received
    assert sent[0, 1, 3, 0] == [digest_of(job.own(0))]
    assert sent[0, 1, 0, 0] == [digest_of(job.own(0, 1))]
    assert sent[0, 1, 0, 1] == [digest_of(job.own(0, 2))]
    forms = [(c["op"], c["async"]) for c in collectives(found, 0)]
    assert forms == [
        ("send", False), ("recv", False), ("send", True), ("recv", True), ("send", True),
        ("recv", True), ("send", False),
    ]  # fmt: skip


def test_a_group_is_named_with_its_members_and_objects_keep_their_bytes_to_themselves(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(job.run_groups, str(tmp_path), world_size=4)
    found = read(tmp_path / "trace")
    for rank in range(4):
        reduced, *objects = collectives(found, rank)
        half = [0, 1] if rank < 2 else [2, 3]
        assert (reduced["members"], reduced["sequence"]) == (half, 0)
        assert reduced["group"] in {
            g["name"] for g in found["run"]["groups"] if g["members"] == half
        }
        both = sum((job.own(member) for member in half), torch.zeros(job.SIZE))
        assert digests(reduced["outputs"]) == [digest_of(both)]
        # torch 2.15 gathers objects into one tensor, before into a list
        gathering = {"all_gather", "all_gather_into_tensor"}
        assert {c["op"] for c in objects} - gathering == {"broadcast"}
        assert gathering & {c["op"] for c in objects}
        assert all(c["object"] and c["members"] == [0, 1, 2, 3] for c in objects)
        values = [v for c in objects for v in (*c["inputs"], *c["outputs"])]
        assert values and all(v["flags"] == ["structure_only"] for v in values)


def test_what_nobody_waits_for_in_its_step_is_never_read(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(job.run_careless, str(tmp_path), world_size=2)
    assert results == [job.total(2).tolist()] * 2
    found = read(tmp_path / "trace")
    (call,) = collectives(found, 0)
    assert (call["status"], call["async"]) == ("not_waited", True)
    assert digests(call["inputs"]) == [digest_of(job.own(0))]
    assert [v["flags"] for v in call["outputs"]] == [["pending", "structure_only"]]
    ((root, _), *_rest) = walk(found["steps"][0]["nodes"])
    (output,) = (slot for slot in root["slots"] if slot["slot"] == "output")
    assert [v["flags"] for v in output["values"]] == [["pending", "structure_only"]]


def test_what_two_receives_write_into_one_place_is_known_of_neither(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(job.run_into_one, str(tmp_path), world_size=2)
    calls = collectives(read(tmp_path / "trace"), 1)
    assert [call["status"] for call in calls] == ["returned"] * 4
    first, second, *_ = [value.get("flags") for call in calls for value in call["outputs"]]
    assert first == second == ["pending", "structure_only"]
    halves = [value for call in calls[2:] for value in call["outputs"]]
    assert digests(halves) == [digest_of(job.own(0, tag)) for tag in (2, 3)]
    assert check(open_trace(tmp_path / "trace")).verdict is Verdict.CLEAN


def test_what_a_collective_raises_reaches_the_program_unchanged_and_is_written_down(
    ranks: RankPool, tmp_path: Path
) -> None:
    for plain, traced in ranks.run(
        job.run_mistaken, str(tmp_path), world_size=2, group_timeout_s=10
    ):
        assert plain == traced
    found = read(tmp_path / "trace")
    (call,) = collectives(found, 0)
    assert (call["op"], call["status"]) == ("all_gather", "raised")
