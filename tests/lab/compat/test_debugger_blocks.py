"""Blocks of `model_addition_debugger_context` beside and inside each other, and what may be done
with a model in one: copied, saved, patched.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.compat import debugger_modules as modules
from tests.compat.debugger_files import ours, references, tree, walk

FORWARDS = "*_FULL_TENSORS.json"


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4)


def zeroed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def paths(folder: Path, mark: str = "") -> list[str]:
    return [node["module_path"] for node in walk(tree(folder, mark=mark))]


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])


# ---------------------------------------------------------------------- copies


@COPIES
def test_a_copy_made_in_a_block_computes_with_its_own_weights(
    copied: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model = modules.Raising()
    with ours(model, tmp_path):
        made = zeroed(copied(model))
        assert not made(x()).any() and not made.forward(x()).any()
        expected = model(x())
    assert expected.any() and not made(x()).any()
    assert torch.equal(zeroed(copied(made))(x()), torch.zeros(2, 4))
    assert paths(tmp_path) == [f"Raising{path}" for path in ("", ".first", ".second", ".second.fc")]
    assert len([*tmp_path.glob(FORWARDS)]) == 1  # of the copy none


@COPIES
def test_a_copy_of_a_submodule_is_one_of_its_own_too(
    copied: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model = modules.Told()
    with ours(model, tmp_path):
        made = zeroed(copied(model.inner))
        model(x())
    assert not made(x()).any() and model.inner(x()).any()


def test_a_deep_copy_carries_nothing_after_the_block(tmp_path: Path) -> None:
    model = modules.Raising()
    with ours(model, tmp_path):
        made = copy.deepcopy(model)
        forward = copy.deepcopy(model.first.forward)
    assert all("forward" not in vars(module) for module in made.modules())
    assert forward.__self__ is not model.first and "forward" not in vars(forward.__self__)


@COPIES
def test_a_copy_keeps_the_forward_that_the_program_put_on_the_model(
    copied: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model = modules.Told()
    model.inner.forward = doubled
    with ours(model, tmp_path):
        made = copied(model)
    assert vars(made.inner)["forward"] is doubled is vars(model.inner)["forward"]


def doubled(x: torch.Tensor, **beside: object) -> torch.Tensor:
    return x * 2


# ---------------------------------------------------------------------- blocks


def test_two_models_with_a_block_each_write_both(tmp_path: Path) -> None:
    one, two = modules.Leaf(), modules.Raising()
    with ours(one, tmp_path / "one"), ours(two, tmp_path / "two"):
        one(x())
        two.forward(x())
        one(x())
        two(x())
    for mark in ("", "_1"):
        assert paths(tmp_path / "one", mark) == ["Leaf", "Leaf.fc"]
        assert paths(tmp_path / "two", mark)[-1] == "Raising.second.fc"
    assert all(len([*(tmp_path / name).iterdir()]) == 4 for name in ("one", "two"))


def test_two_models_of_one_class_are_told_apart(tmp_path: Path) -> None:
    one, two, third = modules.Leaf(), modules.Leaf(), modules.Leaf()
    with (
        ours(one, tmp_path / "one", use_repr=False),
        ours(two, tmp_path / "two", use_repr=False),
        ours(third, tmp_path / "third"),
    ):
        two(x()[:1])
        one(x())
    for name, shape in (("one", "[2, 4]"), ("two", "[1, 4]")):
        root = tree(tmp_path / name)
        assert root["inputs"]["args"][0]["shape"] == f"torch.Size({shape})"
        assert {path.name for path in (tmp_path / name).glob("*.safetensors")} == references(root)
    assert [*(tmp_path / "third").iterdir()] == []


def test_models_without_parameters_have_a_block_each(tmp_path: Path) -> None:
    one, two = modules.NoParameters(), nn.Sequential(nn.ReLU(), nn.Tanh())
    with ours(one, tmp_path / "one"), ours(two, tmp_path / "two"):
        two(x())
        one(x())
    assert paths(tmp_path / "one") == ["NoParameters", "NoParameters.relu"]
    assert paths(tmp_path / "two") == ["Sequential", "Sequential.0", "Sequential.1"]


@pytest.mark.parametrize("is_inner_first", [True, False])
def test_a_block_on_a_submodule_and_one_on_the_model_both_write(
    is_inner_first: bool, tmp_path: Path
) -> None:
    model = modules.Told()
    blocks = [ours(model, tmp_path / "model"), ours(model.inner, tmp_path / "inner")]
    with ExitStack() as stack:
        for block in reversed(blocks) if is_inner_first else blocks:
            stack.enter_context(block)
        model(x())
        model.inner(x())
        model(x())
    whole = ["Told", "Told.inner", "Told.inner.fc"]
    assert paths(tmp_path / "model") == paths(tmp_path / "model", "_1") == whole
    assert len([*(tmp_path / "model").glob(FORWARDS)]) == 2
    for mark in ("", "_1", "_2"):
        assert paths(tmp_path / "inner", mark) == ["Leaf", "Leaf.fc"]


@pytest.mark.parametrize("calls", [("alone", "in", "in"), ("in", "alone", "in")])
def test_a_model_called_alone_and_in_another_without_a_block_writes_every_forward(
    calls: tuple[str, ...], tmp_path: Path
) -> None:
    """The other holds it as a layer between two, so pruning by the other's lists would drop it."""
    layers = nn.ModuleList(modules.Leaf() for _ in range(3))
    outer, model = nn.Sequential(*layers), layers[1]
    with ours(model, tmp_path):
        for place in calls:
            (model if place == "alone" else outer)(x())
    for mark in ("", "_1", "_2"):
        assert paths(tmp_path, mark) == ["Leaf", "Leaf.fc"]
    assert len([*tmp_path.glob(FORWARDS)]) == 3


