"""`model_addition_debugger_context` for any module: what it refuses, and what it leaves alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import rankscope
from rankscope.agent.values.tensorstore import TensorStore
from rankscope.capture.describe import Described
from rankscope.compat import model_addition_debugger_context
from tests.compat import debugger_modules as modules
from tests.compat.debugger_files import call, ours, tree, walk


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4)


def test_files_go_to_the_current_folder_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = modules.Told()
    with model_addition_debugger_context(model) as given:
        assert given is model
        model(x())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"Told_debug_tree_{kind}.json" for kind in ("FULL_TENSORS", "SUMMARY")}


def test_a_path_that_is_a_file_is_refused_before_anything_happens(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = modules.Told()
    refusal = pytest.raises(ValueError, match="Unexpected or existing debug_path")
    with refusal, ours(model, tmp_path / "file"):
        raise AssertionError
    with pytest.raises(ValueError, match="ranks='some'"), ours(model, tmp_path, ranks="some"):
        raise AssertionError
    assert all("forward" not in vars(module) for module in model.modules())


def test_nothing_is_written_where_the_model_is_not_called(tmp_path: Path) -> None:
    model = modules.Told()
    with ours(model, tmp_path):
        model.inner(x())
    assert [*tmp_path.iterdir()] == []


def test_calls_of_forward_itself_are_seen_at_any_depth(tmp_path: Path) -> None:
    class Directly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = modules.Leaf()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.forward(x, scale=torch.ones(3))

    model = Directly()
    with ours(model, tmp_path):
        output = model.forward(x())
    assert torch.allclose(output, model.inner.fc(x()))
    paths = [node["module_path"] for node in walk(tree(tmp_path))]
    assert paths == ["Directly", "Directly.inner", "Directly.inner.fc"]
    told = call(tree(tmp_path), ".inner")["inputs"]["kwargs"]["scale"]
    assert told["shape"] == "torch.Size([3])"


def test_a_forward_that_the_program_put_on_a_module_is_there_again_afterwards(
    tmp_path: Path,
) -> None:
    model = modules.Told()

    def own(x: torch.Tensor, **beside: object) -> torch.Tensor:
        return x * 2

    model.inner.forward = own
    with ours(model, tmp_path):
        assert torch.equal(model(x()), x() * 2)
    assert vars(model.inner)["forward"] is own
    assert "mean" in call(tree(tmp_path), ".inner")["inputs"]["args"][0]


def test_a_model_without_parameters_is_a_model(tmp_path: Path) -> None:
    model = modules.NoParameters()
    with ours(model, tmp_path):
        model(x())
    assert [node["module_path"] for node in walk(tree(tmp_path))] == [
        "NoParameters", "NoParameters.relu",
    ]  # fmt: skip


def test_inside_another_trace_the_block_says_what_to_do_and_harms_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = modules.Raising()
    with (
        rankscope.trace(model, out=tmp_path / "trace", tensors="**") as handle,
        ours(model, tmp_path / "none"),
    ):
        model.forward(x())
    said = capfd.readouterr().err
    assert "the module debugger writes no files for this block" in said
    assert "rankscope export FOLDER --format hf" in said and "nothing was traced" not in said
    assert [node.path for node in handle.open().find(phase="forward")] == [
        "", "first", "second", "second.fc",
    ]  # fmt: skip
    assert [*(tmp_path / "none").iterdir()] == []
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("is_inside", [False, True])
def test_of_so_many_forwards_files_are_written_and_the_rest_is_said(
    is_inside: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`generate` runs a forward a token: two files for each, without a bound, fill a disk. What no
    file will show is not recorded either.
    """
    kept: list[int] = []
    keep = TensorStore.keep

    def watched(self: TensorStore, tensor: torch.Tensor, described: Described) -> int:
        kept.append(tensor.numel())
        return keep(self, tensor, described)

    monkeypatch.setattr(TensorStore, "keep", watched)
    model = nn.Sequential(nn.Linear(4, 4))
    outer = nn.Sequential(nn.Linear(4, 4), model)
    with ours(model, tmp_path / "two", forwards=2):
        for number in range(5):
            (outer if is_inside else model)(torch.ones(number + 1, 4))
    assert max(kept) == 2 * 4
    names = {path.name for path in (tmp_path / "two").iterdir()}
    assert names == {
        f"Sequential_debug_tree{mark}_{kind}.json"
        for mark in ("", "_1") for kind in ("SUMMARY", "FULL_TENSORS")
    }  # fmt: skip
    said = capsys.readouterr().err
    assert "wrote the first 2 of 5 forwards of Sequential: forwards=None writes all" in said
    with ours(model, tmp_path / "all", forwards=None):
        for _ in range(103):
            model(torch.ones(1, 4))
    assert len([*(tmp_path / "all").iterdir()]) == 206
    with pytest.raises(ValueError, match="1 or more, or None"), ours(model, tmp_path, forwards=0):
        pass


def test_what_one_block_leaves_out_another_writes(tmp_path: Path) -> None:
    models = [nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))]
    with ours(models[0], tmp_path / "0", forwards=1), ours(models[1], tmp_path / "1"):
        for _ in range(3):
            for model in models:
                model(torch.ones(1, 4))
    assert [len([*(tmp_path / name).iterdir()]) for name in "01"] == [2, 6]


def test_numbers_and_random_state_are_those_of_a_plain_forward(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), modules.Twice())

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        output = model(x())
        return output.detach(), torch.get_rng_state()

    plain = run()
    with ours(model, tmp_path):
        debugged = run()
    assert all(map(torch.equal, plain, debugged))


def test_where_files_were_written_is_logged_as_information(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """As there: one record for each forward, which nobody sees who has not asked for it."""
    model = modules.Leaf()
    with ours(model, tmp_path):
        model(torch.ones(2, 4))
    assert not caplog.records
    with caplog.at_level(logging.INFO, logger="rankscope"), ours(model, tmp_path / "two"):
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert [record.getMessage().partition(" at ")[2] for record in caplog.records] == [
        f"{tmp_path}/two/Leaf_debug_tree{mark}_FULL_TENSORS.json" for mark in ("", "_1")
    ]
    assert all(Path(record.getMessage().split()[-1]).exists() for record in caplog.records)
    assert capfd.readouterr() == ("", "")


def test_a_model_can_be_exported_inside_a_block(tmp_path: Path) -> None:
    """`torch.export` reads the code of `forward`. Strictly it cannot follow any hook of torch."""
    model = modules.Leaf()
    with ours(model, tmp_path):
        program = torch.export.export(model, (x(),))
        model(x())
    assert torch.equal(program.module()(x()), model(x()))
    assert len([*tmp_path.glob("*_FULL_TENSORS.json")]) == 1
    assert call(tree(tmp_path), "Leaf.fc")["outputs"]["shape"] == "torch.Size([2, 4])"
