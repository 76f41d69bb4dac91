"""A new rule takes a file and its row, a new kind of finding its row and its words: no more."""

from __future__ import annotations

from typing import Any

import pytest

from tests.packagecopy import answer_of, copied

RULE = '''
"""Outputs of a module that are colder than any should be."""

from __future__ import annotations

from collections.abc import Iterator

from rankscope.diagnosis.context import Candidate, JudgedStep
from rankscope.record.finding import Kind
from rankscope.record.phases import Phase


def cold_outputs(step_view: JudgedStep) -> Iterator[Candidate]:
    """Yield a candidate for every output whose mean is below -1."""
    for values in step_view.values(Phase.FORWARD):
        if values.slot == "output" and (values.column("mean") < -1).any():
            step_view.context.coverage.applied(values)
            yield step_view.candidate(values, Kind.COLD, values.ranks, "is colder than -1")
'''
ROWS = {
    "diagnosis/check.py": (
        "    StepRule(\n        other_batches,",
        '    StepRule(cold_outputs, "cold outputs", {_FORWARD}),\n',
    ),
    "record/finding.py": ('    CRASH = "crash"\n', '    COLD = "too-cold"\n'),
}
IMPORT = (
    "diagnosis/check.py",
    "from rankscope.diagnosis.rules.collectives import",
    "from rankscope.diagnosis.rules.cold import cold_outputs\n",
)
WORDS = ("record/finding.py", "    Kind.STRUCTURE: ", '    Kind.COLD: "Warm it up.",\n')

PROGRAM = """
import json, subprocess, sys
from pathlib import Path

import torch

import rankscope
from rankscope.record.finding import Kind
from tests.companion.running.replayed import replayed
from tests.launcher import test_docs

folder = Path(sys.argv[1])

def traced(name, **how):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    torch.nn.init.constant_(model[0].bias, -9.0)
    with rankscope.trace(model, out=folder / name, **how):
        model(torch.zeros(1, 2)).sum().backward()
    return folder / name

def run(*words):
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout

def is_missing(test, row):
    try:
        test(row)
    except AssertionError:
        return True
    return False

trace = traced("trace", keep_spool=True)
(folder / "live").mkdir()
run("report", trace, "--out", folder / "page.html")
answer = json.loads(run("check", trace, "--json"))
print(json.dumps({
    "package": rankscope.__file__,
    "terminal": run("check", trace),
    "json": answer.get("result", answer)["findings"],
    "page": (folder / "page.html").read_text(),
    "while it ran": replayed(trace, folder / "live"),
    "without": run("check", traced("bare", phases="setup")),
    "not in the pages": [
        kind.value for kind in Kind
        if is_missing(test_docs.test_every_kind_of_finding_stands_in_a_page, kind)
    ],
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a package with one rule and one kind of finding more says of a trace."""
    folder = tmp_path_factory.mktemp("rule")
    package = copied(folder)
    (package / "diagnosis/rules/cold.py").write_text(RULE.lstrip())
    for name, line, text in (*((name, *row) for name, row in ROWS.items()), IMPORT, WORDS):
        file = package / name
        before = file.read_text()
        assert before.count(line) == 1, f"{name} has no single {line!r}: change this test"
        file.write_text(before.replace(line, text + line))
    return answer_of(folder, PROGRAM, folder)


def test_a_new_rule_says_its_finding_in_the_terminal(found: dict[str, Any]) -> None:
    first, *rest = found["terminal"].splitlines()
    assert first.startswith("fault: too-cold, 1 origin")
    assert "0:output: is colder than -1" in "\n".join(rest)
    assert "Warm it up." in found["terminal"]


def test_a_new_rule_says_its_finding_as_data(found: dict[str, Any]) -> None:
    kinds = {(each["kind"], each["path"], each["advice"]) for each in found["json"]}
    assert ("too-cold", "0", "Warm it up.") in kinds


def test_a_new_rule_says_its_finding_on_the_page(found: dict[str, Any]) -> None:
    assert "too-cold" in found["page"] and "Warm it up." in found["page"]


def test_a_new_rule_says_its_finding_while_the_job_runs(found: dict[str, Any]) -> None:
    kinds = {(line.get("kind"), line.get("path")) for line in found["while it ran"]}
    assert ("too-cold", "0") in kinds


def test_a_new_rule_is_silent_where_the_trace_lacks_what_it_needs(found: dict[str, Any]) -> None:
    assert "too-cold" not in found["without"]
    assert "not judged without forward" in found["without"]


def test_a_new_kind_is_missed_in_the_pages(found: dict[str, Any]) -> None:
    assert found["not in the pages"] == ["too-cold"]
