"""A new setting takes its row and the place that uses it, a new trigger of the black box its row
and the place that sees it: no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launcher.ways import installed
from tests.packagecopy import answer_of, copied

pytestmark = [pytest.mark.launch, installed]

ROWS = {
    "settings.py": (
        "    perturb: int = _setting(",
        """
    depth: int = _setting(
        parse=_parse_whole, default="7", metavar="METRES", help="how deep it may become"
    )
""",
    ),
    "record/stepselection.py": (
        "    @property\n    def word(self)",
        """
    DEEP = TriggerFacts(
        meaning="a step as deep as deep:METRES says",
        words="rank {rank}: step {step} is {metres} m deep",
        otherwise="no step was deep",
        option="deep:METRES",
        parse=int,
    )
""",
    ),
}
"""File -> the line before which its row comes, and the row."""
SEES = (
    "agent/blackboxwatch.py",
    "        if event is StepEvent.BEGIN:\n            self._has_trained",
    """
        if event is StepEvent.BEGIN and step in self._selection.given[Trigger.DEEP]:
            self.tell(Trigger.DEEP, mode, step, metres=step)
""",
)
KEEPS = (
    "agent/blackboxwatch.py",
    "        self._steps = selection.last\n",
    "\n        self._selection = selection\n",
)

TRAINING = """
import os, pathlib, shutil, sys
import torch
shutil.copy(pathlib.Path(os.environ["RANKSCOPE_RUN_FOLDER"]) / "run.json", sys.argv[1])
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(9):
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

PROGRAM = """
import json, subprocess, sys
from pathlib import Path

import rankscope
from rankscope.record.stepselection import Trigger
from rankscope.settings import SETTINGS, misspelt_variables
from rankscope.tree.reader import open_trace
from tests.launcher import test_docs

folder = Path(sys.argv[1])
WRAPPER = "import sys; from rankscope_launcher.runcommand import main; main(sys.argv[1:])"

def run(*words):
    done = subprocess.run(
        [sys.executable, "-c", WRAPPER, *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done

def job(name, steps):
    words = ["--rs-out", folder / name, "--rs-spool", folder / "spool", "--rs-steps", steps]
    script = [folder / "training.py", folder / f"{name}.json"]
    return run(*words, "--rs-depth", "9", "--nproc-per-node", 1, *script)

def is_missing(test, row):
    try:
        test(row)
    except (AssertionError, ValueError):
        return True
    return False

(quiet, happened) = (job("quiet", "last:2,deep:50"), job("trace", "last:2,deep:5"))
trace = open_trace(folder / "trace")
print(json.dumps({
    "package": rankscope.__file__,
    "help": " ".join(run("--help").stdout.split()),
    "run.json": json.loads((folder / "trace.json").read_text())["settings"],
    "settings": dict(trace.run["settings"]),
    "steps": [step.step for step in trace.steps],
    "notes": trace.happened,
    "asked": trace.completeness["asked"],
    "quiet": quiet.stderr.splitlines()[-1],
    "misspelt": misspelt_variables({"RANKSCOPE_DEPTH": "1"}),
    "not in the pages": [
        *(s.name for s in SETTINGS
          if is_missing(test_docs.test_every_setting_stands_in_the_page_with_its_default, s)),
        *(t.word for t in Trigger
          if is_missing(test_docs.test_every_trigger_stands_in_the_pages_with_what_it_means, t)),
    ],
}))
"""


def with_new_rows(package: Path) -> None:
    """Change a copy of the package: a row for a setting and one for a trigger, and the place that
    sees the trigger."""
    changes = [(name, *change) for name, change in ROWS.items()]
    for name, line, text in (*changes, SEES, KEEPS):
        file = package / name
        before = file.read_text()
        assert before.count(line) == 1, f"{name} has no single {line!r}: change this test"
        file.write_text(before.replace(line, text.lstrip("\n") + line))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a package with one setting and one trigger more says, and does in a job."""
    folder = tmp_path_factory.mktemp("rows")
    with_new_rows(copied(folder))
    (folder / "training.py").write_text(TRAINING)
    return answer_of(folder, PROGRAM, folder)


def test_a_new_row_stands_on_the_command_line(found: dict[str, Any]) -> None:
    assert "--rs-depth METRES how deep it may become (default 7)" in found["help"]
    assert "watch:PATH:SLOT, deep:METRES (default 0-2)" in found["help"]
    assert "; a step as deep as deep:METRES says" in found["help"]
    assert not found["misspelt"]


def test_a_new_row_stands_in_run_json(found: dict[str, Any]) -> None:
    assert found["run.json"]["depth"] == "9"
    assert found["run.json"]["steps"] == "last:2,deep:5"


def test_a_new_row_stands_in_the_trace(found: dict[str, Any]) -> None:
    assert found["settings"]["depth"] == "9"
    assert found["settings"]["steps"] == "last:2,deep:5"
    assert found["steps"] == [3, 4, 5]
    words = "rank 0: step 5 is 5 m deep"
    assert found["notes"] == [f"train step 5: black box: {words}"]
    (event,) = found["asked"]
    assert (event["event"], event["text"]) == ("deep", words)
    assert found["quiet"].endswith(", no step was deep")


def test_a_new_row_is_missed_in_the_pages(found: dict[str, Any]) -> None:
    assert found["not in the pages"] == ["depth", "deep"]
