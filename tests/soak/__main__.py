"""`python -m tests.soak --single 200 --mixed 200 --seed 1`: fault schedules, and a table of them.

Each row is a job that met one fault, or several. Nothing may be lost or doubled, and the tree has
to be there 60 s after the last fault. The same seed plays the same schedules.
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

from tests.soak.disks import can_mount, in_namespace
from tests.soak.hosts import can_have_hosts, draw_hosts, play_hosts
from tests.soak.job import kill_all, start_nothing_more
from tests.soak.schedule import Outcome, draw, play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--single", type=int, default=0, help="schedules of one fault")
    parser.add_argument("--mixed", type=int, default=0, help="schedules of two to five faults")
    parser.add_argument("--hosts", type=int, default=0, help="jobs on three hosts, one fault each")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule of either sort")
    parser.add_argument("--at-once", type=int, default=4, help="jobs side by side")
    parser.add_argument("--keep", type=Path, help="new folder; keep what failed, or took long")
    parser.add_argument("--log", type=Path, help="append one JSON object per schedule")
    given = parser.parse_args()
    in_namespace("tests.soak")
    if not can_mount():
        print("without the right to mount: no faults of disks and clocks", file=sys.stderr)
    folder = Path(tempfile.mkdtemp(prefix="soak-")) if given.keep is None else given.keep
    folder.mkdir(exist_ok=True)
    if given.hosts and not can_have_hosts():
        parser.error("--hosts needs the right to make network namespaces, and the command ip")
    wanted = [(n, False) for n in range(given.seed, given.seed + given.single)]
    wanted += [(n, True) for n in range(given.seed, given.seed + given.mixed)]
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
        for done in as_completed(waiting):
            outcome = done.result()
            outcomes.append(outcome)
            if not outcome.is_right:
                print(line(outcome), flush=True)
            if given.log is not None:
                with given.log.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
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
    return (
        f"{sort} {outcome.schedule.seed} ({shape.way}, {shape.transport}, {shape.ranks} ranks): "
        f"{outcome.schedule.name}: {outcome.how} after {outcome.end_s:.1f} s; {found.calls} calls, "
        f"{found.lost} lost, {found.doubled} doubled, {found.invented} invented, "
        f"{found.wrong} wrong, {found.dropped} dropped; "
        + "; ".join([*outcome.troubles, *found.examples])
    )


def table(outcomes: list[Outcome]) -> str:
    """Return a table: what was done, how often, what became of it."""
    rows: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        faults = outcome.schedule.faults
        rows[faults[0].name if len(faults) == 1 else "several faults"].append(outcome)
    rows["all"] = outcomes
    lines = [
        "| fault | jobs | calls | lost | by recover | doubled | wrong | dropped | last | failed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, those in rows.items():
        found = [one.findings for one in those]
        cells = [
            len(those),
            *(sum(getattr(one, what) for one in found) for what in ("calls", "lost")),
            sum(one.late for one in those),
            *(sum(getattr(one, what) for one in found) for what in ("doubled", "wrong", "dropped")),
            f"{max((one.end_s for one in those), default=0):.1f} s",
            sum(not one.is_right for one in those),
        ]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
