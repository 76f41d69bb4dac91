"""Hooks in rarer situations: compiled again and again, signals, switched off in the middle."""

from __future__ import annotations

import functools
import gc
import math
import pickle
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.modules.module import register_module_forward_hook

import rankscope
from rankscope.agent.guard import MAX_FAILURES, Guard
from tests import forked
from tests.agent.test_hooks import GLOBAL, Timeout, Wordless, ring, small, train_and_evaluate
from tests.models import Failing, Net, trace
from tests.unharmed import traced_unharmed


@pytest.mark.parametrize("own_hooks", [False, True])
@pytest.mark.parametrize("steps", ["0-2", "every:2", "5", "all"])
def test_each_graph_is_compiled_at_most_once_more_however_often_steps_are_traced(
    tmp_path: Path, steps: str, own_hooks: bool
) -> None:
    """torch 2.13 compiles again where hooks have other numbers, and with `fullgraph` fails the 9th
    time.
    """
    frames: list[int] = []

    def program() -> Any:
        result, count = train_and_evaluate(True, own_hooks)
        frames.append(count)
        return result

    traced_unharmed(program, tmp_path / "trace", steps=steps)
    plain, traced = frames
    assert plain == 2 and traced <= 2 * plain


def test_a_second_block_finds_compiled_what_the_first_one_did(tmp_path: Path) -> None:
    torch._dynamo.reset()
    counter, model = CompileCounterWithBackend("eager"), small()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for block in range(10):
        with rankscope.trace(out=tmp_path / str(block), steps="0"):
            compiled(torch.randn(3, 4)).sum().backward()
        compiled(torch.randn(3, 4)).sum().backward()
    assert counter.frame_count <= 2


class Watchdog:
    """Handlers of every kind that Python takes."""

    def ring(self, number: int, frame: FrameType | None) -> None:
        raise Timeout

    def __call__(self, number: int, frame: FrameType | None) -> None:
        ring(number, frame)


HANDLERS = (ring, Watchdog().ring, Watchdog(), functools.partial(Watchdog.ring, Watchdog()))


def test_every_exception_of_the_programs_signal_handler_reaches_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what a handler raises in a callback of the garbage collector, and hypothesis has
    one in this process: without it. It also drops what is raised in the callback of a weak
    reference; that counts unless the callback is rankscope's.
    """
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(200)))
    arrived = dropped = 0

    def drop(unraisable: sys.UnraisableHookArgs) -> None:
        nonlocal dropped
        files = {frame.filename for frame in traceback.extract_tb(unraisable.exc_traceback)}
        if unraisable.exc_type is Timeout and not any("/rankscope/" in file for file in files):
            dropped += 1

    def body() -> None:
        nonlocal arrived
        model(torch.ones(2, 4))
        for turn in range(40):
            signal.signal(signal.SIGALRM, HANDLERS[turn % len(HANDLERS)])
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.004)
                for _ in range(500):
                    model(torch.ones(2, 4))
            except Timeout:
                arrived += 1
        model(torch.ones(2, 4)).sum().backward()

    before, callbacks = signal.getsignal(signal.SIGALRM), gc.callbacks[:]
    try:
        gc.callbacks.clear()
        monkeypatch.setattr(sys, "unraisablehook", drop)
        found = trace(tmp_path, body)
    finally:
        gc.callbacks[:] = callbacks
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert arrived + dropped == 40 and dropped < 4
    assert not found.completeness["ranks"][0]["errors"]
    *_, last = found.find("", phase="forward", step=0)
    assert last.status == "returned" and len(last.children) == 200


def fail_often(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("broken on purpose")

    monkeypatch.setattr(where, fail)


def test_switching_off_in_the_middle_of_torchs_walk_leaves_the_programs_exceptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch 2.13 walks over its own table of hooks after an exception, not over a copy."""
    fail_often(monkeypatch, "rankscope.agent.hooks.tracer.describe_error")
    model, raised = Failing(Wordless, 4, math.inf), []
    with rankscope.trace(out=tmp_path / "trace"):
        model.linear(torch.ones(2, 4))
        with pytest.raises(Wordless):
            model(torch.ones(2, 4))
        handle = register_module_forward_hook(lambda module, args, output: None, always_call=True)
        for _ in range(MAX_FAILURES + 10):
            try:
                model(torch.ones(2, 4))
            except Exception as error:
                raised.append(type(error))
        handle.remove()
        assert not any(GLOBAL), "taken off at the next call"
    assert raised == [Wordless] * (MAX_FAILURES + 10)
    assert capsys.readouterr().err.count("switched off") == 1


def test_switching_off_in_an_optimizers_hook_leaves_the_step_to_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.optim import optimizer as optimizers

    fail_often(monkeypatch, "rankscope.agent.steps.stepmachine.StepMachine.optimizer_begins")
    model, seen = small(), 0

    def count(*arguments: object) -> None:
        nonlocal seen
        seen += 1

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rankscope.trace(out=tmp_path / "trace"):
        handle = optimizers.register_optimizer_step_pre_hook(count)
        for _ in range(MAX_FAILURES + 10):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        handle.remove()
    assert seen == MAX_FAILURES + 10
    assert capsys.readouterr().err.count("switched off") == 1
    assert not any(GLOBAL) and not optimizers._global_optimizer_pre_hooks


def test_a_saved_module_is_read_where_rankscope_is_not_installed(tmp_path: Path) -> None:
    hook = Guard(lambda error: None).hook(print)
    (tmp_path / "hook.pickle").write_bytes(pickle.dumps(hook))
    script = (
        "import pickle, sys; hook = pickle.load(open(sys.argv[1], 'rb'));"
        "assert hook(1, 2, 3) is None; assert 'rankscope' not in sys.modules"
    )
    forked.run(
        [sys.executable, "-c", script, str(tmp_path / "hook.pickle")], check=True, timeout=300
    )


class Incomparable:
    """A hook that cannot be compared."""

    def __call__(self, *arguments: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        raise TypeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


def test_a_hook_that_cannot_be_compared_is_left_in_peace(tmp_path: Path) -> None:
    def program() -> Any:
        model = Net()
        model.head.register_forward_hook(Incomparable())
        model.head.register_forward_pre_hook(Incomparable())
        model(torch.randn(2, 8)).sum().backward()
        return model

    found = traced_unharmed(program, tmp_path / "trace")
    assert not found.completeness["ranks"][0]["errors"]
    assert found.find("head", phase="forward")