def test_a_block_on_what_holds_the_model_opened_later_has_the_model_in_it(tmp_path: Path) -> None:
    model = modules.Leaf()
    outer = nn.Sequential(model)
    with ours(model, tmp_path / "model"):
        outer(x())
        with ours(outer, tmp_path / "outer"):
            outer(x())
        outer(x())
    assert paths(tmp_path / "outer") == ["Sequential", "Sequential.0", "Sequential.0.fc"]
    assert len([*(tmp_path / "outer").glob(FORWARDS)]) == 1
    for mark in ("", "_1", "_2"):
        assert paths(tmp_path / "model", mark) == ["Leaf", "Leaf.fc"]


def test_an_inner_block_writes_when_it_ends_and_the_outer_one_has_every_forward(
    tmp_path: Path,
) -> None:
    model = modules.Leaf()
    with ours(model, tmp_path / "outer", use_repr=False):
        model(x())
        with ours(model, tmp_path / "inner", use_repr=False):
            model(x() + 1)
            model.forward(x() + 2)
        written = sorted(path.name for path in (tmp_path / "inner").iterdir())
        model(x() + 3)
    assert written == sorted(path.name for path in (tmp_path / "inner").iterdir())
    assert len([*(tmp_path / "inner").glob(FORWARDS)]) == 2
    assert len([*(tmp_path / "outer").glob(FORWARDS)]) == 4
    means = [
        [tree(tmp_path / name, mark=mark)["inputs"]["args"][0]["mean"] for mark in marks]
        for name, marks in (("outer", ("_1", "_2")), ("inner", ("", "_1")))
    ]
    assert means[0] == means[1] == ["tensor(1.0000e+00)", "tensor(2.0000e+00)"]


def test_a_block_opened_inside_a_forward_writes_its_own_part(tmp_path: Path) -> None:
    class Opening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = modules.Leaf()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner(x)
            with ours(self.inner, tmp_path / "inner"):
                return self.inner(x)

    model = Opening()
    with ours(model, tmp_path / "outer"):
        model(x())
    assert len(paths(tmp_path / "outer")) == 5
    assert paths(tmp_path / "inner") == ["Leaf", "Leaf.fc"]
    assert len([*(tmp_path / "inner").glob(FORWARDS)]) == 1


