"""What a rank holds back stays within its bounds, and is copied whole, each record once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rankscope.agent.blackboxwatch import BlackBoxWatch
from rankscope.agent.recorder import Recorder
from rankscope.capture.describe import Described
from rankscope.capture.measuring import ValueNumbers
from rankscope.companion.heldstream import HeldStream
from rankscope.companion.hostwatch import black_box_of
from rankscope.companion.waitingrule import JobState
from rankscope.layout.placement import Layout, LayoutSource
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason, StreamId
from rankscope.record.stepselection import StepSelection, Trigger
from rankscope.record.value import ValueFlag, ValueMeta
from rankscope.run.agreements import EventBoard, Happening, Window, event_folder
from rankscope.run.folders import HELD_FOLDER, RunHeader, stream_folder, write_run_header
from rankscope.spool import ringwriter
from rankscope.spool.recordformat import StepEvent
from rankscope.spool.ringwriter import RingWriter
from rankscope.tree.assembly.header import completeness
from rankscope.tree.assembly.rankstreams import RankStream, read_stream
from rankscope.tree.assembly.sources import find_streams

STREAM = StreamId(rank=0, incarnation=0)
LIMIT = 4 << 20


DESCRIBED: dict[int, Described] = {}
"""By size: descriptions are told apart by identity."""


def meta_of(size: int) -> ValueMeta:
    return ValueMeta(
        dtype="float32",
        device="cpu",
        shape=(size,),
        global_shape=(size,),
        layout=Layout(source=LayoutSource.UNKNOWN),
        ranges=None,
    )


def asked_for(
    first: int,
    last: int,
    step: int,
    text: str,
    mode: Mode = Mode.TRAIN,
    trigger: Trigger = Trigger.WATCHED,
) -> Window:
    return Window(trigger=trigger, mode=mode, step=step, text=text, first=first, last=last)


class Rank:
    """One rank that holds steps back, in this process."""

    def __init__(
        self, run_folder: Path, steps: int, limit: int = LIMIT, rank: int = 0, life: int = 0
    ) -> None:
        self.header = header_of(run_folder, steps)
        self.stream = StreamId(rank=rank, incarnation=life)
        self.folder = stream_folder(run_folder / HELD_FOLDER, self.stream)
        board = EventBoard(event_folder(run_folder, self.header, life))
        self.writer = RingWriter(self.folder, limit_bytes=limit, steps=steps, board=board)
        self.recorder = Recorder(self.writer)
        selection = StepSelection.parse(f"last:{steps}")
        self.box = BlackBoxWatch(self.recorder, self.writer, selection, board, rank)
        self.recorder.define("rank", rank=rank, world_size=1, wall_ns=1 + life, monotonic_ns=1)
        self.root = self.recorder.define("root", **{"class": "Model"})
        self.module = self.recorder.define("module", root=self.root, path="")
        with self.recorder.never_let_go():
            call = self.recorder.enter(
                self.module, self.root, None, Mode.TRAIN, 0, None, Phase.SETUP, 0
            )
            self.value(call, "param:weight", 3, Phase.SETUP)
            self.recorder.exit(call)

    def value(self, call: int, slot: str, size: int, phase: Phase = Phase.FORWARD) -> None:
        described = DESCRIBED.setdefault(size, Described(meta=meta_of(size)))
        self.recorder.value(call, slot, described, None, phase, 0, 0)

    def step(self, step: int, calls: int, mode: Mode = Mode.TRAIN) -> None:
        """Record a step; every one has a shape of its own."""
        self.begin(step, calls, mode)
        self.recorder.step(StepEvent.END, mode, step)

    def begin(self, step: int, calls: int, mode: Mode = Mode.TRAIN) -> None:
        self.recorder.step(StepEvent.BEGIN, mode, step)
        for number in range(calls):
            call = self.recorder.enter(
                self.module, self.root, None, mode, step, 0, Phase.FORWARD, number
            )
            self.value(call, "output", 1000 + step)
            self.recorder.exit(call)

    def disk(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*.cells"))


def header_of(run_folder: Path, steps: int) -> RunHeader:
    return RunHeader(
        run_id="run",
        out=run_folder / "out",
        collector="ipc:///nowhere",
        world_size=1,
        settings={"steps": f"last:{steps}"},
    )


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, in which nothing is held for the time that a relay may take."""
    monkeypatch.setattr(ringwriter, "_GRACE_NS", 0)
    folder = tmp_path / "run"
    folder.mkdir()
    write_run_header(folder, header_of(folder, 5))
    return folder


def copied(run_folder: Path) -> RankStream:
    (source,) = find_streams([run_folder])
    return read_stream(source)


