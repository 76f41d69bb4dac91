"""A schedule: a job and the faults it meets, drawn from a seed, played, and judged."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.soak.asked import Asked
from tests.lab.soak.disks import can_mount
from tests.lab.soak.faults import KINDS, Fault, Kind, kind_of, nothing
from tests.lab.soak.job import Job, Shape
from tests.lab.soak.oracle import Findings, accounts, compare

__all__ = ["Outcome", "Schedule", "draw", "play"]

_JOB_S = 4.0
_STEPS_PER_S = 18
_READ_JOB_S = 7.0
_BEGIN_S = 120.0
_MOST_JOB_S = 240.0
_MOST_END_S = 90.0
_MOST_LEAVE_S = 60.0
_GONE_S = 3.0
_WITHOUT_GLOO = {"launcher killed", "ranks restarted"}
"""The store dies with the launcher; gloo may fail to connect in a restart, whoever watches."""
_LOOK_S = 0.1
_NOTHING = "nothing happened"
_SLOW_S = 30.0
LATEST_END_S = 60.0
"""After the last fault, or after the last rank where that ended later, the tree has to be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A job and its faults."""

    seed: int
    shape: Shape
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        return " + ".join(
            f"{fault.name} at "
            + (f"{fault.at_s:.1f}" if fault.at_step is None else f"step {fault.at_step}")
            + (f" for {fault.lasts_s:.1f}" if fault.lasts_s else "")
            for fault in self.faults
        )


@dataclass
class Outcome:
    """What came of a schedule."""

    schedule: Schedule
    findings: Findings = field(default_factory=Findings)
    end_s: float = 0.0
    """From the last fault, or the last rank's end, to the tree."""
    leave_s: float = 0.0
    """From then until no process of the job was left."""
    how: str = ""
    """`tree`, `recover`, or what went wrong."""
    late: int = 0
    """Calls and values that only the command brought in that `verify` prints; of a job that holds
    its last steps back, steps that only `recover` brought in."""
    troubles: list[str] = field(default_factory=list)

    @property
    def is_worth_a_look(self) -> bool:
        return not self.is_right or self.end_s > _SLOW_S

    @property
    def is_right(self) -> bool:
        was_played = self.findings.calls > 0 or self.how == _NOTHING
        return not self.troubles and self.findings.is_right and was_played


def kinds_here() -> list[str]:
    """Return the faults that can be had on this machine."""
    return [
        name
        for name, kind in KINDS.items()
        if can_mount() or not (kind.trace_disk or kind.spool_disk or "clock" in name)
    ]