def test_blocks_may_end_in_any_order(tmp_path: Path) -> None:
    model = modules.Leaf()
    first, second = ExitStack(), ExitStack()
    first.enter_context(ours(model, tmp_path / "first"))
    model(x())
    second.enter_context(ours(model, tmp_path / "second"))
    model(x())
    first.close()
    model(x())
    assert "forward" in vars(model)
    second.close()
    assert all("forward" not in vars(module) for module in model.modules())
    assert [len([*(tmp_path / name).glob(FORWARDS)]) for name in ("first", "second")] == [2, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
    assert not [*tmp_path.rglob(".rankscope-debugger-*")]


@pytest.mark.parametrize("outer_is_text", [True, False])
def test_a_block_of_text_and_one_of_files_are_open_at_once(
    tmp_path: Path, outer_is_text: bool
) -> None:
    """Text needs no bytes and files need all: what is kept is decided for both."""
    models = [nn.Sequential(nn.Linear(4, 4)) for _ in range(3)]
    with ours(models[0], tmp_path / "out", use_repr=outer_is_text):
        models[0](x())
        with ours(models[1], tmp_path / "in", use_repr=not outer_is_text):
            models[1](x())
            models[0](x() + 1)
        models[0](x() + 2)
    for name, model, is_text, forwards in (
        ("out", models[0], outer_is_text, 3),
        ("in", models[1], not outer_is_text, 1),
    ):
        for number in range(forwards):
            with ours(model, tmp_path / "alone", use_repr=is_text):
                model(x() + number)
            mark = f"_{number}" if number else ""
            found, wanted = tree(tmp_path / name, mark=mark), tree(tmp_path / "alone")
            if not is_text:
                for ours_file, file in zip(*(sorted(references(t)) for t in (found, wanted))):
                    one, two = tmp_path / name / ours_file, tmp_path / "alone" / file
                    assert one.read_bytes() == two.read_bytes()
                continue
            assert found == wanted


def test_text_takes_no_disk_and_no_memory_for_the_tensors(tmp_path: Path) -> None:
    """What is printed of a large tensor are its edges. (Beside the tensors of a long prompt, which
    took gigabytes of disk for a megabyte of text.)
    """
    model = nn.Sequential(*(nn.Sequential(nn.ReLU()) for _ in range(4)))
    for is_text in (True, False):
        folder = tmp_path / f"{is_text}"
        with ours(model, folder, do_prune_layers=False, use_repr=is_text), torch.no_grad():
            model(torch.randn(1000, 1000))
            is_mapped = str(folder) in Path("/proc/self/maps").read_text()
            files = [path for path in folder.rglob("*") if path.is_file()]
        assert (is_mapped, files) == (not is_text, [])
    assert tree(tmp_path / "True")["inputs"]["args"][0]["value"][0].startswith("tensor([[")


def test_what_the_program_puts_on_a_module_inside_the_block_stays(tmp_path: Path) -> None:
    model, other = modules.Told(), modules.Told()
    with ours(model, tmp_path / "one"):
        model.inner.forward = doubled
        assert torch.equal(model(x()), x() * 2)
        with ours(model, tmp_path / "two"):
            assert torch.equal(model(x()), x() * 2)
        assert vars(model.inner)["forward"] is doubled
    assert vars(model.inner)["forward"] is doubled and "forward" not in vars(model)
    with ours(other, tmp_path / "three"):
        around = other.inner.forward
        other.inner.forward = lambda x: around(x) + 1
    assert torch.equal(other(x()), other.inner.fc(x()) + 1)


def test_threads_with_models_and_blocks_of_their_own_keep_every_call(tmp_path: Path) -> None:
    models = [modules.Raising() for _ in range(3)]
    together = threading.Barrier(3)

    def run(number: int) -> None:
        together.wait(120)
        for time in range(4):
            with ours(models[number], tmp_path / f"{number}.{time}"):
                for _ in range(3):
                    models[number](x()[: number % 2 + 1])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for folder in (tmp_path / f"{n}.{time}" for n in range(3) for time in range(4)):
        size = int(folder.name[0]) % 2 + 1
        for mark in ("", "_1", "_2"):
            assert len(paths(folder, mark)) == 4
            (given,) = tree(folder, mark=mark)["inputs"]["args"]
            assert given["shape"] == f"torch.Size([{size}, 4])"
        assert len([*folder.iterdir()]) == 6
    assert all("forward" not in vars(m) for model in models for m in model.modules())


def test_gradients_are_off_where_any_block_wants_them_off(tmp_path: Path) -> None:
    model, given = modules.Told(), x()
    with ours(model, tmp_path / "1"), ours(model.inner, tmp_path / "2", no_grad=False):
        assert not model.inner(given).requires_grad
    with ours(model, tmp_path / "3", no_grad=False), ours(model.inner, tmp_path / "4"):
        assert not model(given).requires_grad
    with ours(model, tmp_path / "5", no_grad=False), ours(model, tmp_path / "6", no_grad=False):
        assert model(given).requires_grad


def test_a_compiled_model_and_another_have_a_block_each(tmp_path: Path) -> None:
    compiled = torch.compile(modules.Raising(), backend="eager")
    other = modules.Leaf()
    with ours(other, tmp_path / "other"), ours(compiled, tmp_path / "compiled"):
        compiled(x())
        other(x())
    assert paths(tmp_path / "compiled") == ["Raising"]
    assert paths(tmp_path / "other") == ["Leaf", "Leaf.fc"]


def test_a_forked_child_that_leaves_the_block_takes_nothing_with_it(tmp_path: Path) -> None:
    model, stack = modules.Leaf(), ExitStack()
    stack.enter_context(ours(model, tmp_path / "parent"))
    model(x())
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        try:
            with ours(model, tmp_path / "child"):
                model(x())
            stack.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    model(x())
    stack.close()
    assert paths(tmp_path / "parent") == paths(tmp_path / "parent", "_1") == ["Leaf", "Leaf.fc"]
    assert paths(tmp_path / "child") == ["Leaf", "Leaf.fc"]
