"""The debugger on real ranks: what each rank's file holds, how it is labelled, and that the global
files of a tensor-parallel run are those of one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rankscope
from tests.cli.test_commands import rankscope as command
from tests.compat.debugger_files import (
    call,
    references,
    tree,
    values,
    walk,
)
from tests.distributed import global_tensors_job as whole_job
from tests.distributed.pool import RankPool
from tests.lab.compat import debugger_ranks_job as job


def mean(value: dict[str, Any]) -> float:
    return float(value["mean"].removeprefix("tensor(").removesuffix(")"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_each_rank_has_a_file_with_what_it_saw_under_the_names_of_the_plain_model(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    seen = ranks.run(job.debugged, kind, str(tmp_path), {"ranks": "all"}, world_size=2)
    for rank in (0, 1):
        root = tree(tmp_path, mark=f"_rank{rank}")
        paths = [node["module_path"] for node in walk(root)]
        assert paths == ["Net", "Net.up", "Net.act", "Net.down", "Net.out"]
        node = call(root, ".up")
        found = mean(node["inputs"]["args"][0]), mean(node["outputs"])
        assert found == pytest.approx(seen[rank], rel=1e-3)
    assert len([*tmp_path.iterdir()]) == 4
    assert (seen[0] == seen[1]) is False


def test_a_shard_says_what_it_is_of_and_a_partial_that_it_is_not_summed(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(job.debugged, "tp", str(tmp_path), {"ranks": "all"}, world_size=2)
    for rank in (0, 1):
        root = tree(tmp_path, "SUMMARY", mark=f"_rank{rank}")
        up, down = call(root, ".up")["outputs"], call(root, ".down")["outputs"]
        assert (up["shape"], up["global_shape"]) == ("torch.Size([4, 8])", "torch.Size([4, 16])")
        assert (up["mesh"], up["placements"]) == ("tp=2", {"tp": "Shard(1)"})
        assert (down["global_shape"], down["placements"]) == (
            "torch.Size([4, 6])", {"tp": "Partial(sum)"},
        )  # fmt: skip
        acted = call(root, ".act")["outputs"]  # of a plain shard, whose bytes are the DTensor's
        assert (acted["global_shape"], acted["placements"]) == (
            "torch.Size([4, 16])", {"tp": "Shard(1)"},
        )  # fmt: skip
        assert acted["layout"].startswith("inferred: ")
        assert call(root, ".out")["outputs"]["layout"] == "unknown"


@pytest.mark.parametrize("kind", ["ddp", "tp", "fsdp"])
def test_by_default_rank_0_alone_writes_and_all_ranks_go_without_gradients(
    ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    ranks.run(job.debugged, kind, str(tmp_path), {}, world_size=2)
    assert {path.name for path in tmp_path.iterdir()} == {
        "Net_debug_tree_FULL_TENSORS.json", "Net_debug_tree_SUMMARY.json",
    }  # fmt: skip


@pytest.fixture(scope="module")
def parallel(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tp") / "trace"
    ranks.run(whole_job.run, "tp", str(out), world_size=2)
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "trace"
    with rankscope.trace(out=out, tensors="**"):
        whole_job.train(whole_job.net(), whole_job.batch())
    return out


@pytest.mark.parametrize("words", [[], ["--all-outputs"], ["--safetensors"]])
def test_global_files_of_a_tensor_parallel_run_are_those_of_one_process(
    parallel: Path, alone: Path, tmp_path: Path, words: list[str]
) -> None:
    """Everything that is no number is the same; numbers are, to round-off."""
    for trace, name, more in ((parallel, "tp", ["--global"]), (alone, "one", [])):
        line = ["export", trace, "--format", "hf", "--out", tmp_path / name, *words, *more]
        code, _, errors = command(*line)
        assert code == 0, errors
    one, two = ({p.name for p in (tmp_path / name).iterdir()} for name in ("one", "tp"))
    assert one == two
    for kind in ("FULL_TENSORS", "SUMMARY"):
        ours, theirs = tree(tmp_path / "tp", kind), tree(tmp_path / "one", kind)
        assert _structure(ours) == _structure(theirs)
        for a, b in zip(values(ours), values(theirs), strict=True):
            for name in {"mean", "std", "min", "max"} & b.keys():
                assert mean({"mean": a[name]}) == pytest.approx(
                    mean({"mean": b[name]}), rel=2e-3, abs=1e-6
                )
    for name in references(tree(tmp_path / "one")):
        torch.testing.assert_close(
            load_file(tmp_path / "tp" / name)["data"], load_file(tmp_path / "one" / name)["data"]
        )


def _structure(data: Any) -> Any:
    """The tree, with the digits of numbers taken out of its texts."""
    if isinstance(data, dict):
        return {
            key: [line.count(",") for line in each]
            if key == "value" and isinstance(each, list)
            else "a number"
            if key in ("mean", "std", "min", "max")
            else _structure(each)
            for key, each in data.items()
        }
    return [_structure(each) for each in data] if isinstance(data, list) else data
