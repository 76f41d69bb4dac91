"""Traces and reports in notebooks: what they say, well formed, escaped, and nothing that runs."""

from __future__ import annotations

import importlib.util
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import rankscope
from rankscope import report
from tests.models import DividesByZero

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x00"
OPEN = {"br", "img"}
"""Elements that have no end."""


class Seen(HTMLParser):
    """What a browser would see: text, elements and attributes; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.elements, self.attributes = "", Counter[str](), set[str]()
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        if tag not in OPEN:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += f"{data} "


def traced(out: Path, middle: torch.nn.Module, name: str = "middle") -> rankscope.Trace:
    torch.manual_seed(0)  # a middle that makes -inf alone would count as a mask
    model = torch.nn.Sequential()
    model.add_module("first", torch.nn.Linear(4, 4))
    model._modules[name] = middle  # add_module refuses dots, which hostile names have
    with rankscope.trace(model, out=out) as handle:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    return handle.open()


def safe(text: str) -> Seen:
    seen = Seen(text)
    assert not {"script", "img", "iframe", "link", "object"} & set(seen.elements)
    assert not [name for name in seen.attributes if name.startswith("on") or name == "src"]
    assert "://" not in text and "@import" not in text and "url(" not in text
    return seen


def test_a_trace_shows_verdict_first_finding_ranks_and_steps(tmp_path: Path):
    trace = traced(tmp_path / "trace", DividesByZero())
    seen = safe(trace._repr_html_())
    for words in (
        *("fault", "nonfinite-origin, 1 origin", "middle:output", "its inputs were finite"),
        *(
            "forward of train step 0",
            "1 rank on 1 host",
            "complete",
            "closed by the program",
            "train 0-1 traced",
        ),
    ):
        assert words in seen.text, words


def test_a_report_shows_what_was_found_of_one_trace_and_of_two(tmp_path: Path):
    clean, faulty = (
        traced(tmp_path / "clean", torch.nn.ReLU()),
        traced(tmp_path / "faulty", DividesByZero()),
    )
    assert "no fault found" in safe(rankscope.check(clean)._repr_html_()).text
    assert "nonfinite-origin" in safe(rankscope.check(faulty)._repr_html_()).text
    assert "fault" in safe(rankscope.diff(clean, faulty)._repr_html_()).text


def test_names_of_a_hostile_trace_are_text(tmp_path: Path):
    trace = traced(tmp_path / "trace", DividesByZero(), name=HOSTILE)
    for found in (trace, rankscope.check(trace)):
        seen = safe(found._repr_html_())
        assert "<script>alert(1)</script>" in seen.text
        assert "\u202e" not in seen.text and "\\u202e" in seen.text


def test_a_large_trace_is_shown_without_being_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trace = traced(tmp_path / "trace", DividesByZero())
    monkeypatch.setattr(report, "_MOST_JUDGED", 3)
    seen = safe(trace._repr_html_())
    assert "rankscope.check(trace)" in seen.text and "nonfinite" not in seen.text
    assert "1 rank on 1 host" in seen.text


def test_ranks_that_are_not_complete_stand_apart(tmp_path: Path):
    trace = traced(tmp_path / "trace", torch.nn.ReLU())
    (one,) = trace.completeness["ranks"]
    lost = {**one, "rank": 1, "received": one["committed"] - 64, "end": "lost", "complete": False}
    alike = [{**one, "rank": rank} for rank in (0, 2, 3)]
    trace.completeness = {"complete": False, "missing": "4-5", "ranks": [*alike, lost]}
    text = " ".join(safe(trace._repr_html_()).text.split())
    assert "ranks 0,2-3 closed by the program" in text and "rank 1 lost" in text
    assert "incomplete" in text and "ranks 4-5 nothing came from them" in text


@pytest.mark.skipif(
    importlib.util.find_spec("IPython") is None,
    reason="IPython is not installed: pip install -e '.[trackers]'",
)
def test_ipython_shows_the_html_and_the_line_of_text(tmp_path: Path):
    from IPython.core.formatters import DisplayFormatter

    trace = traced(tmp_path / "trace", torch.nn.ReLU())
    for found in (trace, rankscope.check(trace)):
        shown, _ = DisplayFormatter().format(found)
        assert shown["text/html"] == rankscope.report.fragment(found)
        assert "text/plain" in shown
