"""The debugger on real ranks: what each rank's file holds, how it is labelled, and that the global
files of a tensor-parallel run are those of one process.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.test_commands import rankscope as command
from tests.compat.debugger_files import (
    call,
    needs_transformers,
    references,
    tree,
    values,
    walk,
)
from tests.compat.test_debugger_ranks import alone as alone
from tests.compat.test_debugger_ranks import mean
from tests.compat.test_debugger_ranks import parallel as parallel
from tests.distributed import global_tensors_job as whole_job
from tests.distributed.pool import RankPool
from tests.lab.compat import debugger_ranks_job as job
from tests.lab.compat.debugger_models import made


@needs_transformers
@pytest.mark.parametrize("trains", [False, True])
def test_what_transformers_shards_by_its_own_plan_is_labelled(
    ranks: RankPool, tmp_path: Path, trains: bool
) -> None:
    """Its tensor parallelism hands plain local tensors from module to module: nothing but the
    parameters tells that a model is sharded. What they prove is said, the rest is unknown, and no
    half of a tensor stands there as if it were the whole.
    """
    made("llama")[0].save_pretrained(tmp_path / "saved")
    folder = tmp_path / "files"
    shapes = ranks.run(
        job.split_by_transformers, str(tmp_path / "saved"), str(folder), trains, world_size=2
    )
    for rank in (0, 1):
        root = tree(folder, mark=f"_rank{rank}")
        query, down = call(root, ".q_proj"), call(root, ".down_proj")
        shown = query["outputs"]
        assert shapes[rank]["model.layers.0.self_attn.q_proj"] == [1, 8, 8]
        assert (shown["shape"], shown["global_shape"]) == (
            "torch.Size([1, 8, 8])", "torch.Size([1, 8, 16])",
        )  # fmt: skip
        assert [*shown["placements"].values()] == ["Shard(2)"]
        (given,) = down["inputs"]["args"]
        assert (given["global_shape"], [*given["placements"].values()]) == (
            "torch.Size([1, 8, 24])", ["Shard(2)"],
        )  # fmt: skip
        assert down["outputs"]["layout"] == "unknown"
        acted = call(root, ".act_fn")
        assert [*acted["outputs"]["placements"].values()] == ["Shard(2)"]
        assert "inferred: the same bytes as" in acted["inputs"]["args"][0]["layout"]
        for value in values(root):
            assert "placements" in value or value["layout"] == "unknown"


@needs_transformers
def test_the_debugger_and_the_global_files_agree_on_every_value_of_a_sharded_model(
    ranks: RankPool, tmp_path: Path
) -> None:
    """A rank alone proves which values are shards; beside the other ranks' records, which are whole
    too. Whatever is said of a value, the global file holds the tensor that it says."""
    made("llama")[0].save_pretrained(tmp_path / "saved")
    ranks.run(job.seen_both_ways, str(tmp_path / "saved"), str(tmp_path), world_size=2)
    said = []
    for name, more in (("each", []), ("global", ["--global"])):
        line = ["export", tmp_path / "trace", "--format", "hf", "--out", tmp_path / name]
        code, _, errors = command(*line, "--safetensors", *more)
        assert code == 0, errors
        said.append(errors.count("inferred"))
    whole = [*values(tree(tmp_path / "global"))]
    assert said[0] == 0 and said[1] == len(whole) == 70
    alone, each = (
        [[*values(tree(tmp_path / name, mark=f"_rank{rank}"))] for rank in (0, 1)]
        for name in ("alone", "each")
    )
    counted: Counter[tuple[str, bool]] = Counter()
    for wanted, own, held in zip(whole, zip(*alone), zip(*each), strict=True):
        (found,) = load_file(tmp_path / "global" / wanted["value"]).values()
        parts = [load_file(tmp_path / "each" / value["value"])["data"] for value in held]
        ((placement,),) = {tuple(value["placements"].values()) for value in held}
        dim = int(placement[6:-1]) if placement.startswith("Shard") else None
        assert {value["global_shape"] for value in held} == {wanted["shape"]}
        assert all(value["layout"].startswith(("inferred: ", "marked")) for value in held)
        assert found.equal(parts[0] if dim is None else torch.cat(parts, dim))
        assert dim is not None or parts[0].equal(parts[1])
        for value, beside in zip(own, held):
            facts = ["placements", "global_shape"]
            if beside["layout"] != "marked":
                facts += ["mesh", "layout"]
            is_said = value["layout"] != "unknown"
            assert [value.get(f) for f in facts] == [beside[f] for f in facts] or not is_said
            counted[placement, beside["layout"] == "marked", is_said] += 1
    assert counted == {
        ("Shard(2)", True, True): 2 * 14,
        ("Shard(2)", False, True): 2 * 4,
        ("Replicate()", True, False): 2 * 18,
        ("Replicate()", False, False): 2 * 34,
    }


def test_parameters_on_a_mesh_are_enough_for_values_to_be_unknown(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(job.sharded_without_a_sharded_value, str(tmp_path), world_size=2)
    for rank in (0, 1):
        found = [*values(tree(tmp_path, mark=f"_rank{rank}"))]
        assert found and all(value["layout"] == "unknown" for value in found)


def test_values_of_a_model_sharded_by_fsdp_are_unknown(ranks: RankPool, tmp_path: Path) -> None:
    """Each rank has its own batch, or the same one: the parameters' mesh does not say which."""
    ranks.run(job.debugged, "fsdp", str(tmp_path), {"ranks": "all"}, world_size=2)
    for rank in (0, 1):
        found = [*values(tree(tmp_path, mark=f"_rank{rank}"))]
        assert all(value["layout"] == "unknown" for value in found)