def draw(seed: int, *, is_mixed: bool) -> Schedule:
    """Draw a schedule: the same seed gives the same one, on a machine with the same rights.

    Single faults go through all kinds in turn. Every other job holds its last steps back.
    """
    chosen = random.Random(f"{seed} {is_mixed}")
    names = kinds_here()
    is_last = (seed if is_mixed else seed + seed // len(names)) % 2 == 0
    if is_mixed:
        while True:
            picked = [chosen.choice(names) for _ in range(chosen.randint(2, 5))]
            if _is_possible([KINDS[name] for name in picked]):
                break
    else:
        picked = [names[seed % len(names)]]
    kinds = [KINDS[name] for name in picked]
    way = chosen.choice([w for w in ("direct", "launched") if all(w in k.ways for k in kinds)])
    transports = [
        t for t in KINDS["rank killed"].transports if all(t in k.transports for k in kinds)
    ]
    has_reader = any(kind.has_reader for kind in kinds) or chosen.random() < 0.2
    seconds = _READ_JOB_S if has_reader else _JOB_S
    restarts = max(kind.restarts for kind in kinds)
    steps = int(seconds * _STEPS_PER_S)
    ranks = chosen.choice([2, 3]) if way == "direct" else 2
    nan = chosen.randint(5, steps - 10), chosen.randrange(ranks)
    shape = Shape(
        way=way,
        transport="own" if way == "launched" else chosen.choice(transports),
        ranks=ranks,
        steps=steps,
        ends=next((kind.ends for kind in kinds if kind.ends), "exit"),
        gloo=way == "launched" and not {*picked} & _WITHOUT_GLOO and chosen.random() < 0.5,
        restarts=restarts,
        trace_disk=next((kind.trace_disk for kind in kinds if kind.trace_disk), ""),
        spool_disk=next((kind.spool_disk for kind in kinds if kind.spool_disk), ""),
        pause_ms=45,
        parquet=has_reader,
        spool_mebibytes=chosen.choice([2, 8]),
        last=chosen.randint(2, 8) if is_last else 0,
        nans=(nan,) if is_last else (),
        hosts=max(kind.hosts for kind in kinds),
        finish_seconds=20.0 if any(kind.stays or kind.hosts > 1 for kind in kinds) else 60.0,
    )
    faults = []
    for name, kind in zip(picked, kinds):
        first = 3.5 if kind.has_reader else 0.1
        last = seconds - 0.5 if kind.has_reader or "rank" in name else seconds + 1.0
        faults.append(
            Fault(
                name=name,
                at_s=chosen.uniform(first, last),
                lasts_s=chosen.uniform(*kind.lasts_s),
                seed=chosen.randrange(1 << 30),
                at_step=_stage(chosen, nan[0], steps) if is_last and "full" in name else None,
            )
        )
    return Schedule(seed=seed, shape=shape, faults=tuple(faults))


def _stage(chosen: random.Random, happens: int, steps: int) -> int | None:
    """Return a step before, at, or after the one in which something happens, or at the end; None
    for any time."""
    before, at = (max(1, happens - 15), happens - 3), (happens - 2, happens + 1)
    after, end = (happens + 2, happens + 15), (steps - 4, steps - 1)
    first, last = chosen.choice([before, at, after, end])
    return min(steps - 1, chosen.randint(first, max(first, last)))


def _is_possible(kinds: list[Kind]) -> bool:
    """True where one job can have all of them."""
    ways = {w for w in ("direct", "launched") if all(w in kind.ways for kind in kinds)}
    transports = set(KINDS["rank killed"].transports)
    for kind in kinds:
        transports &= {*kind.transports}
    if ways == {"launched"}:
        transports &= {"own"}
    disks = [
        {getattr(kind, what) for kind in kinds} - {""} for what in ("trace_disk", "spool_disk")
    ]
    once = [kind for kind in kinds if kind.before is not nothing or kind.ends or kind.restarts]
    if any(kind.hosts > 1 for kind in kinds):
        ways &= {"direct"}
    return bool(ways and transports) and all(len(one) < 2 for one in disks) and len(once) < 2


def play(schedule: Schedule, folder: Path, *, keep: bool = False) -> Outcome:
    """Run a job with its faults, wait for its end, hold its trace to what the programs wrote."""
    outcome = Outcome(schedule)
    job = Job(folder / f"{schedule.seed}", schedule.shape, schedule.seed)
    is_kept = keep
    try:
        last = _play(job, schedule, outcome)
        _judge(job, schedule, outcome, last)
        is_kept = keep and outcome.is_worth_a_look
    except Exception as error:  # one schedule that fails is a row of the table
        outcome.how = "failed"
        outcome.troubles.append(f"{type(error).__name__}: {error}")
    finally:
        job.close(keep=is_kept)
    return outcome


def _play(job: Job, schedule: Schedule, outcome: Outcome) -> float:
    """Run the job and its faults; return when the last fault was over and the last rank gone."""
    for fault in schedule.faults:
        kind_of(fault).before(job, random.Random(fault.seed))
    job.start()
    deadline = time.monotonic() + _BEGIN_S
    while not job.has_begun():
        if time.monotonic() > deadline:
            raise TimeoutError("the ranks did not begin")
        job.tend()
        time.sleep(_LOOK_S)
    began = time.monotonic()
    waiting = [
        (began + fault.at_s, "inject", fault) for fault in schedule.faults if fault.at_step is None
    ]
    of_steps = [fault for fault in schedule.faults if fault.at_step is not None]
    healing: list[Fault] = []
    last, ended_at, is_marked = began, 0.0, False
    while True:
        now = time.monotonic()
        step = job.step() if of_steps else -1
        due = [f for f in of_steps if step >= (f.at_step or 0) or ended_at]
        of_steps = [fault for fault in of_steps if fault not in due]
        waiting += [(now, "inject", fault) for fault in due]
        for event in sorted(waiting, key=lambda one: one[0]):
            at, what, fault = event
            has_others = any(not kind_of(one).waits_for_builder for _, _, one in waiting)
            if at > now or (what == "heal" and kind_of(fault).waits_for_builder and has_others):
                continue
            waiting.remove(event)
            kind, chosen = kind_of(fault), random.Random(fault.seed)
            if what == "heal":
                kind.heal(job, chosen)
            else:
                kind.inject(job, chosen)
                if kind.heals_after_job:
                    healing.append(fault)
                elif fault.lasts_s:
                    waiting.append((time.monotonic() + fault.lasts_s, "heal", fault))
            last = time.monotonic()
        job.tend()
        is_over = not any(what == "inject" for _, what, _ in waiting) and job.are_ranks_over()
        if is_over and not ended_at:
            ended_at = time.monotonic()
            waiting += [(ended_at + fault.lasts_s, "heal", fault) for fault in healing]
            healing = []
        if ended_at and not is_marked and job.is_program_over():
            job.mark_over()
            is_marked = True
        if ended_at and not waiting and not of_steps:
            return max(last, ended_at)
        if now - began > _MOST_JOB_S:
            raise TimeoutError("the ranks did not end")
        time.sleep(_LOOK_S)


def _judge(job: Job, schedule: Schedule, outcome: Outcome, last: float) -> None:
    left_at = 0.0
    while not job.has_tree() and time.monotonic() - last < _MOST_END_S:
        if job.is_program_over():
            job.mark_over()
        if job.has_left():
            if left_at and time.monotonic() - left_at > _GONE_S:
                break
            left_at = left_at or time.monotonic()
        else:
            left_at = 0.0
        job.tend()
        time.sleep(_LOOK_S)
    outcome.end_s = time.monotonic() - last
    may = any(kind_of(fault).may_need_recover for fault in schedule.faults)
    trace, outcome.how = job.out, "tree"
    has_tree, said_nothing = job.has_tree(), job.has_said_nothing_happened()
    if not has_tree and not schedule.shape.last:
        _make_room(job, schedule)
        trace, said = job.recover()
        outcome.how = "recover"
        if not (trace / "trace.json").exists():
            outcome.how = "no tree"
            outcome.troubles.append(f"no tree: {said.strip()[-300:]}")
            return
        if not may:
            outcome.troubles.append("a tree by recover alone")
    if outcome.end_s > LATEST_END_S:
        outcome.troubles.append(f"the end came {outcome.end_s:.0f} s after the last fault")
    left = time.monotonic()
    while not job.has_left() and time.monotonic() - left < _MOST_LEAVE_S:
        job.mark_over()
        job.tend()
        time.sleep(_LOOK_S)
    outcome.leave_s = time.monotonic() - left
    if not job.has_left():
        roles = [
            role for role in ("launcher", "rank", "relay", "collector", "reader") if job.pids(role)
        ]
        outcome.troubles.append(f"still there after {outcome.leave_s:.0f} s: {', '.join(roles)}")
    if schedule.shape.last:
        _judge_last(job, schedule, outcome, may, said_nothing)
        return
    untraced = job.untraced()
    outcome.findings = compare(trace, accounts(job.accounts), untraced)
    if outcome.how == "tree" and outcome.findings.lost and not outcome.findings.is_complete:
        _make_room(job, schedule)
        better = job.follow_advice()
        if better is None and schedule.shape.hosts > 1:  # it names the other host, not its folder
            better, _ = job.recover()
        if better is not None and (better / "trace.json").exists():
            outcome.late, outcome.how = outcome.findings.lost, "tree, then recover"
            outcome.findings = compare(better, accounts(job.accounts), untraced)
    with contextlib.suppress(OSError):
        if outcome.how == "tree" and outcome.findings.is_complete and job.run_folders():
            outcome.troubles.append("the run folder is still there")


def _make_room(job: Job, schedule: Schedule) -> None:
    for fault in schedule.faults:
        if kind_of(fault).stays:
            for disk in job.disks.values():
                disk.make_room()


def _judge_last(
    job: Job, schedule: Schedule, outcome: Outcome, may: bool, said_nothing: bool
) -> None:
    """Hold the trace of a job that holds its last steps back to what was asked for; then what
    `recover` makes of all that is left."""
    told, untraced = accounts(job.accounts), job.untraced()
    last, troubles = schedule.shape.last, outcome.troubles
    first: Findings | None = None
    if job.has_tree():
        first = outcome.findings = compare(job.out, told, untraced, last=last)
        verified, _ = job.rankscope("verify", str(job.out))
        checked, _ = job.rankscope("check", str(job.out))
        if bool(verified) == first.is_complete:
            troubles.append(f"complete: {first.is_complete}, and verify ends with {verified}")
        if not first.is_complete and checked == 0:
            troubles.append("incomplete, and check says clean")
        if not first.named and not first.lost:
            if first.is_complete and any(folder.is_dir() for folder in job.run_folders()):
                troubles.append("the run folder is still there")
            return
    elif said_nothing and not any(Asked({}, told, last).steps(one) for one in told):
        outcome.how = _NOTHING  # as where the rank never started that would have seen something
        return
    elif said_nothing:
        troubles.append("nothing happened, it says, and there is no trace")
    _make_room(job, schedule)
    trace, said = job.recover()
    if not (trace / "trace.json").exists():
        if first is None:
            outcome.how = "no tree"
            troubles.append(f"no tree: {said.strip()[-300:]}")
        else:
            _hold_to_own(first, troubles)
        return
    second = compare(trace, told, untraced, last=last)
    outcome.how = "recover" if first is None else "tree, then recover"
    if first is None:
        outcome.findings = second
        if not may:
            troubles.append("a tree by recover alone")
    else:
        outcome.late = second.there - first.there
        first.lost += second.lost
        first.false += second.false
        first.examples += [f"by recover: {one}" for one in second.examples]
    _hold_to_own(second, troubles)


def _hold_to_own(found: Findings, troubles: list[str]) -> None:
    """Nothing may be gone that its rank had to hold: of what it saw itself, only what a full disk
    had no room for."""
    gone = [one for one in found.own_named if "it dropped records" not in one[1]]
    if gone:
        troubles.append(f"removed: {len(gone)} steps of a rank's own, as {gone[0]}")
