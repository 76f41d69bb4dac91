"""Which nodes a trace has: roots, paths, wrappers, calls that did not return."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.models import Failing, Net, paths, trace, train


def test_a_module_called_twice_and_a_shared_module_get_an_ordinal_each(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.again = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.first(x))

    found = trace(tmp_path, lambda: Twice()(torch.ones(2, 4)))
    nodes = found.find("first", phase="forward")
    assert [n.ordinal for n in nodes] == [0, 1]
    first, second = (n.value("output").per_rank[0] for n in nodes)
    assert first is not None and second is not None and first.hash != second.hash


def test_wrappers_leave_no_trace_in_paths(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = trace(tmp_path / "plain", lambda: train(Net()))
    model = Net()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    wrapped = trace(tmp_path / "wrapped", lambda: train(model))
    assert paths(wrapped, "forward") == paths(plain, "forward")
    (node,) = wrapped.find("layers.0.up", phase="forward", step=0)
    assert node.raw_path == "layers.0._checkpoint_wrapped_module.up"
    assert "layers.0.up" in paths(wrapped, "recompute")


def test_the_largest_root_is_the_root_and_others_are_named_by_their_class(tmp_path: Path) -> None:
    small, large = nn.Linear(8, 8), Net()

    def body() -> None:
        with torch.no_grad():
            large(small(torch.ones(2, 8)))

    found = trace(tmp_path, body)
    assert [n.class_name for n in found.find("", phase="forward")] == ["Net"]
    assert found.find("@Linear", phase="forward")


def test_the_model_given_to_trace_is_the_root_however_small(tmp_path: Path) -> None:
    small, large = nn.Linear(8, 8), Net()

    def body() -> None:
        with torch.no_grad():
            large(small(torch.ones(2, 8)))

    found = trace(tmp_path, body, small)
    assert [n.class_name for n in found.find("", phase="forward")] == ["Linear"]
    assert found.find("@Net", phase="forward")


def test_an_exception_in_forward_is_recorded_and_passes_through(tmp_path: Path) -> None:
    model = Failing(LookupError("no such expert"), 4, math.inf)

    def body() -> None:
        for _ in range(2):
            with pytest.raises(LookupError, match="no such expert"):
                model(torch.ones(2, 4))

    found = trace(tmp_path, body)
    (node,) = found.find("", phase="forward", step=0)
    assert any("no such expert" in str(outcome) for outcome in node.outcomes)
    assert len(found.steps) == 2


def test_a_keyboard_interrupt_leaves_no_call_open_for_the_next_step(tmp_path: Path) -> None:
    model = Failing(KeyboardInterrupt(), 4)

    def body() -> None:
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2, 4))
        with torch.no_grad():
            model(torch.ones(2, 4))

    found = trace(tmp_path, body)
    (broken,) = found.find("", phase="forward", mode="train")
    (whole,) = found.find("", phase="forward", mode="eval")
    assert broken.status == "abandoned"
    assert whole.status == "returned"
    assert [child.path for child in whole.children] == ["linear"]


def test_a_scripted_module_is_opaque_and_its_parameters_are_seen(tmp_path: Path) -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(8, 8))), nn.Linear(8, 2))
    found = trace(tmp_path, lambda: train(model, steps=1))
    assert "0" in paths(found, "forward")
    assert found.value("0.0", "param:weight", phase="setup").per_rank[0] is not None
    assert not found.completeness["ranks"][0]["errors"]


def test_a_glob_that_matches_no_module_is_said_with_names_that_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = trace(tmp_path, lambda: train(Net()), paths="layer.0,head")
    said = capsys.readouterr().err
    assert "'layer.0' matched no module" in said
    assert "layers.0" in said
    assert "'head'" not in said
    assert found.find("head")
