"""`rankscope tensor --global` on real ranks, against the same model trained by one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rankscope
from rankscope.errors import LayoutError, TensorWarning
from rankscope.tracing import open_trace
from rankscope.tree.views import Trace
from tests.cli.test_commands import rankscope as command
from tests.distributed import global_tensors_job as job
from tests.distributed.pool import RankPool
from tests.torches import GLOO_SUMS_FOR_AVERAGES

KINDS = {"tp": 2, "ddp": 2, "fsdp": 2, "fsdp x tp": 4, "ddp drifting": 2, "by hand": 4,
         "by hand, declared": 4, "ddp, rank 0 traced": 2}  # fmt: skip
LAYOUT = """
axes = "dp=2,tp=2"
[[layout]]
path = "up"
slot = "*:*"
placements = { tp = "Shard(0)" }
[[layout]]
path = "down"
slot = "*:weight"
placements = { tp = "Shard(1)" }
[[layout]]
path = "up"
slot = "output"
placements = { tp = "Shard(1)" }
"""
Traced = Callable[[str], Trace]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The whole batch on one process."""
    model, x = job.net(), job.batch()
    with rankscope.trace(out=tmp_path_factory.mktemp("alone") / "trace", tensors="**") as handle:
        job.train(model, x)
    return handle.open()


