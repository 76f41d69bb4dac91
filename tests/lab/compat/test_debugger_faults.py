"""What the debugger of transformers 5.23.0 gets wrong, measured: each test passes here and has to
fail there, so a fault that it no longer has shows as well.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.compat import debugger_modules as modules
from tests.compat.debugger_files import (
    INSTALLED,
    RELEASE,
    call,
    needs_transformers,
    ours,
    references,
    restored,
    theirs,
    tree,
    values,
    walk,
)
from tests.lab.compat.debugger_models import made


@dataclass(frozen=True)
class Debugger:
    """One of the two."""

    attach: Callable[..., AbstractContextManager[nn.Module]]
    training: dict[str, Any]
    """What lets a block train."""

    def __call__(
        self, model: nn.Module, folder: Path, **flags: Any
    ) -> AbstractContextManager[nn.Module]:
        return self.attach(model, folder, **flags)


@pytest.fixture(params=["ours", pytest.param("theirs", marks=pytest.mark.parity)])
def debugger(request: pytest.FixtureRequest) -> Iterator[Debugger]:
    is_ours = request.param == "ours"
    if not is_ours:
        if INSTALLED != RELEASE:
            pytest.skip(f"needs transformers=={RELEASE}, found {INSTALLED}")
        request.applymarker(pytest.mark.xfail(strict=True, reason="a fault of 5.23"))
    stdout, here = sys.stdout, os.getcwd()
    yield Debugger(ours, {"no_grad": False}) if is_ours else Debugger(theirs, {})
    sys.stdout = stdout
    os.chdir(here)
    restored()


def x(*shape: int) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(*(shape or (2, 4)))


def test_a_forward_that_raises_leaves_what_ran_until_then_and_the_error(
    debugger: Debugger, tmp_path: Path
) -> None:
    model = modules.Raising()
    with pytest.raises(ValueError, match="stumbled"), debugger(model, tmp_path):
        model(x(), fails=True)
    root = tree(tmp_path)
    assert root["error"] == call(root, ".second")["error"] == "ValueError: stumbled"
    assert call(root, ".second")["inputs"]["kwargs"] == {"fails": "True"}
    assert "error" not in call(root, ".first") and "outputs" in call(root, ".second.fc")


def test_the_model_carries_nothing_afterwards(debugger: Debugger, tmp_path: Path) -> None:
    model = modules.Raising()
    held = [dict(vars(module)) for module in model.modules()]
    with debugger(model, tmp_path):
        model(x())
    assert [dict(vars(module)) for module in model.modules()] == held


def test_the_model_carries_nothing_after_an_exception(debugger: Debugger, tmp_path: Path) -> None:
    model = modules.Raising()
    with pytest.raises(ValueError, match="stumbled"), debugger(model, tmp_path):
        model(x(), fails=True)
    assert all("forward" not in vars(module) for module in model.modules())


def test_every_forward_of_a_block_is_kept(debugger: Debugger, tmp_path: Path) -> None:
    model = modules.Leaf()
    with debugger(model, tmp_path, use_repr=False):
        for size in (2, 3, 5):
            model(x(size, 4))
    shapes = []
    for mark in ("", "_1", "_2"):
        (value,) = values(tree(tmp_path, mark=mark)["inputs"])
        shapes.append((value["shape"], tuple(load_file(tmp_path / value["value"])["data"].shape)))
    assert shapes == [(f"torch.Size([{size}, 4])", (size, 4)) for size in (2, 3, 5)]


@needs_transformers
def test_every_step_of_a_generation_is_kept(debugger: Debugger, tmp_path: Path) -> None:
    model, _ = made("llama")
    with debugger(model, tmp_path):
        model.generate(  # type: ignore[operator]  # nn.Module to mypy
            torch.arange(5, 11)[None], max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    trees = [tree(tmp_path, mark=mark) for mark in ("", "_1", "_2", "_3")]
    asked = [root["inputs"]["kwargs"]["input_ids"]["shape"] for root in trees]
    assert asked == ["torch.Size([1, 6])"] + ["torch.Size([1, 1])"] * 3


def test_two_calls_of_one_module_have_files_of_their_own(
    debugger: Debugger, tmp_path: Path
) -> None:
    model, given = modules.Twice(), x()
    with debugger(model, tmp_path, use_repr=False):
        model(given)
    root = tree(tmp_path)
    first, second = (
        load_file(tmp_path / call(root, ".fc", i)["outputs"]["value"])["data"] for i in (0, 1)
    )
    torch.testing.assert_close(first, model.fc(given).detach())
    torch.testing.assert_close(second, model.fc(first).detach())


def test_there_is_no_file_that_the_tree_does_not_name(debugger: Debugger, tmp_path: Path) -> None:
    model = nn.Sequential(modules.TwoLists())
    with debugger(model, tmp_path, use_repr=False):
        model(x())
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    assert files == references(tree(tmp_path)) and files


def test_an_argument_named_value_is_in_the_summary(debugger: Debugger, tmp_path: Path) -> None:
    model = modules.Told()
    with debugger(model, tmp_path):
        model(x(), value=x(3), key=x(4))
    told = call(tree(tmp_path, "SUMMARY"), ".inner")["inputs"]["kwargs"]
    assert list(told) == ["value", "key"] and told["value"]["shape"] == "torch.Size([3])"
    assert "value" not in told["value"]


def test_each_list_of_layers_keeps_its_first_and_last(debugger: Debugger, tmp_path: Path) -> None:
    model = modules.TwoLists()
    with debugger(model, tmp_path):
        model(x())
    paths = [child["module_path"] for child in tree(tmp_path)["children"]]
    assert paths == [f"TwoLists.{name}" for name in ("enc.0", "enc.3", "dec.0", "dec.3")]


@pytest.mark.parametrize("as_text", [True, False])
def test_an_empty_tensor_does_not_end_the_forward(
    debugger: Debugger, tmp_path: Path, as_text: bool
) -> None:
    model = modules.Leaf()
    with debugger(model, tmp_path, use_repr=as_text):
        assert model(x(0, 4)).shape == (0, 4)
    (value,) = values(tree(tmp_path)["inputs"])
    assert value["shape"] == "torch.Size([0, 4])" and "mean" not in value
    assert value["value"] == ["tensor([], size=(0, 4))"] or not as_text


@pytest.mark.parametrize("as_text", [True, False])
def test_a_sparse_tensor_does_not_end_the_forward(
    debugger: Debugger, tmp_path: Path, as_text: bool
) -> None:
    model = modules.Told()
    with debugger(model, tmp_path, use_repr=as_text):
        model(x(), beside=x().to_sparse())
    beside = call(tree(tmp_path), ".inner")["inputs"]["kwargs"]["beside"]
    assert beside["shape"] == "torch.Size([2, 4])" and beside["dtype"] == "torch.float32"
    assert beside["value"] is None and "sparse" in beside["note"]


def test_a_tensor_on_meta_does_not_end_the_forward(debugger: Debugger, tmp_path: Path) -> None:
    model = modules.Told()
    with debugger(model, tmp_path, use_repr=False):
        model(x(), beside=torch.empty(3, device="meta"))
    beside = call(tree(tmp_path), ".inner")["inputs"]["kwargs"]["beside"]
    assert beside["shape"] == "torch.Size([3])" and beside["value"] is None
    assert beside["mean"] == "tensor(..., device='meta', size=())"


def test_a_key_with_a_slash_is_a_file_like_any_other(debugger: Debugger, tmp_path: Path) -> None:
    model = modules.Told()
    with debugger(model, tmp_path, use_repr=False):
        model(x(), beside={"a/b": x(3), "../c": x(2)})
    beside = call(tree(tmp_path), ".inner")["inputs"]["kwargs"]["beside"]
    assert list(beside) == ["a/b", "../c"]
    for held, size in zip(beside.values(), (3, 2)):
        assert load_file(tmp_path / held["value"])["data"].shape == (size,)
    assert all(path.parent == tmp_path for path in tmp_path.rglob("*.safetensors"))


def test_what_is_not_finite_is_counted(debugger: Debugger, tmp_path: Path) -> None:
    model = modules.Leaf()
    given = torch.tensor([[1.0, float("nan"), float("inf"), float("nan")]])
    with debugger(model, tmp_path):
        model(given)
    (value,) = values(tree(tmp_path)["inputs"])
    assert (value["nan"], value["posinf"], value.get("neginf", 0)) == (2, 1, 0)


def test_statistics_are_numbers_alone_where_gradients_are_on(
    debugger: Debugger, tmp_path: Path
) -> None:
    model, given = modules.Leaf(), x().requires_grad_()
    with debugger(model, tmp_path):
        model(given)
    (value,) = values(tree(tmp_path)["inputs"])
    with torch.no_grad():
        assert value["mean"] == f"tensor({given.mean().item():.4e})"


def test_tensors_in_a_dataclass_are_recorded(debugger: Debugger, tmp_path: Path) -> None:
    model = modules.Told()
    with debugger(model, tmp_path):
        model(x(), batch=modules.Batch(x(3), "first"))
    batch = call(tree(tmp_path), ".inner")["inputs"]["kwargs"]["batch"]
    assert batch["x"]["shape"] == "torch.Size([3])" and batch["name"] == "'first'"


def test_any_key_of_a_dict_can_be_written(debugger: Debugger, tmp_path: Path) -> None:
    model = modules.Take()
    with debugger(model, tmp_path):
        model({(1, 2): x(3), None: 4, True: 5})
    (held,) = tree(tmp_path)["inputs"]["args"]
    assert sorted(held) == ["(1, 2)", "null", "true"]


def test_what_hooks_of_a_module_return_is_written_beside_what_it_returned(
    debugger: Debugger, tmp_path: Path
) -> None:
    model = modules.Told()
    model.inner.fc.register_forward_hook(lambda module, args, output: output * 0)
    with debugger(model, tmp_path):
        model(x())
    node = call(tree(tmp_path), ".inner.fc")
    assert node["outputs"]["mean"] != node["returned"]["mean"] == "tensor(0.)"


def test_outputs_of_modules_that_hold_others_can_be_asked_for(
    debugger: Debugger, tmp_path: Path
) -> None:
    model = modules.Told()
    with debugger(model, tmp_path, all_outputs=True):
        model(x())
    assert all(node["outputs"]["shape"] == "torch.Size([2, 4])" for node in walk(tree(tmp_path)))


def test_a_block_may_train(debugger: Debugger, tmp_path: Path) -> None:
    plain, model = modules.Raising(), modules.Raising()
    model.load_state_dict(plain.state_dict())
    plain(x()).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with debugger(model, tmp_path, **debugger.training):
        for _ in range(2):
            optimizer.zero_grad()
            model(x()).sum().backward()
            for ours_, theirs_ in zip(model.parameters(), plain.parameters()):
                assert ours_.grad is not None and theirs_.grad is not None
    for one, two in zip(model.parameters(), plain.parameters()):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]  # checked above
    assert tree(tmp_path, mark="_1")["module_path"] == "Raising"


def test_a_compiled_model_runs_as_compiled_and_is_one_call(
    debugger: Debugger, tmp_path: Path
) -> None:
    model = torch.compile(modules.Raising(), backend="eager")
    before = model(x())
    with debugger(model, tmp_path):
        assert torch.equal(model(x()), before)
    root = tree(tmp_path)
    assert (root["module_path"], root["outputs"]["shape"]) == ("Raising", "torch.Size([2, 4])")


def test_a_model_may_be_compiled_whole_inside_the_block(debugger: Debugger, tmp_path: Path) -> None:
    model = modules.Raising()
    with debugger(model, tmp_path):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(x()), model(x()))


def test_forwards_on_threads_keep_their_calls_and_the_program_its_stdout(
    debugger: Debugger, tmp_path: Path
) -> None:
    model = modules.Raising()
    with debugger(model, tmp_path):
        for _ in range(10):
            model(x())
        threads = [
            threading.Thread(target=lambda: [model(x()) for _ in range(20)]) for _ in range(2)
        ]
        stdout = sys.stdout
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sys.stdout is stdout and not stdout.closed
    assert len([*tmp_path.glob("*_FULL_TENSORS.json")]) == 50
    for mark in ("", *(f"_{n}" for n in range(1, 50))):
        root = tree(tmp_path, mark=mark)
        paths = [node["module_path"] for node in walk(root)]
        assert paths == [f"Raising{path}" for path in ("", ".first", ".second", ".second.fc")]
        assert all(value["value"] for value in values(root))


def test_print_options_of_the_program_stay(debugger: Debugger, tmp_path: Path) -> None:
    model = modules.Leaf()
    before = torch._tensor_str.get_printoptions()
    with debugger(model, tmp_path):
        model(x())
        assert torch._tensor_str.get_printoptions() == before
    assert torch._tensor_str.get_printoptions() == before


def test_no_warning_of_torch_reaches_the_program(debugger: Debugger, tmp_path: Path) -> None:
    model = modules.Told()
    with warnings.catch_warnings(), debugger(model, tmp_path):
        warnings.simplefilter("error")
        model(x(), beside=torch.ones(1))
    assert call(tree(tmp_path), ".inner")["inputs"]["kwargs"]["beside"]["std"] == "tensor(nan)"


def test_ranks_that_have_formed_no_group_yet_do_not_write_over_each_other(
    debugger: Debugger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun starts them: each process knows its rank from its environment alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", f"{rank}")
        monkeypatch.setenv("LOCAL_RANK", f"{rank}")
        with debugger(modules.Leaf(), tmp_path) as model:
            model(x(rank + 2, 4))
    (value,) = values(tree(tmp_path)["inputs"])
    assert value["shape"] == "torch.Size([2, 4])"
