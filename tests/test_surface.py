"""What people's programs and scripts rest on is there as it was; what is new has to be accepted."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.lab import surface

_ADVICE = (
    "what people rest on has changed: keep it, or say so in docs/changelog.md and run "
    "`python -m tests.lab.surface --accept`"
)


def test_what_is_public_is_what_was_written_down() -> None:
    frozen, now = json.loads(surface.FILE.read_text()), surface.surface()
    changed = {
        name: (frozen.get(name, "was not there"), now.get(name, "is gone"))
        for name in frozen.keys() | now.keys()
        if frozen.get(name) != now.get(name)
    }
    assert not changed, _ADVICE


def test_the_surface_has_every_kind_of_name() -> None:
    frozen = json.loads(surface.FILE.read_text())
    for name in (
        "rankscope.trace",
        "rankscope.Trace.walk",
        "rankscope.testing.assert_same",
        "rankscope.errors.TraceError",
        "rankscope.integrations.verl.StepTracer",
        "rankscope.compat.capture_outputs",
        "rankscope check --json",
        "rankscope diff REF",
        "--rs-steps",
        "RANKSCOPE_STEPS",
        "entry point torchrun.logs_specs rankscope",
    ):
        assert name in frozen


def test_every_name_that_the_docs_call_public_is_in_it() -> None:
    page = (Path(__file__).parents[1] / "docs/questions.md").read_text()
    table = page.partition("### What is the public API?")[2].partition("\n\nWhat these names")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    told = {f"{m.strip().strip('`')}.{n.strip('`')}" for m, names in rows for n in names.split()}
    assert len(told) > 25
    assert told <= json.loads(surface.FILE.read_text()).keys()


@pytest.mark.parametrize(
    ("source", "signature"),
    [
        ("def f(a: int, *, b: str = '') -> None: ...", {"f": "(a: int, *, b: str='') -> None"}),
        ("class C(Base):\n def _hidden(self): ...", {"C": "class(Base)"}),
        ("class C:\n x: int", {"C": "class()", "C.x": "int"}),
        ("class C:\n @property\n def f(self) -> str: ...", {"C": "class()", "C.f": " -> str"}),
    ],
)  # fmt: skip
def test_a_signature_is_what_a_name_takes_and_gives(source: str, signature: dict[str, str]) -> None:
    name = next(iter(signature))
    assert dict(surface._signatures(ast.parse(source), name)) == signature
