"""Objects of a user's own that answer otherwise than torch's, and programs that touch parameters in
ways a hook could spoil: the numbers stay, and the trace says what happened.
"""

from __future__ import annotations

import gc
import struct
import sys
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.agent.hooks import modules
from rankscope.agent.hooks.modules import ModuleInfo, ModuleTable, Root
from rankscope.agent.recorder import Recorder
from rankscope.agent.steps.optimizers import HiddenSteps
from rankscope.agent.values import gradients
from rankscope.spool.recordformat import VALUE_HEAD
from tests.models import Block, Net, paths, trace
from tests.unharmed import traced_unharmed

X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture
def swaps_tensors() -> Iterator[None]:
    """Have `to` and `load_state_dict` swap tensors: they refuse one with a weak reference."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


class GivesParameters(nn.Module):
    """Hands a parameter, a buffer and a leaf that needs a gradient from module to module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.full((8,), 0.5))
        self.passes, self.also, self.block = nn.Identity(), nn.Identity(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, shift = self.also(self.passes(self.scale)), self.passes(self.shift)
        return self.block(x.to(scale.dtype) * scale + shift)


@pytest.mark.usefixtures("swaps_tensors")
@pytest.mark.parametrize("makes", [Net, GivesParameters], ids=["net", "parameters as activations"])
def test_parameters_can_be_swapped_between_and_inside_traced_steps(
    tmp_path: Path, makes: type[nn.Module]
) -> None:
    def program() -> object:
        model, losses = makes(), []
        kept = {k: v.clone() for k, v in model.state_dict().items()}
        for step in range(4):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            dtype = next(model.parameters()).dtype
            for _ in range(2):
                model(X.to(dtype).requires_grad_()).square().sum().backward()
            optimizer.step()
            losses.append(model(X.to(dtype)).sum().item())
            del optimizer  # it holds nothing of the parameters: but its state would keep their type
            model.to(torch.float64 if step % 2 == 0 else torch.float32)
            with torch.no_grad():
                losses.append(model(X.to(next(model.parameters()).dtype)).sum().item())
            if step == 2:
                model.load_state_dict({k: v.to(torch.float32) for k, v in kept.items()})
        return model, losses

    found = traced_unharmed(program, tmp_path / "trace")
    assert [s.step for s in found.steps if s.mode.word == "train"] == [0, 1, 2, 3, 4]
    assert not found.completeness["ranks"][0]["errors"]
    assert found.value("", "grad_input.0", phase="backward", step=3).per_rank[0] is not None


@pytest.mark.usefixtures("swaps_tensors")
def test_a_gradient_looked_at_by_a_compiled_programs_step_can_be_swapped() -> None:
    model, steps = nn.Linear(8, 2), HiddenSteps()
    weight = model.weight

    def is_new() -> bool:
        assert weight.grad is not None
        return steps._is_new(id(weight), weight.grad)

    for sees_new in (True, False):
        model(X.to(weight.dtype)).sum().backward()
        assert is_new()
        gc.collect()
        assert not is_new()
        model.zero_grad(set_to_none=sees_new)
        gc.collect()
    model(X).sum().backward()
    assert is_new()
    model.to(torch.float64)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.float64


@pytest.mark.usefixtures("swaps_tensors")
def test_a_parameter_handed_to_a_module_keeps_nothing_of_ours_so_that_later_hooks_on_it_fire(
    tmp_path: Path,
) -> None:
    """torch 2.13: a parameter that ever had a hook runs no later one once it was swapped."""
    fired: list[torch.Tensor] = []

    def body() -> None:
        model = GivesParameters()
        model(X).sum().backward()
        model.double()
        model.scale.register_hook(lambda gradient: fired.append(gradient))
        model(X).sum().backward()

    found = trace(tmp_path, body)
    assert len(fired) == 1
    assert found.value("passes", "input.0").per_rank[0] is not None


class Hides(nn.Module):
    """Overrides whatever lists parameters and modules."""

    def __init__(self, broken: str) -> None:
        super().__init__()
        self.inner = Net()
        self._broken = broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def _answer(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._broken == "raises":
            raise ValueError(f"{name}: not while training")
        return [] if self._broken == "empty" else list(getattr(super(), name)(*args, **kwargs))

    def parameters(self, *a: Any, **k: Any) -> Any:
        return self._answer("parameters", *a, **k)

    def named_parameters(self, *a: Any, **k: Any) -> Any:
        return self._answer("named_parameters", *a, **k)

    def named_buffers(self, *a: Any, **k: Any) -> Any:
        return self._answer("named_buffers", *a, **k)

    def named_modules(self, *a: Any, **k: Any) -> Any:
        return self._answer("named_modules", *a, **k)

    def modules(self) -> Any:
        return self._answer("modules")

    def get_submodule(self, *a: Any) -> Any:
        return self._answer("get_submodule", *a)


@pytest.mark.parametrize("broken", ["raises", "empty", "lists"])
def test_a_module_that_lists_its_parameters_in_its_own_way_is_traced_whole(
    tmp_path: Path, broken: str
) -> None:
    def program() -> object:
        model = Hides(broken)
        optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.1)
        for _ in range(2):
            model(X).square().sum().backward()
            optimizer.step()
        return model.inner

    found = traced_unharmed(program, tmp_path / "trace")
    assert len(found.steps) == 2
    assert not found.completeness["ranks"][0]["errors"]
    assert found.value("inner.head", "param:weight", phase="setup").per_rank[0] is not None
    assert found.value("inner.head", "grad:weight", phase="grads", step=1).per_rank[0] is not None


@pytest.mark.parametrize("model", [
    Net(), nn.Sequential(shared := nn.Linear(2, 2), shared), nn.LSTM(2, 2),
    nn.TransformerEncoderLayer(8, 2),
], ids=lambda model: type(model).__name__)  # fmt: skip
def test_modules_and_parameters_come_in_torchs_own_order_each_once(model: nn.Module) -> None:
    assert list(modules.modules_of(model)) == list(model.named_modules())
    found = modules.parameters_of_module(model)
    assert [id(p) for p in found] == [id(p) for p in model.parameters()]


def test_a_session_that_fails_before_its_first_record_leaves_no_trace_that_calls_itself_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Odd(nn.Linear):
        is_ready = False

        @property
        def _parameters(self) -> Any:
            if self.is_ready:
                raise ValueError("mine alone")
            return self.__dict__["_parameters"]

        @_parameters.setter
        def _parameters(self, value: object) -> None:
            self.__dict__["_parameters"] = value

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = Odd(8, 2)
    Odd.is_ready = True
    found = trace(tmp_path, lambda: model(X))
    assert "mine alone" in capsys.readouterr().err
    assert not found.completeness["complete"]
    assert "mine alone" in str(found.completeness["ranks"][0]["errors"])


class MakesSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Softmax(dim=-1)(self.linear(x))


class RegistersAnew(MakesSoftmax):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act = nn.Sequential(nn.Softmax(dim=-1))
        return self.act(self.linear(x))


@pytest.mark.parametrize("layer", [MakesSoftmax, RegistersAnew])
def test_modules_made_inside_forward_cost_no_walk_of_the_model_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: type[nn.Module]
) -> None:
    walks: list[object] = []
    walk = ModuleTable._walk

    def counting(self: ModuleTable, root: Root) -> list[ModuleInfo]:
        walks.append(root)
        return walk(self, root)

    monkeypatch.setattr(ModuleTable, "_walk", counting)
    model = nn.Sequential(*(layer() for _ in range(50)))
    found = trace(tmp_path, lambda: [model(X).sum().backward() for _ in range(2)])
    assert len(walks) < 20
    nodes = found.find("*", phase="forward", step=1)
    calls = [n.path for n in nodes if n.class_name == "Softmax"]
    assert calls == [f"{i}.act.0" if layer is RegistersAnew else "@Softmax" for i in range(50)]


