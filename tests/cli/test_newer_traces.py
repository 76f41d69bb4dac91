"""Traces and spools in which a newer rankscope wrote words and numbers that this one does not know:
every command reads the rest, and says what it passed over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.record.call import Mode
from rankscope.record.phases import Phase
from rankscope.tree.build import build
from rankscope.tree.reader import open_trace
from tests.cli.test_commands import rankscope
from tests.diagnosis.paper import event, module, numbers, setup
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


def walk(nodes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for node in nodes:
        yield node
        yield from walk(node["children"])


def later_phase(data: dict[str, Any]) -> None:
    node = next(n for n in walk(data["steps"][0]["nodes"]) if n["path"] == "act")
    node["phase"] = "later"


def later_event(data: dict[str, Any]) -> None:
    for node in walk([n for n in data["steps"][0]["nodes"] if n["phase"] == "grads"]):
        node["phase"] = "later"


def later_mode(data: dict[str, Any]) -> None:
    data["steps"].append({**data["steps"][0], "mode": "later", "step": 7})


def later_rest(data: dict[str, Any]) -> None:
    """What is a word among others: status, flag, layout's source, how a rank ended."""
    node = next(n for n in walk(data["steps"][0]["nodes"]) if n["path"] == "act")
    node["status"] = "later"
    slot = node["slots"][0]
    slot["values"][0]["flags"] = ["later"]
    slot["layout"] = {"source": "later", "mesh": "later=2", "placements": {"later": "Later()"}}
    data["completeness"]["ranks"][0]["end"] = "later"


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "phase": (later_phase, "phase 'later'"),
    "event": (later_event, "phase 'later'"),
    "mode": (later_mode, "mode 'later'"),
    "words": (later_rest, ""),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("command", COMMANDS)
def test_words_of_a_newer_version_are_passed_over_and_named(
    tmp_path: Path, command: str, change: str
):
    trace = traced(tmp_path)
    before = run(trace, command, tmp_path / "before")[0] if command == "verify" else 0
    alter, unread = CHANGES[change]
    data = json.loads((trace / "trace.json").read_text())
    alter(data)
    (trace / "trace.json").write_text(json.dumps(data))
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
