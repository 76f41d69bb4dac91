"""A page opens from a file and says first what is wrong; from there a click leads to the cell."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from rankscope.diagnosis.check import check
from rankscope.diagnosis.comparison.diff import diff
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.finding import Report, Verdict
from rankscope.tree.reader import open_trace
from tests.page.papertraces import PAPER
from tests.page.realtraces import REAL

SLOW = {"demo"}
"""What starts a launcher; `clean` is the same kind of job."""
SEEN = {"crash", "hang", "hostile", "unbounded", "nonfinite-origin", "diff-divergence"}
NAMES = [
    pytest.param(name, marks=[] if name in SEEN else pytest.mark.lab)
    for name in {**PAPER, **REAL}
    if name not in SLOW
]
CODE_BYTES = 100_000
DATA_BYTES = 10_000_000


def report_of(folder: Path) -> Report:
    file = folder / "layout.toml"
    layouts = LayoutFile.load(file) if file.exists() else None
    trace = open_trace(folder / "trace")
    if (folder / "reference").exists():
        return diff(open_trace(folder / "reference"), trace, layouts=layouts)
    return check(trace, layouts)


def shown(text: str) -> str:
    """Text as a browser shows it: each run of spaces as one."""
    return " ".join(text.split())


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_is_read_first_and_leads_to_the_cell(
    name: str, trace_of, page_of, open_page
) -> None:
    report = report_of(trace_of(name))
    page = open_page(page_of(name))
    first_words = "no fault found" if report.verdict is Verdict.CLEAN else report.verdict.value
    assert page.text("#verdict").lower().startswith(first_words)
    assert page.is_in_first_screen("#verdict .verdict")
    page.tab.locator("#grid [role=row]").first.wait_for()
    if not report.findings:
        assert page.tab.locator("a.to-map").count() == 0
        return
    first = report.findings[0]
    if report.origins:
        assert page.is_in_first_screen("#verdict dl.first")
        assert shown(first.message)[:200] in shown(page.text("#verdict"))
    page.tab.locator("a.to-map").first.click()
    told = page.detail(first.kind.value)
    assert told.startswith(first.path or "(root)")
    assert page.link["path"] == first.path and page.link["phase"] == first.phase.word
    assert str(first.ranks[0]) in re.findall(r"\d+", page.link["rank"])
    page.tab.locator("#grid .row.at:visible").wait_for()
    assert (
        page.tab.locator("#grid .row.at:visible .name")
        .get_attribute("title")
        .startswith(first.path or "(root)")
    )
    words = told.split("\n\n")[1]
    is_marked = not re.match("as the others|no call|same|to 0.1 of|to 1 x|not compared", words)
    assert is_marked or not report.origins, words


@pytest.mark.parametrize("name", ["clean", "hostile"])
def test_a_page_is_one_file_that_names_no_other(name: str, page_of) -> None:
    text = page_of(name).read_text()
    outside = r"""(?:src|href|action|data|poster|srcset)\s*=\s*["'](?!\#|data:)[^"']*"""
    markup = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.S)
    assert re.findall(outside, markup) == []
    assert "@import" not in text and "url(" not in text
    code = "".join(re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", text, flags=re.S))
    assert 10_000 < len(code) < CODE_BYTES
    assert len(text) < DATA_BYTES


def test_every_module_and_what_its_cells_say_is_text_of_the_file(trace_of, page_of) -> None:
    """For `grep`, for screen readers, for who has no JavaScript."""
    text = html.unescape(page_of("placement-mismatch").read_text())
    lines = text.partition('<pre id="text"')[2].partition("</pre>")[0].splitlines()
    by_path = {line.split("  ")[0].rpartition(">")[2]: line for line in lines}
    paths = {
        node.path or "(root)"
        for node in open_trace(trace_of("placement-mismatch") / "trace").walk()
    }
    assert paths <= {*by_path}
    (first, *_) = report_of(trace_of("placement-mismatch")).origins
    assert re.search(r"forward: .*differs \(rank 1, train step", by_path[first.path])


def test_without_javascript_the_verdict_and_the_text_are_there(page_of, open_page) -> None:
    page = open_page(page_of("crash"), java_script_enabled=False)
    assert "CUDA error" in page.text("#verdict")
    assert "needs JavaScript" in page.text("main")
    assert not page.tab.locator("#controls").is_visible()
    page.tab.locator("summary", has_text="Every cell").click()
    assert "layers.1.attention" in page.text("#text")