def test_nothing_is_labelled_where_nothing_is_sharded(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(job.debugged, "ddp", str(tmp_path), {}, world_size=2)
    for value in values(tree(tmp_path)):
        assert list(value) == ["shape", "dtype", "value", "mean", "std", "min", "max"]


@pytest.mark.parametrize("kind", ["ddp", "tp", "fsdp"])
def test_ranks_train_inside_the_block(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    flags = {"no_grad": False, "ranks": "all", "use_repr": False}
    ranks.run(job.debugged, kind, str(tmp_path), flags, world_size=2)
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    named = [references(tree(tmp_path, mark=f"_rank{rank}")) for rank in (0, 1)]
    assert files == named[0] | named[1] and not named[0] & named[1]


def test_each_stage_of_a_pipeline_has_its_files(ranks: RankPool, tmp_path: Path) -> None:
    means = ranks.run(job.piped, str(tmp_path), world_size=2)
    for rank in (0, 1):
        for number, mark in enumerate((f"_rank{rank}", f"_rank{rank}_1")):
            root = tree(tmp_path, mark=mark)
            (layer,) = (node for node in walk(root) if "layers" in node["module_path"])
            assert layer["module_path"] == f"Stage.layers.{rank}"
            assert mean(layer["outputs"]) == pytest.approx(means[rank][number], rel=1e-3)


def test_a_rank_that_fails_says_so_in_its_own_file(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(job.one_rank_fails, str(tmp_path), world_size=2)
    assert "error" not in tree(tmp_path, mark="_rank0")
    failed = tree(tmp_path, mark="_rank1")
    assert failed["error"] == "ValueError: stumbled" and len(failed["children"]) == 2


def test_no_other_rank_is_waited_for(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(job.only_the_first_enters, str(tmp_path), world_size=2) == [True, True]


def test_a_repr_that_is_a_collective_is_asked_for_on_all_ranks_or_on_none(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(job.repr_of_a_collective, str(tmp_path / "0"), 0, world_size=2)
    (_, asked) = tree(tmp_path / "0")["inputs"]["args"]
    assert asked.endswith("debugger_ranks_job.Collective")
    ranks.run(job.repr_of_a_collective, str(tmp_path / "all"), "all", world_size=2)
    for rank in (0, 1):
        (_, asked) = tree(tmp_path / "all", mark=f"_rank{rank}")["inputs"]["args"]
        assert asked == "all have arrived"


def test_the_export_of_a_trace_is_what_the_debugger_writes(alone: Path, tmp_path: Path) -> None:
    from rankscope.compat import model_addition_debugger_context

    model, x = whole_job.net(), whole_job.batch()
    for number, words in enumerate(([], ["--safetensors"])):
        flags = {"use_repr": not words}
        with model_addition_debugger_context(model, tmp_path / f"with-{number}", **flags):  # type: ignore[arg-type]  # one flag of several
            model(x)
        out = tmp_path / f"exported-{number}"
        assert command("export", alone, "--format", "hf", "--out", out, *words)[0] == 0
        debugged = {p.name: p.read_bytes() for p in (tmp_path / f"with-{number}").iterdir()}
        assert debugged == {p.name: p.read_bytes() for p in out.iterdir()}


def test_the_export_of_one_rank_is_what_its_debugger_writes(parallel: Path, tmp_path: Path) -> None:
    out = tmp_path / "both"
    assert command("export", parallel, "--format", "hf", "--out", out)[0] == 0
    assert len([*out.iterdir()]) == 4
    one = tmp_path / "one"
    assert command("export", parallel, "--format", "hf", "--out", one, "--rank", "1")[0] == 0
    found = json.loads((one / "Net_debug_tree_FULL_TENSORS.json").read_text())
    assert found == tree(out, mark="_rank1")
    assert call(found, ".up")["outputs"]["placements"] == {"tp": "Shard(1)"}


def test_global_files_are_of_all_ranks_and_say_so(parallel: Path, tmp_path: Path) -> None:
    line = ["export", parallel, "--format", "hf", "--out", tmp_path / "x", "--global"]
    code, _, errors = command(*line, "--rank", "1")
    assert code == 2 and "--global and --rank: take one" in errors
    code, _, errors = command("export", parallel, "--format", "jsonl", "--global", *line[4:6])
    assert code == 2 and "--global: not an option of --format jsonl" in errors
    assert not (tmp_path / "x").exists()


def test_what_the_caller_got_of_a_row_parallel_layer_stands_beside_the_partial(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(job.debugged, "tp", str(tmp_path), {"ranks": "all"}, world_size=2)
    downs = [call(tree(tmp_path, mark=f"_rank{rank}"), ".down") for rank in (0, 1)]
    partials = sum(mean(down["outputs"]) for down in downs)
    for down in downs:
        assert mean(down["returned"]) == pytest.approx(partials, rel=1e-3)
    assert "returned" not in call(tree(tmp_path, mark="_rank0"), ".up")
