"""What a trace says is text to every command: none of it reaches the terminal as an order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.cli.terminal import echo, shown
from rankscope.run.folders import REPLICA_FOLDER
from rankscope.tree.build import recover
from tests.lab.fuzz import samples
from tests.lab.fuzz.decoders import UNPRINTABLE, run_command

ORDERS = "\x1b[2J\x1b]0;owned\x07\x1b[8m\r\u202e\x9b31m\n"
"""Clear the screen, name the window, hide what follows, go back, turn round, a line more."""
_FREE = {
    "root": ("class",),
    "module": ("path", "raw_path", "class"),
    "slot": ("name",),
    "meta": ("dtype", "device", "note"),
    "text": ("text",),
    "group": ("name", "backend", "description"),
    "collective": ("op", "group", "at", "issuer", "reduce"),
    "raised": ("error", "where"),
    "rank": ("host",),
    "layout": ("file",),
}


def hostile(fields: dict[str, Any]) -> dict[str, Any]:
    """A definition in which every free text goes on with orders to a terminal."""
    for name in _FREE.get(fields["kind"], ()):
        if isinstance(fields.get(name), str):
            fields[name] += ORDERS
    for name in ("wrappers", "axes", "argv"):
        if name in fields:
            fields[name] = [f"{each}{ORDERS}" for each in fields[name]]
    if "environment" in fields:
        fields["environment"] = {f"A{ORDERS}": ORDERS}
        fields["versions"] |= {f"torch{ORDERS}": ORDERS}
    return fields


@pytest.fixture(scope="module", params=["fsdp2_tp"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a job in which everything has such a name."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / REPLICA_FOLDER).mkdir()
    for replica in samples.replicas(request.param):
        data = samples.redefined(replica.read_bytes(), hostile)
        (folder / REPLICA_FOLDER / replica.name).write_bytes(data)
    recover([folder], folder / "out")
    return folder / "out"


@pytest.fixture(scope="module", autouse=True)
def _cleared() -> Iterator[None]:
    yield
    samples.clear()


@pytest.mark.parametrize(
    "command",
    [
        *(["show"], ["show", "--full"], ["show", "--path", "*"], ["verify"], ["check"]),
        *(["check", "--full"], ["layout"], ["tensor"], ["diff", "SOUND"], ["top", "--once"]),
        *(["verify", "--json"], ["check", "--json"]),
        ["export", "--format", "jsonl", "--out", "OUT"],
        ["report", "--out", "OUT"],
        ["tensor", "nothing:output", "--print"],
        ["show", "--path", "nothing"],
    ],
    ids=" ".join,
)
def test_no_command_prints_what_moves_a_terminal(trace, command):
    printed = run_command(command, trace)  # which looks for it too
    assert printed and not UNPRINTABLE.search(printed)


def test_colors_of_ours_stay_and_all_others_are_escaped():
    line = "\x1b[31mred\x1b[0m \x1b[8mhidden \x1b[2J\rback"
    assert shown(line) == "\x1b[31mred\x1b[0m \\x1b[8mhidden \\x1b[2J\\rback"
    assert shown(line, has_colors=False) == ("\\x1b[31mred\\x1b[0m \\x1b[8mhidden \\x1b[2J\\rback")


def test_what_is_no_terminal_gets_no_colors_even_out_of_names(capsys):
    echo("a\x1b[31mb")
    echo("two\nlines\x07", is_line=False, err=True)
    assert capsys.readouterr() == ("a\\x1b[31mb\n", "two\nlines\\x07\n")