def shapes(stream: RankStream) -> Counter[tuple[int, int]]:
    """How many values each (step, size) has, by the definitions of the copy itself."""
    steps = dict(zip(stream.enters["sequence"].tolist(), stream.enters["step"].tolist()))
    values = stream.values.chosen(stream.values["phase"] == int(Phase.FORWARD))
    return Counter(
        (steps[sequence], stream.definitions[meta]["shape"][0])
        for sequence, meta in zip(values["sequence"].tolist(), values["meta"].tolist())
    )


def test_disk_stays_within_the_limit_however_long_the_job_runs(run_folder: Path):
    rank = Rank(run_folder, steps=5)
    most = 0
    for step in range(3000):
        rank.step(step, calls=20)
        most = max(most, rank.disk())
    assert most <= LIMIT * 5 // 8
    assert rank.writer.dropped_records == 0
    rank.writer.close()
    held = HeldStream(run_folder, STREAM)
    held.copy([asked_for(2994, 2999, 2999, "it happened")], is_final=True)
    assert shapes(copied(run_folder)) == {(step, 1000 + step): 20 for step in range(2994, 3000)}


def test_steps_that_do_not_fit_leave_the_last_of_them_and_say_so(run_folder: Path):
    rank = Rank(run_folder, steps=50, limit=1 << 20)
    for step in range(60):
        rank.step(step, calls=200)
        assert rank.disk() <= (1 << 20) * 5 // 8
    rank.writer.close()
    held = HeldStream(run_folder, STREAM)
    held.copy([asked_for(9, 59, 59, "it happened")], is_final=True)
    found = copied(run_folder)
    steps = sorted({step for step, _ in shapes(found)})
    assert steps == [*range(steps[0], 60)]
    assert 9 < steps[0] < 58
    assert shapes(found) == {(step, 1000 + step): 200 for step in steps}
    whole = completeness([found], [0])
    (asked,) = whole["asked"]
    assert (asked["first"], asked["last"]) == (9, 59)
    assert [lack["steps"] for lack in asked["missing"]] == [f"9-{steps[0] - 1}"]
    assert not whole["complete"]
    lack = f"train steps 9-{steps[0] - 1} are not there, which were asked for (it happened)"
    assert any(note.startswith(lack) for note in whole["ranks"][0]["notes"])


def test_of_a_job_that_ends_in_order_nothing_is_copied_until_somebody_asks(run_folder: Path):
    rank = Rank(run_folder, steps=5)
    for step in range(10):
        rank.step(step, calls=3)
    box = black_box_of(run_folder, rank.header)
    assert box is not None
    box.look(0.0, JobState.LAUNCHED, None)
    assert not list(run_folder.glob("rank*"))
    rank.writer.close()
    box.look(1.0, JobState.LAUNCHED, None)
    assert not list(run_folder.glob("rank*")), "another rank may still fail"
    box.look(2.0, JobState.OVER, None)
    assert box.is_settled and box.quiet_ranks == 1
    assert not list(run_folder.glob("rank*"))
    box.hear(Trigger.VANISHED, "a host is gone without a word")
    while not box.is_settled:
        box.look(3.0, JobState.OVER, None)
    assert not box.quiet_ranks
    found = copied(run_folder)
    assert {step for step, _ in shapes(found)} == {*range(4, 10)}
    assert found.end is EndReason.EXIT
    assert completeness([found], [0])["asked"][0]["missing"] == []


