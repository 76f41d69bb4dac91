"""`at:FILE`: a touch while the job runs has one and the same step traced on every rank, or said."""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from rankscope.agent.steps.chosen import LEAD, TouchedFile
from rankscope.errors import SettingError
from rankscope.record.call import Mode
from rankscope.record.stepselection import StepSelection
from rankscope.run.agreements import Order, put_order, taken_orders
from rankscope.run.folders import ORDER_NAME
from rankscope.settings import settings_from
from rankscope.tree.reader import open_trace
from tests import forked
from tests.models import Two
from tests.unharmed import traced_unharmed
from tests.waiting import wait_until

# ---- ranks on paper: every interleaving there can be --------------------------------------------


class Job:
    """Ranks that step one at a time, in whatever order a test says, and look at one file."""

    def __init__(self, folder: Path, world: int) -> None:
        self.file, self.meeting = folder / "now", folder / "meeting.0"
        self.times = itertools.count(10**18, 10**6)
        self.traced: list[list[int]] = [[] for _ in range(world)]
        self.missed: list[list[int]] = [[] for _ in range(world)]
        self.steps = [0] * world
        self.failures: list[str] = []
        self.ranks = [self.rank(number) for number in range(world)]

    def rank(self, number: int) -> TouchedFile:
        def missed(mode: Mode, step: int, why: str) -> None:
            assert mode is Mode.TRAIN and "touch" in why
            self.missed[number].append(step)

        return TouchedFile(self.file, self.meeting, missed=missed, failed=self.failures.append)

    def touch(self) -> None:
        self.file.touch()
        os.utime(self.file, ns=(0, next(self.times)))

    def step(self, number: int) -> None:
        step = self.steps[number]
        self.steps[number] += 1
        if self.ranks[number].begins(Mode.TRAIN, step):
            self.traced[number].append(step)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        assert not self.failures, self.failures


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_wait_for_each_other_trace_each_touch_once_and_all_the_same_step(
    tmp_path: Path, seed: int
) -> None:
    order, job = random.Random(seed), Job(tmp_path, 4)
    slowest = order.randrange(4)
    touches = 0
    while min(job.steps) < 120:
        ready = [n for n in range(4) if job.steps[n] <= min(job.steps)]  # a collective every step
        job.step(order.choice([n for n in ready if n != slowest] or ready))
        if order.random() < 0.02 and max(job.steps) < 100 and touches == len(job.traced[slowest]):
            job.touch()
            touches += 1
    job.close()
    assert touches > 1 and all(len(traced) == touches for traced in job.traced)
    assert all(traced == job.traced[0] for traced in job.traced)
    assert job.missed == [[]] * 4


@pytest.mark.parametrize("seed", range(40))
def test_ranks_that_run_apart_all_trace_a_step_or_say_that_they_could_not(
    tmp_path: Path, seed: int
) -> None:
    order, job = random.Random(seed), Job(tmp_path, 3)
    pace = [order.choice([1, 2, 8]) for _ in range(3)]
    for _ in range(600):
        job.step(order.choices(range(3), pace)[0])
        if order.random() < 0.03:
            job.touch()
    job.close()
    every = set().union(*job.traced)
    assert every, "a job in which nothing is traced proves nothing"
    for number in range(3):
        own, missed = set(job.traced[number]), set(job.missed[number])
        begun = {step for step in every if step < job.steps[number]}
        assert begun == own | (missed & begun), f"rank {number} lost a step without a word"
        assert not own & missed
    assert all(max(Counter(traced).values(), default=1) == 1 for traced in job.traced)


