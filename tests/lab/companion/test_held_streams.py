"""Copies of what ranks hold back: read in pieces, again, of other lives, and that fail."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from rankscope.agent.recorder import Recorder
from rankscope.companion import heldstream
from rankscope.companion.heldstream import HeldStream
from rankscope.companion.hostwatch import black_box_of
from rankscope.companion.waitingrule import JobState
from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.record.ranks import EndReason
from rankscope.record.stepselection import Trigger
from rankscope.run.agreements import EventBoard, Happening, Window, event_folder
from rankscope.run.folders import stream_folder
from rankscope.spool import ringwriter
from rankscope.spool.recordcolumns import StreamReader
from rankscope.spool.recordformat import StepEvent
from rankscope.tree.assembly.header import completeness
from rankscope.tree.assembly.sources import find_streams
from tests.companion.test_held_streams import (
    STREAM,
    Rank,
    asked_for,
    copied,
    header_of,
    shapes,
)
from tests.companion.test_held_streams import run_folder as run_folder


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
