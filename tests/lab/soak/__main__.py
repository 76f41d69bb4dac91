"""`python -m tests.lab.soak --single 200 --mixed 200 --seed 1`: fault schedules, and a table of
them.

Each row is a job that met one fault, or several. Nothing may be lost or doubled, and the tree has
to be there 60 s after the last fault. Of a job that holds its last steps back (`last:N`) what was
asked for has to be there, or the trace has to name it. The same seed plays the same schedules.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from tests.lab.soak.blackbox import draw_black_box
from tests.lab.soak.disks import can_mount, in_namespace
from tests.lab.soak.faults import CAUSES
from tests.lab.soak.hosts import draw_hosts, play_hosts
from tests.lab.soak.job import kill_all, start_nothing_more
from tests.lab.soak.network import can_have_hosts, name_hosts
from tests.lab.soak.schedule import Outcome, draw, play

_MOST_HOSTS = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.soak", description=__doc__)
    parser.add_argument("--single", type=int, default=0, help="schedules of one fault")
    parser.add_argument("--mixed", type=int, default=0, help="schedules of two to five faults")
    parser.add_argument("--hosts", type=int, default=0, help="jobs on three hosts, one fault each")
    parser.add_argument("--blackbox", type=int, default=0, help="what has lost last steps")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule of either sort")
    parser.add_argument("--at-once", type=int, default=4, help="jobs side by side")
    parser.add_argument("--keep", type=Path, help="new folder; keep what failed, or took long")
    parser.add_argument("--log", type=Path, help="append one JSON object per schedule")
    given = parser.parse_args()
    in_namespace("tests.lab.soak")
    if not can_mount():
        print("no right to mount, or no mkfs.ext4: no faults of disks and clocks", file=sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix="soak-")) if given.keep is None else given.keep
    folder.mkdir(exist_ok=True)
    if given.hosts and not can_have_hosts():
        parser.error("--hosts needs the right to make network namespaces, and the command ip")
    wanted = [(n, False) for n in range(given.seed, given.seed + given.single)]
    wanted += [(n, True) for n in range(given.seed, given.seed + given.mixed)]
    if can_have_hosts():
        name_hosts(folder, _MOST_HOSTS)
    outcomes = []
    signal.signal(signal.SIGTERM, lambda *_: end_all(folder))
    with ThreadPoolExecutor(given.at_once) as pool:
        waiting = [
            pool.submit(
                play,
                draw(seed, is_mixed=is_mixed),
                folder / ("mixed" if is_mixed else "single"),
                keep=given.keep is not None,
            )
            for seed, is_mixed in wanted
        ]
        waiting += [
            pool.submit(play_hosts, draw_hosts(seed), folder / "hosts", keep=given.keep is not None)
            for seed in range(given.seed, given.seed + given.hosts)
        ]
        waiting += [
            pool.submit(
                play, draw_black_box(seed), folder / "blackbox", keep=given.keep is not None
            )
            for seed in range(given.seed, given.seed + given.blackbox)
        ]
        for done in as_completed(waiting):
            outcome = done.result()
            outcomes.append(outcome)
            if not outcome.is_right:
                print(line(outcome), flush=True)
            if given.log is not None:
                with given.log.open("a") as file:
                    file.write(json.dumps(asdict(outcome), default=list) + "\n")
    print(table(outcomes))
    if given.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(outcome.is_right for outcome in outcomes) else 1


def end_all(folder: Path) -> None:
    """End every process of every job, then this one: nothing is left behind."""
    start_nothing_more()
    time.sleep(0.2)
    kill_all(folder)
    os._exit(1)


def line(outcome: Outcome) -> str:
    """Return what is said of one schedule."""
    found, shape = outcome.findings, outcome.schedule.shape
    sort = "mixed" if len(outcome.schedule.faults) > 1 else "single"
    sort = "blackbox" if is_black_box(outcome) else sort
    held = f", last:{shape.last}, {found.asked} asked, {found.there} there, {found.named} named"
    held += f", {found.false} false" if found.false else ""
    return (
        f"{sort} {outcome.schedule.seed} ({shape.way}, {shape.transport}, {shape.ranks} ranks"
        f"{f' on {shape.hosts} hosts' if shape.hosts > 1 else ''}{held if shape.last else ''}): "
        f"{outcome.schedule.name}: {outcome.how} after {outcome.end_s:.1f} s; {found.calls} calls, "
        f"{found.lost} lost, {found.doubled} doubled, {found.invented} invented, "
        f"{found.wrong} wrong, {found.dropped} dropped; "
        + "; ".join([*outcome.troubles, *found.examples])
    )


def is_black_box(outcome: Outcome) -> bool:
    return outcome.schedule.faults[0].name in CAUSES


def row_of(outcome: Outcome) -> str:
    """Return the row of the table that a schedule belongs to."""
    faults, shape = outcome.schedule.faults, outcome.schedule.shape
    if not is_black_box(outcome):
        name = faults[0].name if len(faults) == 1 else "several faults"
        return f"{name}, last:N" if shape.last else name
    where = f"{shape.hosts} hosts" if shape.hosts > 1 else "1 host"
    return f"{faults[0].name}, {where}{', launched' if shape.way == 'launched' else ''}"


def table(outcomes: list[Outcome]) -> str:
    """Return a table: what was done, how often, what became of it."""
    rows: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in sorted(outcomes, key=row_of):
        rows[row_of(outcome)].append(outcome)
    rows["all"] = outcomes
    sums = ("calls", "lost", "doubled", "wrong", "dropped", "asked", "there", "named", "false")
    lines = [
        f"| fault | jobs | {' | '.join(sums)} | falsely complete | by recover | last | failed |",
        "|---" * (len(sums) + 6) + "|",
    ]
    for name, those in rows.items():
        found = [one.findings for one in those]
        cells = [
            len(those),
            *(sum(getattr(one, what) for one in found) for what in sums),
            sum(one.is_falsely_complete for one in found),
            sum(one.late for one in those),
            f"{max((one.end_s for one in those), default=0):.1f} s",
            sum(not one.is_right for one in those),
        ]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