def test_a_rank_that_never_sees_the_file_says_so_when_it_ends(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    elsewhere = Job(tmp_path, 0)
    elsewhere.file = tmp_path / "of-another-host"
    elsewhere.steps, elsewhere.traced, elsewhere.missed = [0], [[]], [[]]
    elsewhere.ranks = [elsewhere.rank(0)]
    job.touch()
    for _ in range(8):
        job.step(0)
        elsewhere.step(0)
    job.close()
    elsewhere.close()
    assert job.traced == [[LEAD]] and elsewhere.missed == [[LEAD]]


def test_only_touches_count_not_what_is_there_nor_what_goes_away(tmp_path: Path) -> None:
    (tmp_path / "now").touch()
    job = Job(tmp_path, 2)
    for _ in range(5):
        for number in (0, 1):
            job.step(number)
    job.file.rename(tmp_path / "kept")
    for number in (0, 1):
        job.step(number)
    (tmp_path / "kept").rename(job.file)  # back, untouched
    for _ in range(5):
        for number in (0, 1):
            job.step(number)
    assert job.traced == [[], []]
    job.file.unlink()
    job.step(0)
    job.touch()  # made anew: a touch
    for _ in range(5):
        for number in (0, 1):
            job.step(number)
    job.close()
    assert len(job.traced[0]) == 1 and job.traced[0] == job.traced[1]


# ---- orders ------------------------------------------------------------------------------------


class OrderedJob(Job):
    """The same, for orders of several steps."""

    def __init__(self, folder: Path, world: int, life: int = 0) -> None:
        self.folder, self.life = folder, life
        self.paths: list[dict[int, tuple[str, ...]]] = [{} for _ in range(world)]
        super().__init__(folder, world)

    def rank(self, number: int) -> TouchedFile:
        def missed(mode: Mode, step: int, why: str) -> None:
            assert mode is Mode.TRAIN and "the order" in why
            self.missed[number].append(step)

        return TouchedFile(
            self.folder / ORDER_NAME,
            self.folder / f"orders.{self.life}",
            missed=missed,
            failed=self.failures.append,
            is_alone=len(self.steps) == 1,
            holds_orders=True,
        )

    def order(self, steps: int, *paths: str) -> Order:
        order = Order(number=next(self.times), steps=steps, paths=paths)
        put_order(self.folder, order)
        return order

    def step(self, number: int) -> None:
        step = self.steps[number]
        super().step(number)
        if step in self.traced[number]:
            orders = self.ranks[number].orders  # two, where one was put off to steps of the next
            self.paths[number][step] = tuple(path for order in orders for path in order.paths)


@pytest.mark.parametrize("seed", range(10))
def test_ranks_that_wait_for_each_other_trace_all_steps_of_an_order(tmp_path: Path, seed: int):
    order, job = random.Random(seed), OrderedJob(tmp_path, 4)
    asked = 0
    for round_ in range(150):
        if round_ in (20, 60, 100):
            job.order(steps := order.randrange(1, 9), f"layer{round_}")
            asked += steps
        for number in order.sample(range(4), 4):
            job.step(number)
    job.close()
    assert job.missed == [[]] * 4 and len(job.traced[0]) == asked
    assert all(traced == job.traced[0] for traced in job.traced)
    assert all(paths == job.paths[0] for paths in job.paths)
    assert {*job.paths[0].values()} == {("layer20",), ("layer60",), ("layer100",)}
    taken = taken_orders(tmp_path)
    assert [each.first for each in taken] == [
        min(s for s, p in job.paths[0].items() if p == each.order.paths) for each in taken
    ]
    assert all(each.stands and each.is_over for each in taken)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_run_apart_trace_the_steps_of_an_order_or_say_that_they_could_not(
    tmp_path: Path, seed: int
):
    order, job = random.Random(seed), OrderedJob(tmp_path, 3)
    pace = [order.choice([1, 2, 8]) for _ in range(3)]
    for _ in range(600):
        job.step(order.choices(range(3), pace)[0])
        if order.random() < 0.02:
            job.order(order.randrange(1, 5))
    job.close()
    every = set().union(*job.traced)
    assert every
    for number in range(3):
        own, missed = set(job.traced[number]), set(job.missed[number])
        begun = {step for step in every if step < job.steps[number]}
        assert begun == own | (missed & begun), f"rank {number} lost a step without a word"
        assert not own & missed


def test_an_order_that_is_none_is_passed_over(tmp_path: Path):
    job = OrderedJob(tmp_path, 2)
    for text in (
        "",
        "[]",
        '{"number": 1}',
        '{"number": 1, "steps": -3, "paths": [], "tensors": []}',
        "[" * 9999,
    ):
        (tmp_path / ORDER_NAME).write_text(text)
        os.utime(tmp_path / ORDER_NAME, ns=(0, next(job.times)))
        for _ in range(5):
            job.step(0), job.step(1)
    job.close()
    assert job.traced == job.missed == [[], []]


# ---- the setting -------------------------------------------------------------------------------


def test_parts_of_steps_combine(tmp_path: Path) -> None:
    steps = StepSelection.parse(f"0-2, every:100,at:{tmp_path}/now,7")
    assert [step for step in range(250) if step in steps] == [0, 1, 2, 7, 100, 200]
    assert steps.file == tmp_path / "now" and not steps.is_over(10**9)
    again = settings_from({"steps": steps.text}, {}).steps
    assert again == steps, "as written into a trace, and handed to ranks"


def test_a_relative_file_is_made_whole_where_it_is_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert StepSelection.parse("at:now").text == f"at:{tmp_path}/now"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("at:", "wants the file"),
        ("at:.", "is a folder; name a file"),
        ("at:/nowhere/at/all", "make it first"),
        ("at:a,at:b", "names two files"),
        ("0-2,every:0", "positive number"),
        ("0-2,tomorrow", "write 0-2,10 or every:100"),
    ],
)
def test_what_cannot_be_touched_or_read_is_refused_with_what_to_write(text, words) -> None:
    with pytest.raises(SettingError, match=words):
        StepSelection.parse(text)


