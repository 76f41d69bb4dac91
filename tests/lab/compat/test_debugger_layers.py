"""Layers between the first and the last of their list, whose tensors are let go while the model
runs: what is written is what pruning everything afterwards gives.
"""

from __future__ import annotations

import gc
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.compat.debugger import kept
from rankscope.compat.debugger.kept import LayerWatch
from tests.compat.debugger_files import ours, tree, values, walk

NUMBERED = re.compile(r"(.*)\.(\d+)")


class Layer(nn.Module):
    """A layer: modules in it, and whatever else a body does."""

    def __init__(self, width: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.inner = inner or nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.fc(x))


class Stack(nn.Module):
    """Layers, called in an order that is asked for."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Identity()

    def forward(self, x: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
        for number in range(len(self.layers)) if order is None else order:
            if number < 0:
                raise RuntimeError("stopped on the way")
            x = self.layers[number](x)
        return self.head(x)


def pruned(node: dict[str, Any]) -> dict[str, Any]:
    """Leave the first and the last of each list of layers, written anew from its description."""
    children, lists = node.get("children", []), dict[str, list[int]]()
    for at, child in enumerate(children):
        found = NUMBERED.fullmatch(child["module_path"])
        inside = [inner["module_path"] for inner in child.get("children", [])]
        if found and any(f".{found[2]}." in path for path in inside):
            lists.setdefault(found[1], []).append(at)
    dropped = {at for layers in lists.values() for at in layers[1:-1]}
    kept = [pruned(child) for at, child in enumerate(children) if at not in dropped]
    return {**node, "children": kept} if children else node


def both(
    model: nn.Module, folder: Path, run: Callable[[nn.Module], object], mark: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is written with pruning, and what should be."""
    found = []
    for prunes in (True, False):
        target = folder / f"{prunes}"
        with ours(model, target, do_prune_layers=prunes):
            run(model)
        found.append(tree(target, mark=mark))
    return found[0], pruned(found[1])


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """References that were let go: watched, and asked for with every tensor that is kept."""
    seen, unneeded = list[int](), LayerWatch.unneeded

    def watched(layers: LayerWatch) -> list[int]:
        found = unneeded(layers)
        seen.extend(found)
        return found

    monkeypatch.setattr(LayerWatch, "unneeded", watched)
    monkeypatch.setattr(kept, "_LOOK_EVERY", 1)
    return seen


def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.mark.parametrize(
    "order",
    [
        None, [0, 1, 2], [0], [0, 1], [5, 4, 3, 2, 1, 0], [2, 2, 2, 2], [0, 1, 1, 0, 3], [],
        [0, 1, 2, 3, 2, 1],
    ],
)  # fmt: skip
def test_layers_in_any_order(order: list[int] | None, tmp_path: Path, released: list[int]) -> None:
    torch.manual_seed(0)
    stack = Stack([Layer(4) for _ in range(6)])
    got, wanted = both(stack, tmp_path, lambda model: model(x(), order))
    assert got == wanted
    assert bool(released) == (len(range(6) if order is None else order) > 2)


def test_the_layer_at_which_a_forward_raises_is_the_last(
    tmp_path: Path, released: list[int]
) -> None:
    torch.manual_seed(0)
    stack = Stack([Layer(4) for _ in range(6)])

    def run(model: nn.Module) -> None:
        with pytest.raises(RuntimeError, match="on the way"):
            model(x(), [0, 1, 2, 3, -1])

    got, wanted = both(stack, tmp_path, run)
    assert got == wanted and "layers.3" in str(got) and released


def test_what_raises_inside_a_layer_is_there(tmp_path: Path, released: list[int]) -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    stack = Stack([Layer(4), Layer(4), Layer(4), Layer(4, Raises()), Layer(4)])

    def run(model: nn.Module) -> None:
        with pytest.raises(ZeroDivisionError):
            model(x())

    got, wanted = both(stack, tmp_path, run)
    assert got == wanted and released
    last = [node for node in walk(got) if node["module_path"].endswith("layers.3.fc")]
    assert last[0]["outputs"]["value"]


