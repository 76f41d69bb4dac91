"""The program is left as it was: nothing kept, nothing left behind, nothing raised."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rankscope
from tests.models import Net, trace, train


@pytest.mark.parametrize("digest", ["full", "none"])
def test_losses_parameters_and_random_state_are_bitwise_the_same_with_tracing_on(
    tmp_path: Path, digest: str
) -> None:
    def run() -> tuple[list[float], list[np.ndarray], bytes]:
        torch.manual_seed(5)
        model = nn.Sequential(Net(), nn.Dropout(0.5))
        losses = train(model, steps=3, micro_batches=2)
        return (
            losses,
            [p.detach().numpy().copy() for p in model.parameters()],
            torch.get_rng_state().numpy().tobytes(),
        )

    off = run()
    with rankscope.trace(out=tmp_path / "trace", digest=digest):
        on = run()
    assert on[0] == off[0] and on[2] == off[2]
    assert all(np.array_equal(a, b) for a, b in zip(on[1], off[1], strict=True))


def test_nothing_of_ours_is_left_in_torch_or_on_the_model_afterwards(tmp_path: Path) -> None:
    from torch.nn.modules import module as hooks
    from torch.optim import optimizer as optimizers

    def registered() -> list[int]:
        tables = (
            hooks._global_forward_hooks, hooks._global_forward_pre_hooks,
            hooks._global_forward_hooks_always_called,
            hooks._global_forward_hooks_with_kwargs, optimizers._global_optimizer_pre_hooks,
            optimizers._global_optimizer_post_hooks,
        )  # fmt: skip
        return [len(table) for table in tables]

    model = Net()
    model.head.register_forward_hook(lambda module, args, output: None)
    attributes = {name: sorted(vars(m)) for name, m in model.named_modules()}
    own = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    before = registered()
    trace(tmp_path, lambda: train(model))
    assert registered() == before
    assert {name: sorted(vars(m)) for name, m in model.named_modules()} == attributes
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == own


def test_no_tensor_and_no_module_outlives_its_step_because_of_us(tmp_path: Path) -> None:
    import weakref

    kept: list[weakref.ref[Any]] = []

    def body() -> None:
        model = Net()
        out = model(torch.ones(4, 8))
        out.sum().backward()
        kept.extend([weakref.ref(out), weakref.ref(model), weakref.ref(model.head.weight)])
        del model, out
        other = Net()
        other(torch.ones(4, 8))
        gc.collect()
        assert [ref() for ref in kept] == [None, None, None]

    trace(tmp_path, body)


def test_blocks_one_after_the_other_leave_no_object_behind(tmp_path: Path) -> None:
    model = Net()

    def blocks(names: str) -> int:
        for name in names:
            with rankscope.trace(model, out=tmp_path / name, spool=tmp_path):
                model(torch.ones(1, 8))
        gc.collect()
        return len(gc.get_objects())

    settled = blocks("abcd")
    assert blocks("efghijkl") - settled < 8  # one object a block, the least that could be left


def test_a_failure_inside_a_hook_never_reaches_the_program_and_is_written_down(
    tmp_path: Path,
) -> None:
    class Hostile(dict[str, Any]):
        """A mapping that explodes when it is walked."""

        def items(self) -> Any:
            raise RuntimeError("do not touch")

        def keys(self) -> Any:
            raise RuntimeError("do not touch")

        def __iter__(self) -> Any:
            raise RuntimeError("do not touch")

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, bag: Any) -> torch.Tensor:
            return self.linear(x)

    found = trace(tmp_path, lambda: Takes()(torch.ones(2, 4), Hostile(a=1)))
    assert found.find("linear", phase="forward"), "the call is there all the same"


def test_settings_that_cannot_be_used_are_said_and_the_block_runs_untraced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for settings, said in (
        ({"steps": "2-1"}, "2-1"),
        ({"out": tmp_path / "file"}, "is a file"),
        ({"colour": 1}, "colour"),
    ):
        with rankscope.trace(**{"out": tmp_path / "new", **settings}) as handle:
            ran = Net()(torch.ones(1, 8)).sum().item()
        assert handle.path is None and isinstance(ran, float)
        captured = capsys.readouterr()
        assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_attach_without_arguments_does_nothing_unless_the_variable_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANKSCOPE", raising=False)
    rankscope.attach()
    from rankscope.agent.activation import current_session

    assert current_session() is None


def test_a_model_saved_or_copied_inside_a_traced_step_carries_nothing_of_ours(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    import copy
    import io

    model = nn.Sequential(Net(), nn.Linear(3, 3))
    model[1].register_forward_hook(print_nothing)
    model[1].register_forward_pre_hook(print_nothing)

    def body() -> None:
        x = torch.randn(2, 8, requires_grad=True)
        out = model(x)
        out.sum().backward()
        torch.save(x, io.BytesIO())
        torch.save(model, io.BytesIO())
        twin = copy.deepcopy(model)
        assert [len(m._forward_hooks) for m in twin] == [0, 1]
        assert [len(m._forward_pre_hooks) for m in twin] == [0, 1]

    found = trace(tmp_path, body)
    assert found.find("1", phase="forward")
    assert not [w for w in recwarn if "hook" in str(w.message)]


def print_nothing(*arguments: object) -> None:
    """A hook that can be pickled."""