@pytest.fixture(scope="module")
def traced(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    found: dict[str, Trace] = {}
    folder = tmp_path_factory.mktemp("jobs")

    def of(kind: str) -> Trace:
        if kind not in found:
            out = folder / kind.replace(" ", "-")
            layout = folder / "declared.toml"
            layout.write_text(LAYOUT)
            declared = str(layout) if kind.endswith("declared") else ""
            ranks.run(job.run, kind, str(out), declared, world_size=KINDS[kind])
            found[kind] = open_trace(out)
        return found[kind]

    return of


def saved(trace: Trace, out: Path, *words: str) -> tuple[dict[str, torch.Tensor], str]:
    code, text, errors = command("tensor", trace.path, *words, "--out", out, "--force")
    assert code == 0, errors
    assert text.startswith(f"{out}: ")
    return load_file(out), errors


PARAMETERS = ["--phase", "setup", "**:param:*", "--global"]


@pytest.mark.parametrize("kind", ["tp", "ddp", "fsdp", "fsdp x tp"])
def test_global_parameters_are_those_of_one_process_bit_for_bit(
    alone: Trace, traced: Traced, tmp_path: Path, kind: str
) -> None:
    truth = dict(job.net().named_parameters())
    found, _ = saved(traced(kind), tmp_path / "ours", *PARAMETERS)
    assert len(found) == len(truth)
    for name, parameter in truth.items():
        path, _, last = name.rpartition(".")
        assert found[f"{path}:param:{last}"].equal(parameter), name
    theirs, _ = saved(alone, tmp_path / "theirs", *PARAMETERS)
    assert theirs.keys() == found.keys()
    assert all(tensor.equal(theirs[key]) for key, tensor in found.items())


@pytest.mark.parametrize("kind", ["tp", "ddp", "fsdp", "fsdp x tp"])
def test_global_inputs_outputs_and_updates_are_those_of_one_process_to_round_off(
    alone: Trace, traced: Traced, tmp_path: Path, kind: str
) -> None:
    names = [":input.0", "norm:output", "up:output", "table:output", ":output"]
    if not (GLOO_SUMS_FOR_AVERAGES and kind.startswith("fsdp")):
        names += ["up:grad:weight", "norm:param:weight", "down:param:weight", "down:grad:bias"]
    ours, said = saved(traced(kind), tmp_path / "ours", *names, "--global")
    theirs, _ = saved(alone, tmp_path / "theirs", *names)
    assert {*ours} == {*theirs} == {*names}
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape, name
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    assert ours[":input.0"].equal(job.batch())
    axis = {"tp": "", "ddp": "data", "fsdp": "dp", "fsdp x tp": "dp"}[kind]
    joined = f"batches joined along dim 0 in rank order, as along {axis} root inputs differ"
    assert (joined in said) is (kind != "tp"), said
    assert ("table:output: inferred: not batched" in said) is (kind != "tp"), said


def test_replicas_that_drifted_are_named_and_the_rest_is_still_there(traced: Traced) -> None:
    value = traced("ddp drifting").value("up", "param:weight", phase="params")
    with pytest.warns(TensorWarning) as warned:
        whole = value.full()
    first, second = (str(warning.message) for warning in warned)
    assert "up:param:weight: replicas of [0:10 x 0:6] differ: ranks 0 | 1; used 0" in first
    assert "inferred: replicas along data, equal at setup" in second
    assert whole.equal(value.local(0)) and not whole.equal(value.local(1))
    code, _, errors = command(
        "tensor", traced("ddp drifting").path, "up:param:weight", "--global", "--print"
    )
    assert code == 0 and "up:param:weight: replicas of [0:10 x 0:6] differ" in errors
    code, _, errors = command(
        "tensor", traced("ddp drifting").path, "up:grad:weight", "--global", "--print"
    )
    assert code == 0 and "differ" not in errors.replace("root inputs differ", "")


def test_shards_cut_by_hand_are_refused_until_a_layout_declares_them(
    traced: Traced, tmp_path: Path
) -> None:
    trace = traced("by hand")
    for name in ("up:param:weight", "up:output"):
        code, text, errors = command("tensor", trace.path, name, "--global", "--print")
        assert (code, text) == (2, "")
        assert "nothing says how the values of ranks 0, 1, 2, 3 belong together" in errors
        assert "--layout FILE" in errors and len(errors.splitlines()) == 1
    with pytest.raises(LayoutError):
        trace.value("up", "output").full()
    layout = tmp_path / "layout.toml"
    layout.write_text(LAYOUT)
    names = ["up:param:weight", "up:param:bias", "down:param:weight", "--phase", "setup"]
    found, said = saved(trace, tmp_path / "found", *names, "--global", "--layout", str(layout))
    truth = job.net()
    assert found["up:param:weight"].equal(truth.up.weight)
    assert found["up:param:bias"].equal(truth.up.bias)
    assert found["down:param:weight"].equal(truth.down.weight)
    assert (
        f"up:param:weight: placed as {layout}, given afterwards, declares it: tp=Shard(0)" in said
    )
    assert "inferred: replicas along dp, equal at setup" in said
    found, said = saved(
        trace, tmp_path / "found", "up:output", ":output", "--global", "--layout", str(layout)
    )
    torch.testing.assert_close(found["up:output"], truth.up(job.batch()).detach())
    whole = torch.nn.functional.linear(truth.up(job.batch()).relu(), truth.down.weight)
    torch.testing.assert_close(found[":output"], whole.detach())
    assert "up:output: inferred: batches joined" in said
    assert ":output: inferred: whole, as every rank of each place along dp holds the same" in said


def test_a_layout_given_at_trace_time_stands_in_the_tree_and_needs_not_be_given_again(
    traced: Traced, tmp_path: Path
) -> None:
    trace = traced("by hand, declared")
    file = trace.run["layout"]["file"]
    assert trace.run["layout"] == {"file": file, "text": LAYOUT}
    assert trace.run["settings"]["layout"] == file
    truth = job.net()
    for path, slot, placement in [
        ("up", "param:weight", "Shard(0)"), ("up", "param:bias", "Shard(0)"),
        ("down", "param:weight", "Shard(1)"), ("up", "output", "Shard(1)"),
    ]:  # fmt: skip
        phase = "setup" if slot.startswith("param") else None
        value = trace.value(path, slot, phase=phase)
        assert value.layout.source.value == "declared"
        assert {str(view.placements["tp"]) for view in value.views} == {placement}
        with pytest.warns(TensorWarning) as warned:
            whole = value.full()
        said = f"placed as {file}, given at trace time, declares it: tp={placement}"
        assert any(said in str(warning.message) for warning in warned)
        if slot == "output":
            torch.testing.assert_close(whole, truth.up(job.batch()).detach())
        else:
            assert whole.equal(truth.get_parameter(f"{path}.{slot.partition(':')[2]}"))
    found, said = saved(trace, tmp_path / "found", "up:output", ":output", "--global")
    torch.testing.assert_close(found["up:output"], truth.up(job.batch()).detach())
    assert f"up:output: placed as {file}, given at trace time, declares it" in said
    assert ":output: inferred: whole, as every rank of each place along dp holds the same" in said


def test_a_layout_given_afterwards_takes_the_place_of_the_one_given_at_trace_time(
    traced: Traced, tmp_path: Path
) -> None:
    trace = traced("by hand, declared")
    file, other = trace.run["layout"]["file"], tmp_path / "other.toml"
    other.write_text(LAYOUT.replace('slot = "output"\nplacements = { tp = "Shard(1)" }', 'slot = '
                                    '"output"\nplacements = { tp = "Shard(0)" }'))  # fmt: skip
    _, said = saved(trace, tmp_path / "found", "up:output", "--global", "--layout", str(other))
    instead = f"given afterwards in place of {file}, which was given at trace time"
    assert f"up:output: placed as {other}, {instead}, declares it: tp=Shard(0)" in said
    same = tmp_path / "same.toml"
    same.write_text(LAYOUT)
    _, said = saved(trace, tmp_path / "found", "up:output", "--global", "--layout", str(same))
    assert f"{file}, given at trace time, declares it" in said
    silent = tmp_path / "silent.toml"
    silent.write_text('axes = "dp=2,tp=2"')
    words = ["up:output", "--global", "--print", "--layout"]
    code, text, errors = command("tensor", trace.path, *words, silent)
    assert (code, text) == (2, "") and "nothing says how the values" in errors
    (tmp_path / "three.toml").write_text('axes = "dp=3"')
    code, text, errors = command("tensor", trace.path, *words, tmp_path / "three.toml")
    assert (code, text) == (2, "")
    assert "axes dp=3 are those of 3 ranks, the run had 4" in errors


def test_the_only_rank_that_was_traced_is_not_passed_off_as_the_whole_job(
    traced: Traced, tmp_path: Path
) -> None:
    found, said = saved(traced("ddp, rank 0 traced"), tmp_path / "found", ":output", "--global")
    assert len(found[":output"]) == job.BATCH // 2
    assert "taken as whole, but only rank 0 of 2 are in the trace" in said
