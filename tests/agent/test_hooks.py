"""Hooks as torch sees them: what is compiled stays valid, what others raise arrives, and torch's
tables never change while torch walks over them.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import signal
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.modules import module as tables
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import rankscope
from rankscope.agent.guard import Guard
from rankscope.capture.torch_internals.compiling import global_hook_tables
from tests.models import Failing, trace
from tests.unharmed import traced_unharmed

GLOBAL = (tables._global_forward_pre_hooks, tables._global_forward_hooks)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


# ---------------------------------------------------------------- compiled models


def train_and_evaluate(is_full: bool, own_hooks: bool, steps: int = 30) -> tuple[Any, int]:
    torch._dynamo.reset()
    counter, model = CompileCounterWithBackend("eager"), small()
    if own_hooks:
        model[0].register_forward_hook(lambda module, args, output: output * 2)
        model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    compiled = torch.compile(model, backend=counter, fullgraph=is_full)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = compiled(torch.randn(3, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            losses += [loss.detach(), compiled(torch.randn(3, 4))]
    return (model, losses), counter.frame_count


def test_hooks_are_registered_anew_where_torch_has_no_such_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.agent.hooks.install.global_hook_tables", lambda: None)
    before = [list(table) for table in GLOBAL]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = traced_unharmed(lambda: train_and_evaluate(False, False, 3)[0], tmp_path / "trace")
    assert len([s for s in found.steps if s.mode.word == "train"]) == 3
    assert [list(table) for table in GLOBAL] == before
    monkeypatch.setattr(tables, "_global_forward_hooks_always_called", None)
    assert global_hook_tables() is None


def test_our_hooks_stand_behind_those_registered_before_a_traced_step(tmp_path: Path) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(out=tmp_path / "trace", steps="0,2"):
        handles: list[Any] = []
        for step in range(3):
            if step == 1:
                handles = [
                    register_module_forward_pre_hook(lambda module, args: None),
                    register_module_forward_hook(lambda module, args, output: None),
                ]
            loss = model(torch.ones(2, 4)).sum()
            if step == 2:
                for table, handle in zip(GLOBAL, handles, strict=True):
                    assert len(table) == 2 and next(iter(table)) == handle.id
            loss.backward()
            optimizer.step()
    for handle in handles:
        handle.remove()
    assert not any(GLOBAL)


def test_warnings_made_errors_inside_the_block_let_a_compiled_module_run(tmp_path: Path) -> None:
    """torch 2.13 warns where a compiled module is called while any global hook is on."""
    asked = tables._has_any_global_hook
    train_and_evaluate(True, False, 1)  # torch's imports add filters
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_and_evaluate(True, False, 1)  # in torch 2.8 each compilation adds one
        before = list(warnings.filters)
    with warnings.catch_warnings(), rankscope.trace(out=tmp_path / "trace"):
        warnings.simplefilter("error")
        train_and_evaluate(True, False, 5)
        assert list(warnings.filters) == before
        handle = register_module_forward_hook(lambda module, args, output: None)
        with pytest.raises(UserWarning, match="global hooks"):  # of others torch still warns
            torch.compile(small(), backend="eager")(torch.ones(1, 4))
        handle.remove()
    assert tables._has_any_global_hook is asked


# ---------------------------------------------------------------- exceptions of the program's


class Timeout(Exception):
    """What a watchdog raises."""


def ring(number: int, frame: FrameType | None) -> None:
    raise Timeout


def test_what_a_hook_of_ours_raises_itself_stays_with_us() -> None:
    failures: list[Exception] = []

    def fail() -> None:
        raise ValueError("mine")

    guard = Guard(failures.append)
    signal_before = signal.signal(signal.SIGALRM, ring)
    try:
        guard.hook(fail)()
    finally:
        signal.signal(signal.SIGALRM, signal_before)
    assert guard.failures == 1 and str(failures[0]) == "mine"


# ---------------------------------------------------------------- switching off


class Wordless(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def test_an_exception_that_cannot_be_printed_is_recorded_by_its_class(tmp_path: Path) -> None:
    model = Failing(Wordless, 4, math.inf)

    def body() -> None:
        for _ in range(30):
            with pytest.raises(Wordless):
                model(torch.ones(2, 4))

    found = trace(tmp_path, body)
    assert not found.completeness["ranks"][0]["errors"]
    assert {o.error for n in found.find("", phase="forward") for o in n.outcomes} == {"Wordless"}


# ---------------------------------------------------------------- copies and odd hooks


class Saves(nn.Module):
    """Copies and saves a part of itself while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.register_forward_hook(do_nothing)
        self.inner.register_forward_pre_hook(do_nothing)
        self.twins: list[nn.Module] = []
        self.files: list[bytes] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        file = io.BytesIO()
        torch.save(self.inner, file)
        self.twins.append(copy.deepcopy(self.inner))
        self.files += [pickle.dumps(self.inner), file.getvalue()]
        return self.inner(x)


def do_nothing(*arguments: object) -> None:
    """A hook that can be pickled."""


def test_a_module_copied_and_saved_inside_its_traced_forward_carries_hooks_that_do_nothing(
    tmp_path: Path,
) -> None:
    model = Saves()
    found = trace(tmp_path, lambda: model(torch.ones(2, 4)).sum().backward())
    assert found.find("inner", phase="forward") and len(model.files) == 2
    assert b"rankscope" not in model.files[0] + model.files[1]
    read = [
        pickle.loads(model.files[0]),
        torch.load(io.BytesIO(model.files[1]), weights_only=False),
    ]
    for twin in (*read, *model.twins):
        assert torch.equal(twin(torch.ones(2, 4)), model.inner(torch.ones(2, 4)))
    assert [len(model.inner._forward_hooks), len(model.inner._forward_pre_hooks)] == [1, 1]
    again = trace(tmp_path / "again", lambda: model.twins[0](torch.ones(2, 4)).sum().backward())
    (node,) = again.find("", phase="forward", step=0)
    assert [v.slot for v in node.slots] == ["input.0", "output"]
