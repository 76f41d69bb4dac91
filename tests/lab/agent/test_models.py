"""Models and programs of rarer kinds, traced: generation, exceptions in hooks, depth."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.record.call import Mode
from tests.agent.programs import step_through
from tests.agent.test_models import called, steps
from tests.unharmed import traced_unharmed

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.*is deprecated:DeprecationWarning", "ignore:.*nested.*:UserWarning"
)


def test_text_is_generated_with_and_without_a_cache_token_by_token(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def program() -> Any:
        config = transformers.GPT2Config(
            n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=32,
            bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config).eval()
        x = torch.randint(3, 50, (2, 4))
        sampled = model.generate(
            x, max_new_tokens=3, min_new_tokens=3, do_sample=True, pad_token_id=0
        )
        beams = model.generate(
            x, max_new_tokens=2, min_new_tokens=2, num_beams=2, use_cache=False, pad_token_id=0
        )
        optimizer = torch.optim.AdamW(model.train().parameters())
        loss = model(x, labels=x).loss
        loss.backward()
        optimizer.step()
        return model, optimizer, sampled, beams, loss

    found = traced_unharmed(program, tmp_path / "trace")
    assert [s.step for s in found.steps if s.mode is Mode.EVAL] == [0, 1, 2, 3, 4]
    tokens = [
        found.value("", "input.input_ids", step=i, mode="eval").global_shape for i in range(5)
    ]
    views = [found.find("", phase="forward", step=i, mode="eval")[0] for i in range(5)]
    shapes = [next(v for v in n.slots if v.slot == "input.input_ids").folds[0].shape for n in views]
    assert shapes == [(2, 4), (2, 1), (2, 1), (4, 4), (4, 5)], tokens
    (node,) = found.find("", phase="forward", step=0, mode="train")
    assert {"output.loss", "output.logits", "input.labels"} <= {v.slot for v in node.slots}


def test_an_exception_in_a_hook_of_the_user_ends_the_call_it_belongs_to(tmp_path: Path) -> None:
    def raising(*args: Any) -> None:
        raise LookupError("in a hook")

    def program() -> Any:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        alive = torch.optim.SGD(model.parameters(), lr=0.1)  # so that a forward alone is no step
        for register in (
            model[0].register_forward_pre_hook,
            model[1].register_forward_hook,
            model.register_forward_hook,
        ):
            handle = register(raising)
            with pytest.raises(LookupError, match="in a hook"):
                model(torch.randn(3, 8))
            handle.remove()
        return step_through(model), alive

    found = traced_unharmed(program, tmp_path / "trace")
    first, second, third, whole = found.find("", phase="forward", step=0)
    assert [n.status for n in (first, second, third, whole)] == ["raised", "raised", "returned",
                                                                "returned"]  # fmt: skip
    assert [c.status for c in first.children] == ["raised"]
    assert [c.status for c in second.children] == ["returned", "raised"]
    assert steps(found) == ["train 0", "train 1"]


@pytest.mark.parametrize(("depth", "is_traced"), [(150, True), (215, False)])
def test_a_model_nested_too_deep_for_hooks_runs_untraced_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], depth: int, is_traced: bool
) -> None:
    """torch 2.13 calls a hooked module through one frame more: 215 levels fit without hooks."""
    from concurrent.futures import ThreadPoolExecutor

    def program() -> Any:
        model: nn.Module = nn.Linear(8, 8)
        for _ in range(depth):
            model = nn.Sequential(model)
        with ThreadPoolExecutor(1) as own_stack:  # without the frames of whoever runs the tests
            return own_stack.submit(step_through, model).result()

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # torch's inductor raises it for the rest of the process
    try:
        found = traced_unharmed(program, tmp_path / "trace")
    finally:
        sys.setrecursionlimit(limit)
    said = capsys.readouterr().err
    errors = [str(e) for e in found.completeness["ranks"][0]["errors"]]
    assert bool(found.steps) == is_traced == (not errors) == (not said)
    if is_traced:
        assert len(called(found)) == depth + 1 and called(found)[-1].count(".") == depth - 1
    else:
        assert "nests 215 modules deep" in errors[0] and "sys.setrecursionlimit" in said
        assert found.completeness["ranks"][0]["end"] == "switched_off"


def test_a_call_without_room_for_a_hook_ends_no_program_and_is_noted(tmp_path: Path) -> None:
    class Digging(nn.Module):
        """Calls its module from deep inside functions of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            return self.forward(x, depth - 1) if depth else self.linear(x)

    def deepest() -> int:
        model, x = Digging(), torch.ones(1, 8)
        depth = 1
        while depth < 100_000:
            try:
                model(x, depth)
            except RecursionError:
                return depth
            depth += 1
        raise AssertionError("Python's recursion limit was not met")

    room = deepest() - 8  # enough for torch's own frame

    def program() -> Any:
        model = Digging()
        return model, [model(torch.ones(1, 8), depth) for depth in (room - 30, room - 4, room)]

    found = traced_unharmed(program, tmp_path / "trace")
    assert "room" in str(found.completeness["ranks"][0]["errors"])
