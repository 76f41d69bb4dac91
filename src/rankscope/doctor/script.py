"""Is a script the same with tracing on? It is run for a few steps, twice untraced and once traced.

First the two untraced runs are held to each other: what a script does not compute in the same way
twice cannot be asked of a third run. Then the traced run is held to them. All is bitwise.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankscope.doctor.job import Condition
from rankscope.errors import RankscopeError, SettingError
from rankscope.settings import SETTINGS, settings_from
from rankscope.tree.reader import open_trace

_NAMES = ("script", "repeatable", "traced")
_LAST_WORDS = 40
_END_S = 10.0
_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptQuestion:
    """What is going to be run."""

    script: str
    arguments: tuple[str, ...] = ()
    ranks: int | None = None
    """Ranks under torchrun; None for `python script.py`."""
    steps: int = 3
    """Steps of each optimizer after which a run is stopped."""
    seed: int | None = 0
    """What the generators are seeded with before the script begins; None leaves them alone."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """{field: text} of settings of the traced run; the rest comes from variables and defaults, but
    all steps are traced."""
    python: tuple[str, ...] = (sys.executable,)
    limit_s: float = _LIMIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankValues:
    """What one rank computed in one run (`doctor.scriptprobe`)."""

    values: Sequence[tuple[str, str]]
    losses: Mapping[str, float]
    steps: int
    ended: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScriptRun:
    ranks: Mapping[int, _RankValues]
    trouble: str
    """Why it cannot be used, "" where it can."""

    @property
    def steps(self) -> int:
        return min((rank.steps for rank in self.ranks.values()), default=0)

    def counted(self) -> str:
        kinds = Counter(name.split(" ")[0] for r in self.ranks.values() for name, _ in r.values)
        words = (("loss", "losses"), ("gradient", "gradients"), ("parameter", "parameters"))
        parts = [f"{kinds[noun]} {noun if kinds[noun] == 1 else nouns}" for noun, nouns in words]
        return f"{', '.join(parts)} and the random numbers"


def script_conditions(question: ScriptQuestion) -> Iterator[Condition]:
    """Yield each answer as soon as it is known: does the script run, is it the same twice, is it
    the same traced? SettingError: a setting that cannot be used, or no such script."""
    settings_from(question.settings)
    if not Path(question.script).is_file():
        raise SettingError(f"--script {question.script}: no such file")
    with tempfile.TemporaryDirectory(prefix="rankscope-doctor-") as name:
        yield from _conditions(question, Path(name))


def _conditions(question: ScriptQuestion, folder: Path) -> Iterator[Condition]:
    first = _run(question, folder / "1")
    if first.trouble:
        yield Condition.failed("script", first.trouble, _of_options(question, first.trouble))
        yield from (Condition.skipped(name, "script") for name in _NAMES[1:])
        return
    yield _script(question, first)
    difference = _difference(first, _run(question, folder / "2"))
    if difference:
        yield _not_repeatable(difference)
        yield Condition.skipped("traced", "repeatable")
        return
    out = folder / "trace"
    difference = _difference(first, _run(question, folder / "3", out))
    # before rankscope is blamed: was the script only lucky twice?
    if difference and (chance := _difference(first, _run(question, folder / "4"))):
        yield _not_repeatable(chance)
        yield Condition.skipped("traced", "repeatable")
        return
    yield Condition.ok("repeatable", f"untraced runs are bitwise the same: {first.counted()}")
    recorded, complaint = _recorded(out)
    if difference:
        yield Condition.failed(
            "traced",
            f"not the same with tracing on: {difference}",
            "this is a fault of rankscope: report it with this line; train untraced meanwhile",
        )
    elif complaint:
        yield Condition.failed(
            "traced", f"nothing can be said: {complaint}", "ask `rankscope doctor` without --script"
        )
    else:
        yield Condition.ok("traced", f"bitwise the same as the untraced runs; {recorded}")


def _script(question: ScriptQuestion, run: _ScriptRun) -> Condition:
    name = Path(question.script).name
    ranks = f" on {len(run.ranks)} ranks" if question.ranks else ""
    if not run.steps:
        return Condition.note(
            "script",
            f"{name}{ranks}: no optimizer has made a step on every rank, so the script ran to its "
            "end, and only losses and random numbers are compared",
            "let it train: what counts is what the parameters become",
        )
    seed = "" if question.seed is None else f", random numbers seeded with {question.seed}"
    extent = "to its end, " if run.steps < question.steps else "until it had made "
    steps = f"{run.steps} optimizer step{'s' if run.steps > 1 else ''}"
    return Condition.ok("script", f"{name}{ranks} ran {extent}{steps}{seed}")


def _not_repeatable(difference: str) -> Condition:
    return Condition.failed(
        "repeatable",
        f"two untraced runs differ: {difference}; the script is not deterministic by itself, and "
        "nothing can be said of tracing",
        "look for times, seeds of its own, threads, set order, or files that it writes and reads "
        "again (a checkpoint); "
        "torch.use_deterministic_algorithms(True) and OMP_NUM_THREADS=1 help; then ask again",
    )


def _of_options(question: ScriptQuestion, trouble: str) -> str:
    if "unrecognized arguments" in trouble or "no such option" in trouble.lower():
        return "options of doctor stand before --script; what follows the script is its own"
    return "run it untraced first: python " + " ".join([question.script, *question.arguments])


# ---- one run -------------------------------------------------------------------------------------


def _run(question: ScriptQuestion, folder: Path, out: Path | None = None) -> _ScriptRun:
    folder.mkdir()
    variables = dict(os.environ)
    if out is None:
        variables = {
            name: text for name, text in variables.items() if not name.startswith("RANKSCOPE")
        }
    if question.seed is not None:
        variables.setdefault("PYTHONHASHSEED", "0")
    if out is not None:
        variables.setdefault("RANKSCOPE_STEPS", "all")
        texts = {**question.settings, "out": str(out)}
        variables |= {s.variable: texts[s.field] for s in SETTINGS if s.field in texts}
        variables["RANKSCOPE"] = "1"
    code, output = _started(_command(question, folder), variables, folder, question.limit_s)
    ranks = {}
    for path in folder.glob("rank*.json"):
        values = _RankValues(**json.loads(path.read_bytes()))
        ranks[int(path.stem.removeprefix("rank"))] = values
    trouble = ""
    well = ("stopped", "came to its end")
    broken = [f"rank {n}: {r.ended}" for n, r in sorted(ranks.items()) if r.ended not in well]
    if code is None:
        trouble = f"did not make {question.steps} steps in {question.limit_s:g} s"
    elif broken or len(ranks) < (question.ranks or 1):
        trouble = f"{question.script} did not run: {'; '.join(broken) or f'ended with {code}'}"
        trouble += f"; its last words: {output}" if output else ""
    return _ScriptRun(ranks=ranks, trouble=trouble)


def _command(question: ScriptQuestion, folder: Path) -> list[str]:
    launcher: list[str] = []
    if question.ranks:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(question.ranks)]
    seed = "" if question.seed is None else str(question.seed)
    probe = ["-m", "rankscope.doctor.scriptprobe", str(folder), str(question.steps), seed]
    return [*question.python, *launcher, *probe, question.script, *question.arguments]


def _started(
    command: Sequence[str], environ: Mapping[str, str], folder: Path, limit_s: float
) -> tuple[int | None, str]:
    """Run a command; return its exit code, None where it took too long, and its last words."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                _end(process)
    return code, " ".join(log.read_text(errors="replace").split()[-_LAST_WORDS:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a job with all it started, gently first: torchrun passes the signal on."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            return


# ---- two runs ------------------------------------------------------------------------------------


def _difference(first_run: _ScriptRun, second_run: _ScriptRun) -> str:
    """Return the first thing in which two runs differ, in words; "" where they are the same."""
    if second_run.trouble:
        return second_run.trouble
    first, count = "", 0
    for rank in sorted(first_run.ranks.keys() | second_run.ranks.keys()):
        if rank not in first_run.ranks or rank not in second_run.ranks:
            return f"rank {rank} ran once and once not"
        first_values, yours = first_run.ranks[rank], second_run.ranks[rank]
        where = f" on rank {rank}" if len(first_run.ranks) > 1 else ""
        for pair, other_own in zip(first_values.values, yours.values):
            name, their_name = pair[0], other_own[0]
            count += pair != other_own
            if not first and name != their_name:
                first = f"{name} came where {their_name} did{where}"
            elif not first and pair != other_own:
                first = f"the {name}{where}{_numbers(name, first_values, yours)}"
        if len(first_values.values) != len(yours.values) and not first:
            first = f"{len(first_values.values)} values and {len(yours.values)}{where}"
    return f"{first} (and {count - 1} values more)" if count > 1 else first


def _numbers(name: str, first_values: _RankValues, yours: _RankValues) -> str:
    pair = first_values.losses.get(name, math.nan), yours.losses.get(name, math.nan)
    return "" if any(map(math.isnan, pair)) else f", {pair[0]!r} and {pair[1]!r}"


def _recorded(out: Path) -> tuple[str, str]:
    """Return how much a trace holds, and why it holds nothing."""
    try:
        trace = open_trace(out)
    except RankscopeError as error:
        return "", f"the traced run left no trace ({error})"
    calls = sum(1 for _ in trace.find("*"))
    if not calls:
        return "", "the traced run recorded no call"
    return f"{calls} calls recorded in {len(trace.steps)} steps", ""
