"""Every form of a trace folder that was ever written is read, and says today what it said then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lab.golden import differences, facts
from tests.tree.record_forms import FORMS, said, unpacked


def of_today(before: str, now: str) -> list[str]:
    """Return in what two objects of a command differ, but for the time and for newer fields."""
    lines = differences(_told(before), _told(now))
    return [line for line in lines if not line.startswith("at ") and "was nothing" not in line]


def _told(text: str) -> Any:
    """Return the facts of an answer; `format` and `command` once stood among its result's."""
    said = json.loads(text)
    if "result" in said:
        said = {"verdict": said["status"], **said["result"]}
    for part in (said, said.get("check") or {}):
        part.pop("format", None), part.pop("command", None)
        # newer rules name another module of the same event, and compare more values
        for name in ("judged", "skipped", "alone", "compared"):
            part.pop(name, None)
        for finding in part.get("findings", ()):
            for name in ("path", "slot", "evidence", "victims"):
                finding.pop(name, None)
    return facts(said)


@pytest.mark.parametrize("form", FORMS)
def test_commands_say_of_an_old_trace_what_they_said_when_it_was_written(
    form: str, tmp_path: Path
) -> None:
    trace, before = unpacked(form, tmp_path)
    (tmp_path / "work").mkdir()
    now = said(trace, tmp_path / "work")
    assert before.keys() == now.keys()
    values, own = (each.pop("values.jsonl").splitlines() for each in (before, now))
    assert len(values) == len(own) >= 50
    for name, text in before.items():
        assert not of_today(text, now[name].replace(str(tmp_path), "")), name
    for number, (line, other) in enumerate(zip(values, own, strict=True)):
        assert not of_today(line, other), f"value {number}: {line}"


def test_the_forms_are_those_that_they_are_called(tmp_path: Path) -> None:
    files = {}
    for form in FORMS:
        trace, _ = unpacked(form, tmp_path / form)
        paths = sorted(str(p.relative_to(trace)) for p in trace.glob("**/*") if p.is_file())
        head = json.loads((trace / "trace.json").read_text()) if "trace.json" in paths else {}
        lives = {rank["incarnation"] for rank in head["run"]["ranks"]} if head else {0}
        kinds = {Path(path).parts[0] for path in paths}
        files[form] = (head.get("format"), bool(head.get("steps")), kinds, len(lives))
    whole = {"trace.json", "values.safetensors"}
    assert files == {
        "inline": ("rankscope.trace/1", True, whole, 1),
        "split": ("rankscope.trace/1", True, {*whole, "steps"}, 1),
        "tensors": ("rankscope.trace/1", True, {*whole, "tensors"}, 1),
        "grown": ("rankscope.trace/2", True, {"trace.json", "steps"}, 1),
        "half-grown": (None, False, {"spool", "steps"}, 1),
        "lives": ("rankscope.trace/1", True, {*whole, "findings.jsonl"}, 2),
        "columns": ("rankscope.trace/3", True, {"trace.json", "tree.json", "steps", "tensors"}, 1),
        "half-grown-columns": (None, False, {"spool", "steps"}, 1),
    }
