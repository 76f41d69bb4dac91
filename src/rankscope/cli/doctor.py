"""`rankscope doctor`: will a job be traced here, and if not, why not?"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from rankscope.cli.arguments import ExitCode, JsonOption
from rankscope.cli.terminal import Paint, echo, echo_json
from rankscope.doctor.job import Condition, Question, Status, examine
from rankscope.doctor.script import ScriptQuestion, script_conditions
from rankscope.errors import SettingError

_COLORS = {"ok": "green", "note": "yellow", "failed": "red", "skipped": "dim"}


def command(
    out: Annotated[str, typer.Option(metavar="DIR", help="Trace folder of the job.")] = "",
    spool: Annotated[str, typer.Option(metavar="DIR", help="Local disk for the spools.")] = "",
    spool_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Unsent bytes a rank may hold.")
    ] = "",
    steps: Annotated[str, typer.Option(metavar="STEPS", help="Steps to trace.")] = "",
    ranks: Annotated[str, typer.Option(metavar="RANKS", help="Ranks to trace.")] = "",
    collector: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address of a collector already running.")
    ] = "",
    keys: Annotated[str, typer.Option(metavar="FILE", help="Key file of that collector.")] = "",
    nproc_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks on this host; default what a launcher's variables say."),
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Hosts of the job.")] = 1,
    python: Annotated[
        str, typer.Option(metavar="COMMAND", help="Interpreter of the ranks; default this one.")
    ] = "",
    as_json: JsonOption = False,
    script_steps: Annotated[
        int, typer.Option(min=1, help="With --script: optimizer steps of each run.")
    ] = 3,
    seed: Annotated[
        int | None,
        typer.Option(
            help="With --script: seed of all generators before it begins; -1 for none.", min=-1
        ),
    ] = 0,
    script: Annotated[
        str,
        typer.Option(
            metavar="FILE ARGUMENTS...",
            help="Run this script, untraced and traced, and compare what it computes bitwise. "
            "Give it last: what follows is its own.",
        ),
    ] = "",
    arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Ask everything a traced job needs of this host: one line each, and what to do where it fails.
    With --script, ask whether that script computes the same with tracing on.

    Exit code 0: a job would be traced, and the same; 1: something failed; 2: the question cannot
    be understood.
    """
    given = {
        "out": out, "spool": spool, "spool_bytes": spool_bytes,
        "steps": steps, "ranks": ranks, "collector": collector, "keys": keys,
    }  # fmt: skip
    try:
        command = tuple(shlex.split(python))
    except ValueError as error:
        raise SettingError(f"--python {python!r}: {error}; quote it as a shell would") from None
    settings = {name: text for name, text in given.items() if text}
    python_of_ranks = command or (sys.executable,)
    if script:
        conditions = script_conditions(
            ScriptQuestion(
                script=script,
                arguments=tuple(arguments or ()),
                ranks=nproc_per_node,
                steps=script_steps,
                seed=None if seed == -1 else seed,
                settings=settings,
                python=python_of_ranks,
            )
        )
    elif arguments:
        raise SettingError(f"{arguments[0]}: what is run is named with --script {arguments[0]}")
    else:
        conditions = examine(
            Question(
                settings=settings, local_ranks=nproc_per_node, hosts=nnodes, python=python_of_ranks
            )
        )
    if script:  # what it started ends with it, however it is ended
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    paint, found = Paint(sys.stdout), []
    for condition in conditions:
        found.append(condition)
        if not as_json:
            for line in _lines(condition, paint):
                echo(line)
    has_failed = any(condition.status is Status.FAILED for condition in found)
    if as_json:
        listed = [
            {"name": c.name, "status": c.status.value, "found": c.answer, "remedy": c.remedy}
            for c in found
        ]
        echo_json("doctor", "failed" if has_failed else "clean", {"conditions": listed})
    raise typer.Exit(ExitCode.FINDING if has_failed else ExitCode.FINE)


def _lines(condition: Condition, paint: Paint) -> Iterator[str]:
    word = condition.status.value
    yield f"{paint(_COLORS[word], f'{word:<7}')} {condition.name:<13} {condition.answer}"
    if condition.remedy:
        yield f"{'':<21} -> {condition.remedy}"