@pytest.mark.parametrize("text", ["every:2", "at:now", "0-1,all"])
def test_ranks_are_ranges_and_not_steps(text: str) -> None:
    with pytest.raises(SettingError, match="write ranks as 0-3,8 or all"):
        settings_from({"ranks": text}, {})


# ---- real ranks --------------------------------------------------------------------------------


def test_touching_a_file_of_one_process_traces_that_very_step_and_harms_nothing(
    tmp_path: Path,
) -> None:
    file = tmp_path / "now"

    def program() -> object:
        model = Two(4, 2)
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(9):
            if step in (3, 6):
                file.unlink(missing_ok=True)
                file.touch()
            optimizer.zero_grad()
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
        return model, optimizer

    trace = traced_unharmed(program, tmp_path / "trace", steps=f"at:{file}")
    assert [step.step for step in trace.steps] == [3, 6]


SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
os.chdir("/")
progress = os.open(os.environ["PROGRESS"], os.O_WRONLY | os.O_CREAT)
for step in range(10**9):
    model(torch.ones(2, 4)).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        os.pwrite(progress, b"%9d" % step, 0)
    done = torch.tensor(float(os.path.exists(os.environ["ENOUGH"])))
    dist.all_reduce(done)
    if done:
        break
    time.sleep(0.005)
dist.destroy_process_group()
"""


@pytest.mark.launch
@pytest.mark.parametrize("collector", [[], ["--rs-collector", "shared"]])
def test_a_touch_from_outside_reaches_a_job_of_rankscope_run(
    tmp_path: Path, collector: list[str]
) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    progress, enough = tmp_path / "progress", tmp_path / "enough"

    def has_begun(step: int) -> bool:
        return progress.exists() and int(progress.read_bytes() or -1) >= step

    command = [
        sys.executable, "-m", "rankscope", "run", "--rs-out", "trace", "--rs-steps", "at:now",
        *collector, "--nproc-per-node", "2", "job.py",
    ]  # fmt: skip
    job = forked.Popen(
        command, cwd=tmp_path, env={**os.environ, "PROGRESS": str(progress), "ENOUGH": str(enough)}
    )
    try:
        assert wait_until(lambda: has_begun(5))
        for _ in range(2):  # what a rank sees at once is one touch
            (tmp_path / "now").touch()
            touched = int(progress.read_bytes())
            assert wait_until(lambda step=touched + 2 * (LEAD + 1): has_begun(step))
        enough.touch()
        assert job.wait(120) == 0
    finally:
        job.kill()
        job.wait()
    trace = open_trace(tmp_path / "trace")
    assert trace.is_complete and len(trace.steps) == 2
    assert all(node.ranks == (0, 1) for step in trace.steps for node in step.walk())
