"""`rankscope top`: where the ranks of a running job are, whom they wait for, how fast they are. Its
screen is made of what it gives as JSON."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Annotated, Any, Final

import typer

from rankscope.cli.arguments import ExitCode, JsonOption, LayoutOption, TraceArgument
from rankscope.cli.terminal import Paint, cut, echo, echo_json, fitted, shown, size_text, width
from rankscope.cli.topdata import SORTS, TopSource
from rankscope.errors import FolderError, RankscopeError, SettingError
from rankscope.record.ranks import ranks_named
from rankscope.record.texts import counted
from rankscope.run.jobstatus import OLD_S
from rankscope.tree.reader import trace_folder
from rankscope.words.reports import finding_of, where_line

_EVERY_S: Final = 1.0
_SHARE: Final = 4
"""A look may take a fourth of the time."""
_KEYS: Final = "q leave  s sort  / ranks"
_ESCAPE: Final = b"\x1b"
Keys = Callable[[float], "bytes | None"]
"""Waits so many seconds for a key; None where none is pressed."""


def command(
    trace: TraceArgument = None,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end.")] = False,
    as_json: JsonOption = False,
    ranks: Annotated[
        str, typer.Option(metavar="RANKS", help="Ranks to show: 0-3,8 or all.")
    ] = "all",
    sort: Annotated[
        str, typer.Option(metavar="rank|age|time", help="Order of the groups.")
    ] = "rank",
    judges: Annotated[
        bool, typer.Option("--check/--no-check", help="Say what is wrong, or do not.")
    ] = True,
    layout: LayoutOption = None,
) -> None:
    """Show where the ranks of a running job are, on one screen; q or Ctrl-C ends.

    Exit code with --once: 0 no fault so far; 1: `check` found a fault; 2: nothing can be said.
    """
    if sort not in SORTS:
        raise SettingError(f"--sort {sort}: expected {', '.join(SORTS)}")
    if as_json and not once:
        raise SettingError("--json prints one object: give --once with it")
    folder = trace_folder(trace)
    if not folder.is_dir():
        raise FolderError(f"{folder}: no such folder")
    source = TopSource(folder, layout, judges=judges)
    source.choose(ranks)
    source.sort = sort
    if once:
        state = source.one()
        if as_json:
            echo_json("top", state["state"], state)
        else:
            columns = width()
            for line in screen_lines(state, Paint(sys.stdout), columns, 0):
                echo(line)
        if state["check"]["verdict"] == "fault":
            raise typer.Exit(ExitCode.FINDING)
        return
    if not sys.stdout.isatty():
        raise SettingError("stdout is not a terminal: give --once, and --json for a program")
    _show_until_left(source)


def _show_until_left(source: TopSource) -> None:
    paint = Paint(sys.stdout)
    note = ""
    with contextlib.suppress(KeyboardInterrupt), _screen() as keys:
        while True:
            began = time.monotonic()
            state = source.now()
            size = shutil.get_terminal_size()
            line = f"{_KEYS} (now: by {source.sort}{note})"
            _draw(screen_lines(state, paint, size.columns, size.lines, line))
            took = time.monotonic() - began
            key = keys(max(_EVERY_S - took, (_SHARE - 1) * took, 0.0))
            if key == b"q":
                return
            if key == b"s":
                names = [*SORTS]
                source.sort = names[(names.index(source.sort) + 1) % len(names)]
            elif key == b"/" and (asked := _asked(keys, size.lines)) is not None:
                try:
                    source.choose(asked)
                    note = f", ranks {asked}" if asked.strip() else ""
                except RankscopeError as error:
                    note = f", {error}"


def _draw(lines: list[str]) -> None:
    """Write over the last screen; nothing flickers, because nothing is cleared before it."""
    text = "".join(f"{shown(line)}\x1b[K\r\n" for line in lines)
    sys.stdout.write(f"\x1b[H{text.removesuffix(chr(13) + chr(10))}\x1b[J")
    sys.stdout.flush()


def _asked(keys: Keys, rows: int) -> str | None:
    """Return the ranks that are typed; "" for all, None where Escape is pressed."""
    typed = ""
    while True:
        sys.stdout.write(f"\x1b[{rows};1H\x1b[Kranks (0-3,8; nothing for all): {typed}")
        sys.stdout.flush()
        key = keys(60.0)
        if key in (None, b"", _ESCAPE):
            return None
        if key in (b"\r", b"\n"):
            return typed
        if key in (b"\x7f", b"\x08"):
            typed = typed[:-1]
        elif key is not None and key in b"0123456789-,al":
            typed += key.decode()


@contextlib.contextmanager
def _screen() -> Iterator[Keys]:
    """Take the terminal: another screen, no cursor, keys as they are pressed; give it back."""
    descriptor = sys.stdin.fileno() if sys.stdin.isatty() else -1
    before = termios.tcgetattr(descriptor) if descriptor >= 0 else None

    def keys(seconds: float) -> bytes | None:
        if descriptor < 0:
            time.sleep(seconds)
            return None
        if not select.select([descriptor], [], [], seconds)[0]:
            return None
        return os.read(descriptor, 1) or b"q"  # its end: the terminal is gone

    try:
        if before is not None:
            tty.setcbreak(descriptor)
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
        yield keys
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
        if before is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


# ---- the screen ----------------------------------------------------------------------------------

_HEAD = f"{'ranks':<12} {'step':<9} {'age':>6} {'time':>7} {'all':>5} {'own':>5}  last in"
_MOST_FINDINGS = 3
_SLOW = 1.1


def screen_lines(
    state: Mapping[str, Any], paint: Paint, columns: int, rows: int, keys: str = ""
) -> list[str]:
    """Return the lines of one screen of what `TopSource.now` gives; 0 columns or rows are as many
    as there are, `keys` is the last line."""
    checked = [*_check(state, paint, columns, is_screen=columns > 0 and rows > 0)]
    above = [*_job(state, paint), *checked, ""]
    below = ["", *_worst(state["worst"], paint)] if state["worst"] else []
    if keys:
        below += ["", paint("dim", keys)]
    above = [row for line in above for row in fitted(line, columns)]
    below = [row for line in below for row in fitted(line, columns)]
    groups = [[*_group(group, paint)] for group in state["groups"]]
    room = rows - len(above) - len(below) - 2 if rows else sum(map(len, groups))
    table = [paint("bold", _HEAD)]
    for number, lines in enumerate(groups):
        if len(table) - 1 + len(lines) > max(room, 4):
            table.append(f"and {counted(len(groups) - number, 'more group')} of ranks")
            break
        table += lines
    return [cut(line, columns) if columns else line for line in [*above, *table, *below]]


def _job(summary: Mapping[str, Any], paint: Paint) -> Iterator[str]:
    states = ", ".join(f"{n} {state}" for state, n in summary["ranks_by_state"].items())
    nothing = "nothing has come yet"
    if summary["received_bytes"]:
        nothing = (
            f"{size_text(summary['received_bytes'])} of records have come, nobody has read them"
        )
    states = states or nothing
    count = sum(summary["ranks_by_state"].values())
    world = summary["world_size"] or count
    hosts = f" on {counted(summary['hosts'], 'host')}" if summary["hosts"] else ""
    name = paint("bold", summary["trace"].rstrip("/").rpartition("/")[2])
    yield f"{name}  {count} of {world} ranks{hosts}: {states}  {time.strftime('%H:%M:%S')}"
    if summary["state"] == "deserted":
        yield paint("red", "nobody is at work on this trace: rankscope recover builds its tree")
    age_s = summary["status_age_s"]
    if summary["state"] == "running" and age_s is not None and age_s > OLD_S:
        yield paint("yellow", f"this is what was so {_seconds(age_s)} ago: nobody has looked since")
    parts = []
    if summary["step"] is not None:
        parts.append(f"train step {summary['step']}")
    if summary["step_s"] is not None:
        parts.append(f"{_seconds(summary['step_s'])} a traced step")
    if summary["records_per_s"] is not None:
        parts.append(
            f"{summary['records_per_s']:,.0f} records/s, {size_text(summary['bytes_per_s'])}/s"
        )
    yield "  ".join(parts)
    parts = []
    if summary["spool"] is not None:
        spool = summary["spool"]
        text = f"spool {spool['fill']:.0%} full"
        parts.append(f"{text} (rank {spool['rank']})" if spool["fill"] >= 0.01 else text)
    lost = summary["lost_records"]
    if lost or summary["received_bytes"] == 0 or summary["ranks_by_state"]:
        parts.append(paint("red", f"{lost:,} records lost") if lost else "nothing lost")
    yield "  ".join(parts)
    for words, name in (("loss", "loss"), ("gradient norm", "grad_norm")):
        if summary[name] is not None:
            yield _spread(words, summary[name])
    yield from (paint("yellow", stall) for stall in summary["stalls"])


def _spread(name: str, state: Mapping[str, Any]) -> str:
    where = f", step {state['step']}"
    wrong = f", not finite on {ranks_named(state['not_finite'])}" if state["not_finite"] else ""
    if state["min"] is None:
        return f"{name}{wrong.lstrip(',')}{where}"
    if state["min"] == state["max"]:
        return f"{name} {state['min']:.6g}{wrong}{where}"
    low, high = (f"{state[end]:.6g} (rank {state[f'{end}_rank']})" for end in ("min", "max"))
    return f"{name} {low} to {high}{wrong}{where}"


def _check(
    state: Mapping[str, Any], paint: Paint, columns: int, *, is_screen: bool
) -> Iterator[str]:
    """Yield what `check` found: on a screen a line of each message, and its whole place."""
    check = state["check"]
    if check["trouble"] or check["verdict"] is None:
        line = f"check: {check['trouble'] or 'not judged yet'}"
        yield cut(line, 3 * columns) if is_screen else line
    if check["verdict"] is None:
        return
    origins = [entry for entry in check["findings"] if entry["origin"]]
    if not origins:
        steps = "" if "judged" in check else " in the steps judged while the job runs"
        yield f"check ({_seconds(check['age_s'])} ago): no fault so far{steps}"
    for data in origins[:_MOST_FINDINGS]:
        finding = finding_of(data)
        ago = f"{_seconds(data.get('age_s', check['age_s']))} ago"
        line = paint("red", f"check ({ago}): {finding.kind.value}: {finding.message}")
        yield cut(line, columns) if is_screen else line
        place = f"  {where_line(finding)}"
        yield from wrap(place, columns or len(place), subsequent_indent="    ")
    if (more := len(origins) - _MOST_FINDINGS) > 0:
        yield f"and {counted(more, 'more origin')}: rankscope check"


def _group(group: Mapping[str, Any], paint: Paint) -> Iterator[str]:
    step = group["step"].removeprefix("train step ") or "-"
    if group["step_over"]:
        step = f"{step} done"
    where = _last(group["where"], 29)
    if group["state"] != "running":
        style = "red" if group["state"] in ("lost", "raised") else "dim"
        where = f"{paint(style, group['state'])}, {_last(group['where'], 20)}"
    numbers = (
        f"{_range(group['age_s'], _seconds):>6} {_range(group['step_s'], _seconds):>7} "
        f"{_ratio(group['beside_all'], paint)} {_ratio(group['beside_history'], paint)}"
    )
    yield f"{_short(group['ranks'], 12):<12} {_short(step, 9):<9} {numbers}  {where}"
    if group["waits_in"]:
        whom = f" for {ranks_named(group['waits_for'])}" if group["waits_for"] else ""
        yield f"{' ' * 23}waits in {group['waits_in']}{paint('yellow', whom)}"


def _worst(worst: Sequence[Mapping[str, Any]], paint: Paint) -> Iterator[str]:
    slow = [entry for entry in worst if entry["beside_all"] >= _SLOW]
    if not slow:
        yield "slowest ranks: none took 10 % longer than the median of all in its last step"
        return
    listed = [
        f"rank {entry['rank']} {_seconds(entry['own_s'])} "
        f"x{entry['beside_all']:.2f} ({entry['slow_steps']} of {entry['compared_steps']} steps)"
        for entry in slow
    ]
    yield f"slowest ranks:  {'  '.join(listed)}"


def _range(numbers: Sequence[float] | None, text: Any) -> str:
    """Return the greatest number: the group is as slow as the slowest of it."""
    return text(numbers[-1]) if numbers else "-"


def _ratio(numbers: Sequence[float] | None, paint: Paint) -> str:
    if not numbers:
        return f"{'-':>5}"
    text = f"{min(numbers[-1], 999):>5.2f}" if numbers[-1] < 100 else f"{numbers[-1]:>5.0f}"
    return paint("yellow", text) if numbers[-1] >= _SLOW else text


def _seconds(seconds: float) -> str:
    """Return a time in at most six characters."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 100:
        return f"{seconds:.1f}s"
    if seconds < 6000:
        return f"{seconds / 60:.0f}min"
    return f"{seconds / 3600:.0f}h"


def _short(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 2]}.."


def _last(where: str, columns: int) -> str:
    """Return phase and module with the begin of a long path left out."""
    phase, of, path = where.partition(" of ")
    room = columns - len(phase) - len(of)
    return where if len(path) <= room or room < 6 else f"{phase}{of}..{path[2 - room :]}"
