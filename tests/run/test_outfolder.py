"""The trace folder of a run: which one its hosts take."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.synchronize import Barrier
from pathlib import Path

from rankscope.run.prepare import take_out
from rankscope.run.processes import process_name

HOSTS, RUNS = 4, 200
FORK = multiprocessing.get_context("fork")


def _host(folder: Path, barrier: Barrier, number: int) -> None:
    """Take the folder of each run, at the same moment as the other hosts."""
    maker = process_name(os.getpid())
    taken = []
    for run in range(RUNS):
        barrier.wait(60)
        out, _ = take_out(folder / f"{run}/trace", "none", maker=maker, is_shared=True)
        taken.append(out.name)
    (folder / f"host{number}").write_text("\n".join(taken))
    barrier.wait(60)  # until the last has taken its own: a mark counts while its maker lives


def test_hosts_that_begin_at_once_beside_a_taken_folder_take_one_sibling(tmp_path: Path) -> None:
    for run in range(RUNS):
        (tmp_path / f"{run}/trace").mkdir(parents=True)
        (tmp_path / f"{run}/trace/mine").touch()
    barrier = FORK.Barrier(HOSTS)
    hosts = [FORK.Process(target=_host, args=(tmp_path, barrier, n)) for n in range(HOSTS)]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join(120)
    taken = {(tmp_path / f"host{number}").read_text() for number in range(HOSTS)}
    assert taken == {"\n".join(["trace-2"] * RUNS)}
    folders = sorted(path.name for path in tmp_path.glob("*/trace*"))
    assert folders == sorted(["trace", "trace-2"] * RUNS)
