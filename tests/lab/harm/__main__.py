"""`python -m tests.lab.harm`: a training once untraced, and once for every site that fails while it
is traced; each in a process of its own. Prints what came out, and ends with 1 where a training was
not bitwise the same or anything was raised into it.

    python -m tests.lab.harm                       # every way, every site, every kind of failure
    python -m tests.lab.harm --way block --most 60 # sites spread evenly over one way
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.lab.harm.instrument import FAULT, HOWS, SITES, Site, instrument

instrument()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import rankscope  # noqa: E402, F401
from tests.lab.harm import allowed  # noqa: E402
from tests.lab.harm.trainings import WAYS, Way, prepare_run_folder  # noqa: E402
from tests.unharmed import numbers_of  # noqa: E402

_LIMIT_S = 90.0


@dataclass(kw_only=True)
class Run:
    """One training in processes of its own."""

    site: Site | None
    how: str
    folder: Path
    pids: dict[int, int] = field(default_factory=dict)
    """rank by process id of those that still run"""
    deadline: float = 0.0
    codes: dict[int, int] = field(default_factory=dict)

    def result(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"result{rank}.json"
        return json.loads(path.read_text()) if path.exists() else {"raised": "no result"}

    def said(self, rank: int) -> str:
        return (self.folder / f"stderr{rank}").read_text(errors="replace")


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", action="append", choices=list(WAYS))
    parser.add_argument("--how", action="append", choices=HOWS)
    parser.add_argument(
        "--new", action="store_true", help="leave out sites that a way before these passes too"
    )
    parser.add_argument("--most", type=int, default=0, help="failures of each way, 0 for all")
    parser.add_argument("--module", default="", help="only sites of modules that begin so")
    parser.add_argument("--line", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    from rankscope.capture.kernel import build

    build()
    known: set[int] = set()
    failed = 0
    base = Path(tempfile.mkdtemp(prefix="harm-"))
    try:
        for name, way in WAYS.items():
            if not options.way or name in options.way:
                failed += _examine(name, way, options, known, base)
            elif options.new:
                known.update(site.number for site in _passed(way, base)[0])
    finally:
        _end_companions(base)
        shutil.rmtree(base, ignore_errors=True)
    return 1 if failed else 0


def _end_companions(base: Path) -> None:
    """End relays and collectors that ranks started in here: no rank of theirs lives any more."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(base) in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def _examine(name: str, way: Way, options: argparse.Namespace, known: set[int], base: Path) -> int:
    begun = time.monotonic()
    plain = _finished(_start(way, base, None, "plain"))
    sites, watched = _passed(way, base)
    if _problem(plain, plain, way) or _problem(watched, plain, way):
        print(name, _problem(plain, plain, way) or _problem(watched, plain, way))
        print(watched.said(0))
        return 1
    new = [s for s in sites if s.number not in known and not allowed.is_outermost(s)]
    known.update(s.number for s in new)
    faults = [
        (site, how)
        for site in new
        for how in (options.how or HOWS)
        if (site.kind != "call" or how == "raise")
        and site.module.startswith(options.module)
        and (not options.line or site.line == options.line)
    ]
    faults.sort(key=lambda fault: fault[0].kind == "call")
    if options.most and len(faults) > options.most:
        faults = random.Random(options.seed).sample(faults, options.most)
    waiting, running, bad = list(reversed(faults)), list[Run](), 0
    counts: Counter[str] = Counter()
    silent = 0
    while waiting or running:
        while waiting and len(running) < options.at_once:
            site, how = waiting.pop()
            running.append(_start(way, base, site, how))
        for run in [r for r in running if _has_ended(r)]:
            running.remove(run)
            counts[run.how] += 1
            problem = _problem(run, plain, way)
            if problem:
                bad += 1
                print(f"{name}: {run.how} at {run.site}\n    {problem}", flush=True)
            silent += "rankscope" not in run.said(0)
            if way.starts_companions:
                _end_companions(run.folder)
            shutil.rmtree(run.folder, ignore_errors=True)
            if counts.total() % 500 == 0:
                print(f"{name}: {counts.total()} of {len(faults)}", file=sys.stderr, flush=True)
        time.sleep(0.002)
    spent = time.monotonic() - begun
    done = sum(counts.values())
    print(
        f"{name}: {len(sites)} sites, {len(new)} new, {done} failures "
        f"({', '.join(f'{n} {how}' for how, n in counts.items())}), {bad} harmed, "
        f"{spent:.0f} s",
        flush=True,
    )
    return bad


