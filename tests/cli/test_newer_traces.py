"""Traces and spools in which a newer rankscope wrote words and numbers that this one does not know:
every command reads the rest, and says what it passed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from tests.cli.test_commands import rankscope
from tests.diagnosis.paper import event, module, numbers, setup
from tests.tree.altered import Columns, alter_step
from tests.tree.ranks_on_paper import MODES, PaperRank

COMMANDS = {
    "show": ["show"],
    "check": ["check"],
    "layout": ["layout"],
    "verify": ["verify"],
    "jsonl": ["export", "--format", "jsonl"],
    "perfetto": ["export", "--format", "perfetto"],
    "hf": ["export", "--format", "hf"],
}


def traced(folder: Path, extra: Callable[[PaperRank], None] = lambda rank: None) -> Path:
    """Two ranks with one parameter in common and one call."""
    for number in range(2):
        rank = PaperRank(folder, number, 2)
        setup(rank, {"fc.weight": numbers(1)})
        with rank.call(class_name="Model"):
            module(rank, "fc", numbers(2), numbers(3 + number))
            module(rank, "act", numbers(2), numbers(3 + number))
        event(rank, Phase.GRADS, "grad", {"fc.weight": numbers(4)})
        extra(rank)
        rank.end()
        rank.ship(folder / "trace")
    build(folder / "trace")
    return folder / "trace"


def run(trace: Path, command: str, folder: Path) -> tuple[int, str, str]:
    words = COMMANDS[command]
    more = ["--out", folder / f"{command}.out"] if words[0] == "export" else []
    return rankscope(words[0], trace, *words[1:], *more)


def first_of(path: str, columns: Columns, texts: list[str]) -> int:
    """Return the first node of a module in the step."""
    paths = [texts[number] for number in columns["nodes.path"].tolist()]
    return paths.index(path)


def later_phase(columns: Columns, texts: list[str]) -> None:
    columns["nodes.phase"][first_of("act", columns, texts)] = len(texts)
    texts.append("later")


def later_event(columns: Columns, texts: list[str]) -> None:
    texts[texts.index("grads")] = "later"


def later_words(columns: Columns, texts: list[str]) -> None:
    """What is a word among others: status, flag, layout's source."""
    node = first_of("act", columns, texts)
    columns["calls.status"][columns["calls.node"] == node] = 250
    held = columns["values.node"] == node
    held &= columns["values.slot"] == columns["values.slot"][held][0]
    columns["values.flags"][held] |= 1 << 31
    facts = json.loads(texts[columns["values.tensor"][held][0]])
    facts |= {"source": "later", "mesh": "later=2", "placements": {"later": "Later()"}}
    columns["values.tensor"][held] = len(texts)
    texts.append(json.dumps(facts))


def later_mode(head: dict[str, Any]) -> None:
    head["steps"].append({**head["steps"][0], "mode": "later", "step": 7})


def later_end(head: dict[str, Any]) -> None:
    head["completeness"]["ranks"][0]["end"] = "later"


def nothing(*_: Any) -> None:
    pass


CHANGES: dict[str, tuple[Callable[..., None], Callable[..., None], str]] = {
    "phase": (later_phase, nothing, "phase 'later'"),
    "event": (later_event, nothing, "phase 'later'"),
    "mode": (nothing, later_mode, "mode 'later'"),
    "words": (later_words, later_end, ""),
}
"""What changes in the step, and in trace.json; what a reader says that it passed over."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("command", COMMANDS)
def test_words_of_a_newer_version_are_passed_over_and_named(
    tmp_path: Path, command: str, change: str
):
    trace = traced(tmp_path)
    before = run(trace, command, tmp_path / "before")[0] if command == "verify" else 0
    in_step, in_head, unread = CHANGES[change]
    alter_step(trace, in_step)
    head = json.loads((trace / "trace.json").read_text())
    in_head(head)
    (trace / "trace.json").write_text(json.dumps(head))
    code, out, err = run(trace, command, tmp_path)
    assert code == before, err
    if unread and command != "verify":
        said = f"passed over what this rankscope does not know ({unread}): read it with"
        assert said in out + err
        assert ("note: " + said in out) == (command == "check")


def unknown(rank: PaperRank) -> None:
    """Calls of a phase and of a mode that are not known yet, each with something inside."""
    module(rank, "new", numbers(5), numbers(6), phase=99)
    MODES["later"] = max(map(int, Mode)) + 5
    try:
        with rank.call(class_name="Model", mode="later", step=3) as top:
            rank.value(top, "output", numbers(7))
            module(rank, "inside", numbers(5), numbers(6), mode="later", step=3)
    finally:
        del MODES["later"]
    with rank.call("act") as known:
        rank.value(known, "output", numbers(8), phase=99)


@pytest.mark.parametrize("command", COMMANDS)
def test_calls_and_values_of_phases_and_modes_to_come_are_left_out_of_the_tree(
    tmp_path: Path, command: str
):
    plain = traced(tmp_path / "plain", lambda rank: rank.exit(rank.enter("act")))
    later = traced(tmp_path / "later", unknown)
    paths = [[node.path for node in open_trace(each).walk()] for each in (plain, later)]
    assert paths[0] == paths[1]
    code, out, err = run(later, command, tmp_path)
    assert code == (1 if command in ("check", "verify") else 0), err  # records are missing
    if command == "verify":
        assert "3 calls and 6 values are left out, which are of phases or modes that" in out
