"""Values that the user named: which numbers are looked at, for which step, and what is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankscope.agent.blackboxwatch import BlackBoxWatch
from rankscope.agent.recorder import Recorder
from rankscope.capture.describe import Described
from rankscope.capture.measuring import ValueNumbers
from rankscope.layout.placement import Layout, LayoutSource
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.stepselection import StepSelection
from rankscope.record.value import ValueFlag, ValueMeta
from rankscope.run.agreements import EventBoard, Happening
from rankscope.spool.recordformat import StepEvent
from rankscope.spool.ringwriter import RingWriter

DESCRIBED = Described(
    meta=ValueMeta(
        dtype="float32", device="cpu", shape=(4,), global_shape=(4,),
        layout=Layout(source=LayoutSource.UNKNOWN), ranges=None,
    )
)  # fmt: skip


def numbers(magnitude: float, count: int = 4, **others: float) -> ValueNumbers:
    """The numbers of a value with this root mean square."""
    plain = ValueNumbers(
        count=count, hash=1, nan=0, posinf=0, neginf=0, zero=0, min=0.0, max=1.0, mean=0.5, std=0.1,
        l2=magnitude * math.sqrt(count), sketch=(0.0,) * 8, samples=None, reused=False,
    )  # fmt: skip
    return plain._replace(**others)  # type: ignore[arg-type]  # counts are whole


class Watching:
    """A rank of modules `loss` and `other` that watches values."""

    def __init__(self, folder: Path, board: Path, watch: str, rank: int = 0) -> None:
        self.board = EventBoard(board)
        self.said: list[str] = []
        self.writer = RingWriter(folder, limit_bytes=4 << 20, steps=5, board=self.board)
        self.recorder = Recorder(self.writer)
        selection = StepSelection.parse(f"last:5,{watch}")
        self.box = BlackBoxWatch(
            self.recorder, self.writer, selection, self.board, rank, self.said.append
        )
        self.root = self.recorder.define("root", **{"class": "Model"})
        self.modules = {
            path: self.recorder.define("module", root=self.root, path=path)
            for path in ("loss", "other")
        }

    def begin(self, step: int, mode: Mode = Mode.TRAIN) -> None:
        self.recorder.step(StepEvent.BEGIN, mode, step)

    def call(
        self, path: str, step: int, mode: Mode = Mode.TRAIN, phase: Phase = Phase.FORWARD
    ) -> int:
        return self.recorder.enter(self.modules[path], self.root, None, mode, step, 0, phase, 0)

    def value(
        self, call: int, magnitude: float, slot: str = "output", phase: Phase = Phase.FORWARD,
        flags: int = 0, **others: float,
    ) -> None:  # fmt: skip
        self.recorder.value(call, slot, DESCRIBED, numbers(magnitude, **others), phase, 0, flags)

    def train(
        self, step: int, *magnitudes: float, path: str = "loss", mode: Mode = Mode.TRAIN
    ) -> None:
        """A step with a call for each of these."""
        self.begin(step, mode)
        for magnitude in magnitudes:
            self.value(self.call(path, step, mode), magnitude)
        self.recorder.step(StepEvent.END, mode, step)

    def evaluate(self, step: int, magnitude: float) -> None:
        """A step in eval mode."""
        self.train(step, magnitude, mode=Mode.EVAL)

    def told(self) -> list[Happening]:
        """What is told of all that was recorded so far, as the end of a step would tell it."""
        self.recorder.hand_on()
        return self.board.events()


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Callable[..., Watching]]:
    """Make a rank: `watching("watch:loss:output", rank=0)`."""
    made: list[Watching] = []

    def make(watch: str = "watch:loss:output", rank: int = 0) -> Watching:
        made.append(Watching(tmp_path / f"rank{rank}", tmp_path / "events", watch, rank))
        return made[-1]

    yield make
    for each in made:
        each.writer.close()


def test_it_is_told_which_value_leapt_at_which_step_and_beside_what(
    watching: Callable[..., Watching],
):
    rank = watching()
    for step in range(12):
        rank.train(step, 2.0)
    rank.train(12, 50.0)
    (event,) = rank.told()
    assert (event.trigger.word, event.mode, event.step) == ("watched", Mode.TRAIN, 12)
    assert event.text == (
        "rank 0: the root mean square of loss:output is 50 in step 12, "
        "25 times its running median 2"
    )
    rank.train(13, 60.0)
    assert len(rank.told()) == 1, "step 13 is among the steps after one that was told"


def test_only_what_a_glob_takes_is_looked_at(watching: Callable[..., Watching]):
    rank = watching("watch:loss:output,watch:oth*:param:weight")
    for step in range(20):
        size = 1.0 if step < 12 else 1e6
        rank.begin(step)
        rank.value(rank.call("other", step), size)
        call = rank.call("loss", step)
        rank.value(call, size, "input.0")
        rank.value(call, 1.0)
        call = rank.call("loss", step, phase=Phase.RECOMPUTE)
        rank.value(call, size, phase=Phase.RECOMPUTE)
        rank.value(rank.call("other", step, phase=Phase.SETUP), size, "param:weight", Phase.SETUP)
        rank.recorder.step(StepEvent.END, Mode.TRAIN, step)
    assert rank.told() == []


def test_a_value_that_an_accelerator_hands_out_later_is_of_the_step_of_its_call(
    watching: Callable[..., Watching],
):
    rank = watching()
    calls = []
    for step in range(30):
        rank.begin(step)
        calls.append(rank.call("loss", step))
        rank.recorder.step(StepEvent.END, Mode.TRAIN, step)
        if step >= 2:  # two steps late
            rank.value(calls[step - 2], 1e3 if step - 2 == 20 else 1.0)
    assert [event.step for event in rank.told()] == [20]
    assert "in step 20" in rank.told()[0].text
    assert rank.box._leaps is not None
    assert len(rank.box._leaps._calls) < 12, "calls of long ago are forgotten"


def test_what_is_not_finite_or_a_scalers_is_no_leap(watching: Callable[..., Watching]):
    rank = watching("watch:loss")
    odd: tuple[dict[str, float], ...] = ({"posinf": 1}, {"nan": 1}, {"l2": math.inf}, {"count": 0})
    for step in range(30):
        rank.begin(step)
        rank.value(rank.call("loss", step), 1.0)
        if step > 12:
            for others in odd:
                rank.value(rank.call("loss", step), 1e9, "grad_output", Phase.BACKWARD, **others)
            for flag in (ValueFlag.SCALED, ValueFlag.SKIPPED):
                call = rank.call("loss", step, phase=Phase.GRADS)
                rank.value(call, 1e9, "grad:weight", Phase.GRADS, int(flag))
        rank.recorder.step(StepEvent.END, Mode.TRAIN, step)
    assert rank.told() == []
    rank.train(30, 1.0)
    rank.begin(31)
    rank.value(rank.call("loss", 31), 100.0, neginf=2)
    assert [event.step for event in rank.told()] == [31], "a mask is no reason not to look"


def test_a_glob_that_takes_nothing_on_any_rank_is_named_once(watching: Callable[..., Watching]):
    watch = "watch:loss:output,watch:other:output,watch:los:output"
    first, second = watching(watch, 0), watching(watch, 1)
    for step in range(40):
        first.train(step, 1.0)
        second.train(step, 1.0, path="other")
        assert bool(first.said) == (step >= 16)
    (text,) = first.said
    assert "watch:los:output took nothing in 16 steps" in text
    assert first.told() == []