def _passed(way: Way, base: Path) -> tuple[list[Site], Run]:
    """Return the sites that a training passes, and the run that told."""
    for module in _finished(_start(way, base, None, "watch")).result(0)["modules"]:
        with contextlib.suppress(ImportError):  # here, so that forks number their sites alike
            importlib.import_module(module)
    watched = _finished(_start(way, base, None, "watch"))
    return [SITES[n] for n in watched.result(0).get("sites", ())], watched


def _start(way: Way, base: Path, site: Site | None, how: str) -> Run:
    run = Run(site=site, how=how, folder=Path(tempfile.mkdtemp(dir=base)))
    run.deadline = time.monotonic() + _LIMIT_S
    variables = dict(way.settings)
    if way.is_prepared and how != "plain":
        variables |= prepare_run_folder(run.folder, way)
    sys.stdout.flush()
    for rank in range(way.world):
        pid = os.fork()
        if pid == 0:
            _be_rank(way, run, rank, variables)
        run.pids[pid] = rank
    return run


def _be_rank(way: Way, run: Run, rank: int, variables: dict[str, str]) -> None:
    code = 70
    try:
        error = os.open(run.folder / f"stderr{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(error, 2)
        os.dup2(error, 1)
        os.chdir(run.folder)
        os.environ.update(variables)
        result = _result(way, run, rank)
        (run.folder / f"result{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _result(way: Way, run: Run, rank: int) -> dict[str, Any]:
    if way.world > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(way.world),
            LOCAL_WORLD_SIZE=str(way.world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
        )  # fmt: skip
        store = dist.FileStore(str(run.folder / "store"), way.world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=way.world)
    seen: Any = None
    if run.how == "watch" and rank == 0:
        seen = FAULT.watch()
    elif run.site is not None and rank == 0:
        FAULT.set(run.site.number, run.how)
    raised = ""
    numbers: dict[str, Any] = {}
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)
    try:
        if run.how == "plain":
            numbers = numbers_of(lambda: _with_state(way))
        else:
            with way.traced(run.folder):
                numbers = numbers_of(lambda: _with_state(way))
    except BaseException:
        raised = traceback.format_exc()
    hashes = {key: hash_of(value) for key, value in numbers.items()}
    if dist.is_initialized():
        dist.destroy_process_group()
    return {
        "raised": raised,
        "numbers": hashes,
        "fired": FAULT.fired,
        "modules": list(sys.modules),
        "sites": list(seen.seen) if seen is not None else [],
    }


def hash_of(value: bytes | str) -> str:
    """Return a short text for bytes."""
    import hashlib

    return hashlib.blake2b(value if isinstance(value, bytes) else value.encode()).hexdigest()[:16]


def _with_state(way: Way) -> Any:
    result = way.body()
    return [result, torch.get_rng_state(), str(np.random.get_state()), str(random.getstate())]


def _has_ended(run: Run) -> bool:
    for pid, rank in list(run.pids.items()):
        if time.monotonic() > run.deadline:
            os.kill(pid, signal.SIGKILL)
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            del run.pids[pid]
            run.codes[rank] = os.waitstatus_to_exitcode(status)
    return not run.pids


def _finished(run: Run) -> Run:
    while not _has_ended(run):
        time.sleep(0.002)
    return run


def _problem(run: Run, plain: Run, way: Way) -> str:
    for rank in range(way.world):
        if run.codes[rank] != 0:
            return f"rank {rank} ended with {run.codes[rank]}: {run.said(rank)[-600:]}"
        found, expected = run.result(rank), plain.result(rank)
        if found["raised"]:
            lines = found["raised"].strip().splitlines()
            return "raised into the program: " + " | ".join(s.strip() for s in lines[-9:])
        if found["numbers"] != expected["numbers"]:
            names = [
                key
                for key in expected["numbers"]
                if found["numbers"].get(key) != expected["numbers"][key]
            ]
            return f"not the same on rank {rank}: {names[:4]}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
