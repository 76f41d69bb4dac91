"""One list says what phases there are: every place that tells them apart reads it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from importlib import resources
from pathlib import Path

import rankscope
from rankscope.record.phases import Phase
from rankscope.tree.selection import default_phase
from tests import forked

PACKAGE = Path(rankscope.__file__).parent
DOCS = PACKAGE.parent.parent / "docs"
SCHEMA = json.loads((resources.files("rankscope.tree") / "trace.schema.json").read_text())
WORDS = [phase.word for phase in Phase]


def test_every_phase_has_its_facts() -> None:
    """A phase without them would fail at the first call that is asked for them."""
    assert all(phase.facts for phase in Phase)
    slots = [slot for phase in Phase for slot in phase.facts.slots]
    assert len(set(slots)) == len(slots), "a slot is meant in one phase"


def test_an_event_of_a_root_is_in_no_micro_batch() -> None:
    for phase in Phase:
        assert not (phase.facts.is_event and phase.facts.has_micro_batches), phase


def test_the_numbers_of_phases_in_spools_stay() -> None:
    old = ["setup", "forward", "recompute", "backward", "grads", "params", "collective"]
    assert WORDS[: len(old)] == old
    assert [int(phase) for phase in Phase] == list(range(len(WORDS)))


def test_the_schema_knows_the_phases() -> None:
    assert SCHEMA["$defs"]["node"]["properties"]["phase"]["enum"] == WORDS


def test_one_page_lists_the_phases_and_no_other_file_does() -> None:
    """Whoever adds a phase adds it there; what else tells of phases points to the list."""
    text = (DOCS / "trace-format.md").read_text()
    listed = text.partition("\n### Phases\n")[2].partition("\n#")[0]
    assert [word for word in WORDS if f"`{word}`" not in listed] == []
    files = [*DOCS.rglob("*.md"), *PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.json")]
    lists = {"docs/trace-format.md", "src/rankscope/record/phases.py"}
    lists.add("src/rankscope/tree/trace.schema.json")
    lists.add("src/rankscope/diagnosis/check.py")  # what each rule needs
    found = set()
    for path in files:
        lines = path.read_text().splitlines()
        ends = range(3, len(lines) + 3)
        passages = (set(re.findall(r"\w+", " ".join(lines[end - 3 : end]).lower())) for end in ends)
        if any(passage.issuperset(WORDS) for passage in passages):
            found.add(path.relative_to(DOCS.parent).as_posix())
        if all(f"Phase.{word.upper()}" in "\n".join(lines) for word in WORDS):
            found.add(path.relative_to(DOCS.parent).as_posix())
    assert found == lists


def test_a_slot_is_meant_in_the_phase_that_records_it() -> None:
    assert default_phase("grad:weight") is Phase.GRADS
    assert default_phase("grad_input.0") is Phase.BACKWARD
    assert default_phase("output.0") is Phase.FORWARD


NUMBER = """    ACCUMULATED = 7
    FROZEN = 8
"""
FACTS = """    Phase.FROZEN: PhaseFacts(
        is_event=True, slots=("state",), unequal="Look at what froze this state."
    ),
}
"""
JOB = """
import json, sys
from pathlib import Path
import numpy as np
from typer.testing import CliRunner
import rankscope
from rankscope.cli.app import app
from rankscope.record.phases import Phase
from rankscope.settings import settings_from
from tests.diagnosis.paper import PAIR, event, judged, module, numbers

folder = Path(sys.argv[1])

def write(rank):
    module(rank, "", numbers(0), numbers(1), mesh=PAIR)
    event(rank, Phase.FROZEN, "state", {"fc.scale": numbers(2 + rank.rank)}, mesh=PAIR)

def rankscope_says(*arguments):
    done = CliRunner().invoke(app, [str(word) for word in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output

report = judged(folder, 2, write)
trace = rankscope.open_trace(folder / "trace")
rankscope_says("export", folder / "trace", "--format", "jsonl", "--phase", "frozen",
               "--out", folder / "x.jsonl")
print(json.dumps({
    "package": rankscope.__file__,
    "setting": settings_from({"phases": "all"}, {}).phases[-1],
    "found": [(node.path, node.phase.word, node.micro_batch)
              for node in trace.find("*", phase="frozen")],
    "meant": str(trace.value("fc", "state:scale")),
    "show": rankscope_says("show", folder / "trace", "--phase", "frozen"),
    "jsonl": [json.loads(line)["phase"] for line in open(folder / "x.jsonl")],
    "origins": [(f.phase.word, f.path, f.slot, f.advice) for f in report.origins],
}))
"""


def test_a_phase_more_in_the_list_is_recorded_found_shown_exported_and_judged(
    tmp_path: Path,
) -> None:
    """In a copy of the package, with nothing changed but the list."""
    shutil.copytree(PACKAGE, tmp_path / "src/rankscope")
    file = tmp_path / "src/rankscope/record/phases.py"
    text = file.read_text()
    assert text.count("    ACCUMULATED = 7\n") == 1 and text.endswith("),\n}\n")
    file.write_text(text.replace("    ACCUMULATED = 7\n", NUMBER).removesuffix("}\n") + FACTS)
    (tmp_path / "job.py").write_text(JOB)
    paths = [str(tmp_path / "src"), str(DOCS.parent)]
    done = forked.run(
        [sys.executable, str(tmp_path / "job.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["package"]).is_relative_to(tmp_path)
    assert found["setting"] == "frozen"
    assert found["found"] == [["", "frozen", None], ["fc", "frozen", None]]
    assert found["meant"].startswith("state:scale float32[4, 6]"), "no phase named: the slot tells"
    assert "frozen" in found["show"] and "state:scale" in found["show"]
    assert set(found["jsonl"]) == {"frozen"}
    assert found["origins"] == [["frozen", "fc", "state:scale", "Look at what froze this state."]]
