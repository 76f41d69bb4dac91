"""Gradients and tensors of every kind in every place."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.agent.test_tensors import FLOATS, Ragged, check, errors
from tests.unharmed import traced_unharmed


def gradients_of_every_kind() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return (parameter, gradient) by name: what `.grad` may hold."""
    rows = torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 3), (4, 3), check_invariants=True)
    dtypes = (*FLOATS, torch.complex64, torch.complex128)
    return {
        **{
            f"{dtype}": (torch.ones(3, 2).to(dtype), torch.randn(3, 2).to(dtype))
            for dtype in dtypes
        },
        "sparse": (torch.ones(4, 3), rows),
        "transposed": (torch.ones(4, 3), torch.randn(3, 4).t()),
        "expanded": (torch.ones(4, 3), torch.randn(3).expand(4, 3)),
        "infinite": (torch.ones(2), torch.tensor([math.inf, math.nan])),
        "empty": (torch.ones(0), torch.ones(0)),
        "scalar": (torch.ones(()), torch.tensor(3.0)),
    }


class Still(torch.optim.Optimizer):
    """Moves nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


def test_gradients_of_every_kind_are_recorded(tmp_path: Path) -> None:
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def program() -> Any:
        pairs.update(gradients_of_every_kind())
        model = Ragged({})
        for number, (parameter, gradient) in enumerate(pairs.values()):
            made = nn.Parameter(parameter.clone())
            made.grad = gradient
            model.register_parameter(f"p{number}", made)
        optimizer = Still(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        return [p.grad for p in model.parameters()]

    found = traced_unharmed(program, tmp_path / "trace", steps="all")
    assert not errors(found)
    for number, (name, (_, gradient)) in enumerate(pairs.items()):
        value = found.value("", f"grad:p{number}", phase="grads")
        if name == "sparse":
            assert value.per_rank[0] is None
        else:
            check(value, gradient)


class Embeds(nn.Module):
    """An embedding whose gradient is sparse, called with ids and with what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, ids: torch.Tensor, extra: Any = None) -> torch.Tensor:
        return self.table(ids).sum(1)


def test_a_sparse_gradient_is_told_by_its_layout(tmp_path: Path) -> None:
    def program() -> Any:
        model = Embeds()
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.tensor([[1, 2], [2, 3]])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    found = traced_unharmed(program, tmp_path / "trace", steps="all")
    assert not errors(found)
    (node,) = found.find("table", phase="grads", step=1)
    assert [fold.note for view in node.slots for fold in view.folds] == ["layout sparse_coo"]
    assert found.value("table", "input.0").dtype == "int64"


class Quiet(torch.Tensor):
    """A subclass that counts what it is asked."""

    seen = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Tagged(nn.Parameter):
    """A parameter that counts as well."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Quiet.seen += 1
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_subclasses_are_asked_nothing(tmp_path: Path) -> None:
    def program() -> Any:
        Quiet.seen = 0
        model = nn.Linear(3, 3)
        model.weight = Tagged(torch.randn(3, 3))
        model.register_buffer("extra", torch.randn(2).as_subclass(Quiet))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.randn(2, 3).as_subclass(Quiet)).square().sum()
            loss.backward()
            optimizer.step()
        count = Quiet.seen
        return model.weight.detach(), loss.as_subclass(torch.Tensor), count

    found = traced_unharmed(program, tmp_path / "trace", steps="all")
    assert not errors(found)
    for slot, phase in (
        ("output", "forward"), ("param:weight", "params"), ("buffer:extra", "params"),
        ("grad:weight", "grads"),
    ):  # fmt: skip
        assert found.value("", slot, step=1, phase=phase).per_rank[0] is not None


def test_a_forward_over_nested_tensors_is_described_and_unharmed(tmp_path: Path) -> None:
    def program() -> Any:
        model = nn.Linear(3, 2)
        rows = [torch.randn(2, 3), torch.randn(5, 3)]
        jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            strided = torch.nested.nested_tensor(rows)
        model(jagged).values().sum().backward()
        return model, list(model(strided).unbind())

    found = traced_unharmed(program, tmp_path / "trace", steps="all")
    assert not errors(found)
    assert all(
        found.value("", slot, step=step).per_rank[0] is None
        for slot in ("input.0", "output") for step in (0, 1)
    )  # fmt: skip


def test_a_lazy_parameter_is_described_before_it_exists(tmp_path: Path) -> None:
    def program() -> Any:
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
        model(torch.randn(4, 5)).sum().backward()
        return model

    found = traced_unharmed(program, tmp_path / "trace", steps="all")
    assert not errors(found)
    assert found.value("0", "param:weight", phase="setup").per_rank[0] is None
    assert found.value("0", "output").per_rank[0] is not None