def test_values_of_dropped_layers_that_others_have_too_stay(
    tmp_path: Path, released: list[int]
) -> None:
    class Same(nn.Module):
        """Hands on what it got: every layer holds the bytes that the first and the head hold."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Identity(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.two(x)
            return self.one(x)

    got, wanted = both(Stack([Same() for _ in range(5)]), tmp_path, lambda model: model(x()))
    assert got == wanted and got["children"][-1]["outputs"]["value"]
    assert released


def test_lists_in_layers(tmp_path: Path, released: list[int]) -> None:
    torch.manual_seed(0)
    stack = Stack([Layer(4, Stack([Layer(4) for _ in range(4)])) for _ in range(4)])
    got, wanted = both(stack, tmp_path, lambda model: model(x()))
    assert got == wanted and released
    assert len(list(walk(got))) == 2 + 2 * (1 + 1 + 1 + 2 * 3 + 1)


def test_lists_of_leaves_are_no_layers(tmp_path: Path, released: list[int]) -> None:
    got, wanted = both(Stack([nn.Linear(4, 4) for _ in range(5)]), tmp_path, lambda m: m(x()))
    assert got == wanted and len(got["children"]) == 6 and not released


def test_several_forwards_in_a_block(tmp_path: Path, released: list[int]) -> None:
    torch.manual_seed(0)
    stack = Stack([Layer(4) for _ in range(5)])

    def run(model: nn.Module) -> None:
        for factor in (1, 2, 1):
            model(factor * x())

    for mark in ("", "_1", "_2"):
        got, wanted = both(stack, tmp_path, run, mark)
        assert got == wanted and released


def test_training_with_gradients(tmp_path: Path, released: list[int]) -> None:
    torch.manual_seed(0)
    stack = Stack([Layer(4) for _ in range(5)])
    found = []
    for prunes in (True, False):
        with ours(stack, tmp_path / f"{prunes}", do_prune_layers=prunes, no_grad=False):
            stack(x()).sum().backward()
        found.append(tree(tmp_path / f"{prunes}"))
    assert found[0] == pruned(found[1]) and released


def test_with_a_second_thread_nothing_is_let_go_any_more(
    tmp_path: Path, released: list[int]
) -> None:
    torch.manual_seed(0)
    stack = Stack([Layer(4) for _ in range(6)])
    other = Stack([Layer(4) for _ in range(6)])

    def run(model: nn.Module) -> None:
        threads = [threading.Thread(target=other, args=(x(),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        released.clear()
        model(x())

    got, wanted = both(stack, tmp_path, run)
    assert got == wanted and not released


def test_a_block_that_joins_has_all_of_its_layers(tmp_path: Path, released: list[int]) -> None:
    torch.manual_seed(0)
    stack = Stack([Layer(4) for _ in range(6)])
    with ours(stack, tmp_path / "outer"):
        stack(x())
        released.clear()
        with ours(stack, tmp_path / "inner", do_prune_layers=False, all_outputs=True):
            stack(2 * x())
    assert not released
    (inner,) = [tree(tmp_path / "inner")]
    with ours(stack, tmp_path / "alone", do_prune_layers=False, all_outputs=True):
        stack(2 * x())
    assert inner == tree(tmp_path / "alone")
    with ours(stack, tmp_path / "pruned"):
        stack(x())
        stack(2 * x())
    for mark in ("", "_1"):
        assert tree(tmp_path / "outer", mark=mark) == tree(tmp_path / "pruned", mark=mark)


def test_hooks_that_replace_what_a_module_hands_out_are_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stack = Stack([Layer(4) for _ in range(3)])
    stack.layers[0].register_forward_hook(lambda _module, _args, output: output * 2)
    stack.layers[2].register_forward_hook(lambda _module, _args, output: None)
    got, wanted = both(stack, tmp_path, lambda model: model(x()))
    first, last = got["children"][:2]
    assert got == wanted and first["returned"]["value"] and "returned" not in last


def grown(choose: random.Random, depth: int) -> nn.Module:
    """Return a random module over rows of four."""
    kind = choose.choice(("leaf", "layer", "stack", "sequential") if depth else ("leaf",))
    if kind == "layer":
        return Layer(4, grown(choose, depth - 1))
    parts = [grown(choose, depth - 1) for _ in range(choose.randint(1, 5))] if depth else []
    if kind == "stack":
        return Stack(choose.choices(parts, k=choose.randint(1, 7)))  # some of them twice
    if kind == "sequential":
        return nn.Sequential(*parts)
    leaves = (nn.Linear(4, 4), nn.ReLU(inplace=choose.random() < 0.5), nn.Identity(), nn.Tanh())
    return choose.choice(leaves)


@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed: int, tmp_path: Path) -> None:
    compare_random_models(range(seed * 3, seed * 3 + 3), tmp_path)


@pytest.mark.soak
def test_many_random_models(tmp_path: Path) -> None:
    compare_random_models(range(1000, 1600), tmp_path)


def compare_random_models(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        choose = random.Random(seed)
        torch.manual_seed(seed)
        model = Stack([grown(choose, 3) for _ in range(choose.randint(1, 5))])
        got, wanted = both(model, tmp_path / f"{seed}", lambda m: m(x()))
        assert got == wanted, f"seed {seed}"


class Lent(nn.Module):
    """Calls a module that it does not hold."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.lent = [module]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lent[0](self.own(x))


