"""One list says what phases there are: every place that tells them apart reads it."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

import rankscope
from rankscope.record.call import Phase
from rankscope.tree.selection import default_phase

DOCS = Path(rankscope.__file__).parent.parent.parent / "docs"
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


@pytest.mark.parametrize("page", ["commands/show.md", "trace-format.md", "glossary.md"])
def test_the_pages_name_every_phase(page: str) -> None:
    text = (DOCS / page).read_text().replace("`", " ").replace(",", " ").replace(";", " ").split()
    assert [word for word in WORDS if word not in text] == []


def test_a_slot_is_meant_in_the_phase_that_records_it() -> None:
    assert default_phase("grad:weight") is Phase.GRADS
    assert default_phase("grad_input.0") is Phase.BACKWARD
    assert default_phase("output.0") is Phase.FORWARD