def test_modules_made_inside_forward_are_defined_once_however_long_the_run(tmp_path: Path) -> None:
    kinds: list[str] = []
    define = Recorder.define

    def counting(self: Recorder, kind: str, **fields: object) -> int:
        kinds.append(kind)
        return define(self, kind, **fields)

    model = nn.Sequential(MakesSoftmax(), RegistersAnew())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "define", counting)

        def body() -> None:
            for _ in range(30):
                model(X).sum().backward()
                nn.MSELoss()(X, X)

        found = trace(tmp_path, body)
    assert kinds.count("module") <= 12
    (loose,) = found.find("@Softmax", phase="forward", step=0)[:1]
    assert loose.value("output").per_rank[0] is not None


def test_a_module_registered_deep_in_the_model_while_it_runs_has_its_path(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
    late = nn.Tanh()
    model[1].register_forward_hook(lambda *_: None)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.body(x)
            self.body[0].add_module("late", late)
            return late(x)

    root = Root()
    found = trace(tmp_path, lambda: root(X).sum().backward())
    assert "body.0.late" in paths(found, "forward")


def test_text_that_is_no_unicode_is_recorded_and_switches_nothing_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--data", "caf\udce9"])

    class Odd(nn.Linear):
        def forward(self, x: dict[str, torch.Tensor], note: str) -> dict[str, torch.Tensor]:
            return {f"out\udcff{note}": super().forward(x["in\udcff"])}

    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise OSError("no file caf\udce9")

    def body() -> None:
        with pytest.raises(OSError, match="no file"):
            Fails(8, 2)(X)
        Odd(8, 2)({"in\udcff": X}, "\ud800")

    found = trace(tmp_path, body)
    assert not found.completeness["ranks"][0]["errors"]
    assert "input.0.in\\udcff" in {v.slot for n in found.find("*") for v in n.slots}
    assert found.run["argv"][-1] == "caf\\udce9"


def test_a_container_whose_items_draw_random_numbers_draws_none_for_us(tmp_path: Path) -> None:
    class Lazy(UserDict):  # type: ignore[type-arg]
        def __getitem__(self, key: object) -> Any:
            return super().__getitem__(key) + torch.rand(())

    class LazyList(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            return (item + torch.rand(()) for item in super().__iter__())

    class Proxy:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            torch.rand(())
            return dict

    class Takes(nn.Linear):
        def forward(self, x: Any, many: Any, proxy: object) -> torch.Tensor:
            return super().forward(x["a"]) + sum(many)

    def program() -> object:
        model = Takes(8, 2)
        out = model(Lazy(a=X), LazyList([torch.ones(2)]), Proxy())
        out.sum().backward()
        return model, out

    found = traced_unharmed(program, tmp_path / "trace")
    (node,) = found.find("", phase="forward")
    assert [v.slot for v in node.slots] == ["input.0.a", "input.1.0", "input.2", "output"]


def test_more_backwards_of_one_graph_than_a_record_can_number_are_said_and_switch_nothing_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = gradients.MOST_FIRINGS - 1
    assert VALUE_HEAD.pack(0, 0, 0, 0, 0, 0, last, 0, 0, 0)
    with pytest.raises(struct.error):
        VALUE_HEAD.pack(0, 0, 0, 0, 0, 0, last + 1, 0, 0, 0)
    monkeypatch.setattr(gradients, "MOST_FIRINGS", 3)

    def body() -> None:
        out = nn.Linear(2, 1, bias=False)(torch.ones(1, 2, requires_grad=True))
        for _ in range(6):
            out.backward(retain_graph=True)

    found = trace(tmp_path, body)
    assert found.completeness["ranks"][0]["end"] == "closed"
    assert "backward ran 3 times" in str([n.errors for n in found.find("*")])
    assert found.value("", "grad_output", phase="backward").per_rank[0] is not None