class Alone(Lent):
    """Hands on what a lent module makes of its input, and calls none of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lent[0](x) * 0.5


class Around(nn.Module):
    """A model with a module that it does not hold, called before or in its layers."""

    def __init__(self, lent: nn.Module, layers: list[nn.Module], held: nn.Module) -> None:
        super().__init__()
        self.lent, self.held = [lent], held
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lent[0](x)
        for layer in self.layers:
            x = layer(x)
        return x


def bank_in_layers() -> nn.Module:
    """Layers that are none: all they call are experts of a bank that the model does not hold."""
    bank = Stack([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)])
    return Around(bank, [Alone(bank.layers[number][0]) for number in range(5)], nn.Identity())


def held_in_a_lent_list() -> nn.Module:
    """Layers of a model that is not held, each of which calls a module that is."""
    held = nn.Linear(4, 4)
    return Around(Stack([Lent(held) for _ in range(5)]), [], held)


def lent_in_layers() -> nn.Module:
    lent = nn.Linear(4, 4)
    return Around(nn.Identity(), [Lent(lent) for _ in range(5)], nn.Identity())


def inside_out() -> nn.Module:
    """Layers that call a whole model with layers of its own, which calls a held module again."""
    held = nn.Linear(4, 4)
    lent = Stack([Layer(4, Lent(held)) for _ in range(4)])
    return Around(lent, [Lent(lent) for _ in range(4)], held)


@pytest.mark.parametrize("made", [bank_in_layers, held_in_a_lent_list, lent_in_layers, inside_out])
def test_modules_that_the_model_does_not_hold(
    made: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    got, wanted = both(made(), tmp_path, lambda model: model(x()))
    assert got == wanted
    assert all("note" not in value for value in values(got))


def test_a_block_that_ends_while_another_thread_runs_a_model(tmp_path: Path) -> None:
    first, second = Stack([Layer(4) for _ in range(6)]), Stack([Layer(4) for _ in range(2)])
    stops = threading.Event()

    def run() -> None:
        while not stops.is_set():
            first(torch.randn(3, 4))

    with ours(first, tmp_path / "outer", do_prune_layers=False):
        thread = threading.Thread(target=run)
        thread.start()
        try:
            for number in range(3):
                with ours(second, tmp_path / f"{number}"):
                    second(x())
        finally:
            stops.set()
            thread.join()
    for number in range(3):
        assert tree(tmp_path / f"{number}")["module_path"] == "Stack"


def test_nothing_of_a_block_stays_open(tmp_path: Path) -> None:
    model = Stack([Layer(4) for _ in range(3)])
    before, mapped = set(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text()
    gc.disable()
    try:
        for use_repr in (True, False):
            with ours(model, tmp_path, use_repr=use_repr):
                model(x())
        assert set(os.listdir("/proc/self/fd")) <= before
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()
    assert str(tmp_path) not in mapped


def test_standard_streams_that_are_closed_stay_closed(tmp_path: Path) -> None:
    code = (
        "import os, sys, torch\n"
        "from tests.lab.compat.test_debugger_layers import Layer, Stack, ours, x\n"
        "from pathlib import Path\n"
        "os.close(0), os.close(1)\n"
        "model = Stack([Layer(4) for _ in range(3)])\n"
        "with ours(model, Path(sys.argv[1])):\n"
        "    model(x())\n"
        "    for number in (0, 1):\n"
        "        try:\n"
        "            os.write(number, b'Z' * 600)\n"
        "        except OSError:\n"
        "            continue\n"
        "        raise SystemExit('somebody took the number')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert tree(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_before_the_block(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="cannot be written"), ours(nn.Identity(), tmp_path):
        raise AssertionError("entered")