def test_a_rank_keeps_what_is_asked_for_until_the_copy_has_it(run_folder: Path):
    """The relay stands still: the ring would have been turned over many times."""
    rank = Rank(run_folder, steps=5, limit=1 << 20)
    for step in range(20):
        rank.step(step, calls=20)
    board = EventBoard(event_folder(run_folder, rank.header, 0))
    board.tell(
        Happening(trigger=Trigger.NONFINITE, mode=Mode.TRAIN, step=19, text="rank 0: not finite")
    )
    for step in range(20, 600):
        rank.step(step, calls=20)
    assert rank.writer.is_dropping
    box = black_box_of(run_folder, rank.header)
    assert box is not None
    for now in range(30):
        box.look(float(now), JobState.LAUNCHED, None)
        next(iter(box.streams.values()))._written_at = float("-inf")
    for step in range(600, 700):  # it may go on, since the copy is there
        rank.step(step, calls=20)
    assert not rank.writer.is_dropping
    rank.writer.close()
    for now in range(30, 60):
        box.look(float(now), JobState.OVER, None)
    found = copied(run_folder)
    assert {step for step, _ in shapes(found)} == {*range(14, 20)}
    assert completeness([found], [0])["asked"][0]["missing"] == []


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 40])
def test_a_step_that_is_copied_has_all_definitions_that_its_values_name(
    run_folder: Path, count: int
):
    """All steps have the same shape, so only the first of a turn defines it."""
    rank = Rank(run_folder, steps=5, limit=1 << 20)
    for step in range(4000 // count):
        rank.recorder.step(StepEvent.BEGIN, Mode.TRAIN, step)
        for number in range(count):
            call = rank.recorder.enter(
                rank.module, rank.root, None, Mode.TRAIN, step, 0, Phase.FORWARD, number
            )
            rank.value(call, "output", 7)
            rank.recorder.exit(call)
        rank.recorder.step(StepEvent.END, Mode.TRAIN, step)
    rank.writer.close()
    last = step
    held = HeldStream(run_folder, STREAM)
    held.copy([asked_for(0, last, last, "it happened")], is_final=True)
    found = copied(run_folder)
    first = min(step for step, _ in shapes(found))
    assert 0 < first < last - 5
    assert shapes(found) == {(step, 7): count for step in range(first, last + 1)}
    (asked,) = completeness([found], [0])["asked"]
    assert [lack["steps"] for lack in asked["missing"]] == [f"0-{first - 1}" if first > 1 else "0"]


def test_what_one_rank_tells_is_copied_of_all_ranks(run_folder: Path):
    ranks = [Rank(run_folder, steps=5, rank=number) for number in range(3)]
    for step in range(30):
        for rank in ranks:
            rank.step(step, calls=2)
    board = EventBoard(event_folder(run_folder, ranks[0].header, 0))
    told = Happening(
        trigger=Trigger.NONFINITE, mode=Mode.TRAIN, step=20, text="rank 1: output is not finite"
    )
    assert board.tell(told)
    assert board.was_told(told.trigger, told.text) and not board.was_told(told.trigger, "again")
    box = black_box_of(run_folder, ranks[0].header)
    assert box is not None
    for rank in ranks:
        rank.writer.close()
    box.look(0.0, JobState.OVER, None)
    for source in find_streams([run_folder]):
        found = read_stream(source)
        assert {step for step, _ in shapes(found)} == {*range(15, 21)}
        noted = found.steps[found.steps["event"] == int(StepEvent.NOTE)]
        assert noted["step"].tolist() == [20]
        text = found.definitions[int(noted["text"][0])]["text"]
        assert text == f"black box: {told.text}"


def reading(**numbers: float) -> ValueNumbers:
    plain = ValueNumbers(
        count=4, hash=1, nan=0, posinf=0, neginf=0, zero=0, min=0.0, max=1.0, mean=0.5, std=0.1,
        l2=1.0, sketch=(0.0,) * 8, samples=None, reused=False,
    )  # fmt: skip
    return plain._replace(**numbers)  # type: ignore[arg-type]  # counts are whole


def test_only_what_no_right_program_has_is_told(run_folder: Path):
    rank = Rank(run_folder, steps=5)
    board = EventBoard(event_folder(run_folder, rank.header, 0))
    step = 0

    def train(slot: str, phase: Phase, flags: int = 0, **numbers: float) -> list[str]:
        nonlocal step
        before = len(board.events())
        rank.recorder.step(StepEvent.BEGIN, Mode.TRAIN, step)
        described = DESCRIBED.setdefault(3, Described(meta=meta_of(3)))
        rank.recorder.value(1, slot, described, reading(**numbers), phase, 0, flags)
        rank.recorder.step(StepEvent.END, Mode.TRAIN, step)
        step += 1
        return [event.trigger.word for event in board.events()[before:]]

    assert not train("output", Phase.FORWARD, neginf=3), "a mask"
    assert not train("collective.0", Phase.COLLECTIVE, nan=1), "padding"
    assert not train("grad_output", Phase.BACKWARD, posinf=1), "a GradScaler may skip it"
    for flag in (ValueFlag.SKIPPED, ValueFlag.SCALED):
        assert not train("grad:weight", Phase.GRADS, int(flag), posinf=1, l2=1e9)
    for norm in (1.0, 2.0, 4.0, 8.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0):
        assert not train("grad:weight", Phase.GRADS, l2=norm)
    assert train("grad:weight", Phase.GRADS, l2=400.0) == ["spike"]
    assert train("output", Phase.FORWARD, nan=1) == ["nonfinite"]
    assert board.events()[-1].step == step - 1
    assert not train("param:weight", Phase.PARAMS, posinf=1), "what follows from it"
    for _ in range(6):
        assert not train("output", Phase.FORWARD)
    assert train("grad:weight", Phase.GRADS, nan=1) == ["nonfinite"]
    rank.writer.close()
