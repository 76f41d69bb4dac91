"""What a rank holds back stays within its bounds, and is copied whole, each record once."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from rankscope.agent.blackboxwatch import BlackBoxWatch
from rankscope.agent.recorder import Recorder
from rankscope.capture.describe import Described
from rankscope.capture.reading import ValueNumbers
from rankscope.companion import heldstream
from rankscope.companion.blackbox import black_box_of
from rankscope.companion.heldstream import HeldStream
from rankscope.companion.waitingrule import JobState
from rankscope.layout.placement import Layout, LayoutSource
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason, StreamId
from rankscope.record.stepselection import StepSelection, Trigger
from rankscope.record.value import ValueFlag, ValueMeta
from rankscope.run.agreements import EventBoard, Happening, Window, event_folder
from rankscope.run.filenames import HELD_FOLDER
from rankscope.run.folders import RunHeader, stream_folder, write_run_header
from rankscope.spool import ringwriter
from rankscope.spool.recordformat import StepEvent
from rankscope.spool.ringwriter import RingWriter
from rankscope.spool.streamreader import StreamReader
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


def test_a_copy_that_is_taken_up_again_and_again_has_every_record_once(run_folder: Path):
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    rank = Rank(run_folder, steps=5, limit=32 << 20)
    windows: list[Window] = []
    wanted: set[int] = set()
    held = HeldStream(run_folder, STREAM)
    for step in range(200):
        rank.begin(step, calls=chance.randrange(1, 60))
        if chance.random() < 0.05:
            windows.append(asked_for(step - 5, step + chance.randrange(3), step, "x"))
            wanted |= {*range(max(0, windows[-1].first), windows[-1].last + 1)}
        for _ in range(chance.randrange(3)):
            held.copy(windows, is_final=False)
        if chance.random() < 0.3:  # a relay was killed: what it had not put in its place is gone
            held.close()
            held = HeldStream(run_folder, STREAM)
        if chance.random() < 0.1:
            held._written_at = float("-inf")
        rank.recorder.step(StepEvent.END, Mode.TRAIN, step)
    rank.writer.close()
    while held.copy(windows, is_final=True):
        pass
    if not windows:
        return
    found = copied(run_folder)
    expected = {step for step in wanted if step < 200}
    assert {step for step, _ in shapes(found)} == expected, seed
    of_forward = found.enters[found.enters["phase"] == int(Phase.FORWARD)]
    assert len({*of_forward["sequence"].tolist()}) == len(of_forward), seed
    assert Counter(of_forward["step"].tolist()) == Counter(
        {step: count for (step, _), count in shapes(found).items()}
    )
    assert len(found.exits) == len(found.enters) == len(found.values), seed
    assert found.end is EndReason.EXIT
    assert found.dropped == 0


def test_a_step_that_is_read_in_pieces_is_copied_whole_when_the_ring_is_read_again(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(heldstream, "_READ_BYTES", 4096)
    rank = Rank(run_folder, steps=30)
    for step in range(30):
        rank.step(step, calls=40)
    held = HeldStream(run_folder, STREAM)
    windows = [asked_for(20, 22, 22, "late")]
    while held.copy(windows, is_final=False):
        pass
    windows.append(asked_for(5, 7, 7, "early"))
    rank.writer.close()
    while held.copy(windows, is_final=True):
        pass
    expected = {(step, 1000 + step): 40 for step in (5, 6, 7, 20, 21, 22)}
    assert shapes(copied(run_folder)) == expected


@pytest.mark.parametrize("lets_go", [False, True])
def test_eval_steps_before_training_are_copied_beside_train_steps(run_folder: Path, lets_go: bool):
    rank = Rank(run_folder, steps=2, limit=1 << 20)
    for step in range(4):
        rank.step(step, calls=20, mode=Mode.EVAL)
    for step in range(600 if lets_go else 10):
        rank.step(step, calls=20)
    rank.writer.close()
    last = 599 if lets_go else 9
    held = HeldStream(run_folder, STREAM)
    windows = [
        asked_for(0, 2, 2, "eval", mode=Mode.EVAL, trigger=Trigger.NONFINITE),
        asked_for(last - 2, last, last, "train", trigger=Trigger.NONFINITE),
    ]
    while held.copy(windows, is_final=True):
        pass
    found = copied(run_folder)
    modes = {(int(row["mode"]), int(row["step"])) for row in found.enters if row["phase"]}
    train = {(0, step) for step in range(last - 2, last + 1)}
    assert modes - {(0, 0)} == train | (set() if lets_go else {(1, 0), (1, 1), (1, 2)})
    missing = [event["missing"] for event in completeness([found], [0])["asked"]]
    assert [[lack["steps"] for lack in each] for each in missing] == [
        ["0-2"] if lets_go else [],
        [],
    ]


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


def test_what_could_not_be_told_is_copied_all_the_same(run_folder: Path):
    """The disk took no entry of the board: a file stands where its folder should be."""
    rank = Rank(run_folder, steps=5, limit=1 << 20)
    folder = event_folder(run_folder, rank.header, 0)
    folder.touch()
    for step in range(20):
        rank.step(step, calls=20)
    rank.box.tell(Trigger.NONFINITE, Mode.TRAIN, 19, slot="output")
    for step in range(20, 600):
        rank.step(step, calls=20)
    rank.writer.close()
    box = black_box_of(run_folder, rank.header)
    assert box is not None
    box.look(0.0, JobState.OVER, None)
    assert not box.is_settled and "File exists" in box.trouble
    folder.unlink()
    for now in range(1, 30):
        box.look(float(now), JobState.OVER, None)
    assert box.is_settled and not box.quiet_ranks
    found = copied(run_folder)
    assert {step for step, _ in shapes(found)} == {*range(14, 20)}


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


def test_copies_of_two_lives_in_which_the_same_happened_are_told_apart(run_folder: Path):
    origins = set()
    for life in range(2):
        rank = Rank(run_folder, steps=5, life=life)
        for step in range(20):
            rank.step(step, calls=2)
        rank.writer.close()
        board = EventBoard(event_folder(run_folder, rank.header, life))
        board.tell(
            Happening(
                trigger=Trigger.NONFINITE, mode=Mode.TRAIN, step=19, text="rank 0: not finite"
            )
        )
        box = black_box_of(run_folder, rank.header)
        assert box is not None
        box.look(0.0, JobState.OVER, None)
        assert box.is_settled
        with StreamReader(stream_folder(run_folder, rank.stream)) as reader:
            origins.add(reader.origin())
    assert len(origins) == 2


@pytest.mark.parametrize("first", ["nothing", "all but the end"])
def test_a_copy_whose_end_finds_no_room_is_whole_once_there_is(run_folder: Path, first: str):
    """A file stands where its segments are drafted."""
    rank = Rank(run_folder, steps=5)
    for step in range(20):
        rank.step(step, calls=3)
    board = EventBoard(event_folder(run_folder, rank.header, 0))
    board.tell(
        Happening(trigger=Trigger.NONFINITE, mode=Mode.TRAIN, step=19, text="rank 0: not finite")
    )
    box = black_box_of(run_folder, rank.header)
    assert box is not None
    if first != "nothing":
        box.look(0.0, JobState.LAUNCHED, None)
        next(iter(box.streams.values()))._written_at = float("-inf")
        box.look(1.0, JobState.LAUNCHED, None)
        assert find_streams([run_folder])
    rank.writer.close()
    draft = stream_folder(run_folder, STREAM) / "draft"
    draft.parent.mkdir(exist_ok=True)
    draft.touch()
    for now in (2.0, 3.0):
        box.look(now, JobState.OVER, None)
        assert not box.is_settled and box.trouble_at == 2.0
    draft.unlink()
    box.look(4.0, JobState.OVER, None)
    assert box.is_settled and box.trouble_at is None
    found = copied(run_folder)
    assert {step for step, _ in shapes(found)} == {*range(14, 20)}
    assert found.end is EndReason.EXIT
    assert completeness([found], [0])["asked"][0]["missing"] == []


def test_a_copy_that_fails_keeps_no_other_from_being_made(run_folder: Path):
    ranks = [Rank(run_folder, steps=5, rank=number) for number in range(2)]
    for rank in ranks:
        for step in range(20):
            rank.step(step, calls=2)
        rank.writer.close()
    board = EventBoard(event_folder(run_folder, ranks[0].header, 0))
    board.tell(
        Happening(trigger=Trigger.NONFINITE, mode=Mode.TRAIN, step=19, text="rank 0: not finite")
    )
    folder = stream_folder(run_folder, ranks[0].stream)
    folder.mkdir()
    (folder / "draft").touch()
    box = black_box_of(run_folder, ranks[0].header)
    assert box is not None
    box.look(0.0, JobState.OVER, None)
    assert not box.is_settled and "File exists" in box.trouble
    found = copied(run_folder)
    assert found.stream == ranks[1].stream
    assert {step for step, _ in shapes(found)} == {*range(14, 20)}


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


def test_a_rank_that_is_killed_between_its_records_is_copied_as_far_as_it_came(run_folder: Path):
    child = os.fork()
    if not child:
        rank = Rank(run_folder, steps=5)
        for step in range(20):
            rank.step(step, calls=4)
        rank.begin(20, calls=2)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    box = black_box_of(run_folder, header_of(run_folder, 5))
    assert box is not None
    box.look(0.0, JobState.OVER, None)
    assert box.is_settled
    found = copied(run_folder)
    expected = {(step, 1000 + step): 4 for step in range(15, 20)} | {(20, 1020): 2}
    assert shapes(found) == expected
    assert found.end is EndReason.LOST
    setup = found.enters[found.enters["phase"] == int(Phase.SETUP)]
    assert len(setup) == 1


def test_an_ordinary_recorder_keeps_everything_anyway(tmp_path: Path):
    writer = ringwriter.SpoolWriter(tmp_path / "rank00000.0", limit_bytes=1 << 20)
    with Recorder(writer).never_let_go():
        pass
    writer.close()


def test_entries_on_the_board_are_agreed_upon_by_whoever_comes_first(tmp_path: Path):
    boards = [EventBoard(tmp_path / "events.0") for _ in range(2)]
    assert [board.first_time(time) for board, time in zip(boards, (5, 7))] == [5, 5]
    events = [
        Happening(trigger=Trigger.TOUCHED, mode=Mode.EVAL, step=number, text=f"a b {number}")
        for number in range(4)
    ]
    for number, event in enumerate(events):
        assert boards[number % 2].tell(event)
    assert boards[0].events() == boards[1].events() == events


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


def test_a_step_that_did_not_fit_long_ago_is_no_gap_up_to_the_end(run_folder: Path):
    child = os.fork()
    if not child:
        rank = Rank(run_folder, steps=5, limit=2 << 20)
        for step in range(30):
            rank.step(step, calls=20_000 if step == 20 else 20)
        os._exit(0 if rank.writer.dropped_records else 9)
    assert os.waitpid(child, 0)[1] == 0
    held = HeldStream(run_folder, STREAM)
    held.copy([asked_for(24, 29, 29, "it happened")], is_final=True)
    found = copied(run_folder)
    assert {step for step, _ in shapes(found)} == {*range(24, 30)}
    assert found.end is EndReason.LOST
    assert not len(found.gaps)
    assert found.full_from is None
