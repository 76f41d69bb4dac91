"""A page of a large trace stays small, and makes only what is in sight."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankscope.tree.reader import open_trace
from tests.lab.page.bigtrace import big_trace
from tests.page.driven import write_page

LARGEST = 10_000_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of 64 ranks, 400 modules, 4 steps; rank 21 is wrong from step 2 on."""
    folder = tmp_path_factory.mktemp("large")
    trace = big_trace(folder / "trace", ranks=64, modules=400, steps=4)
    return write_page(open_trace(trace), folder / "page.html")


def looked_at(page, modules: int, rank: int) -> None:
    """Scroll through all modules, unfold all ranks, open the cell of the finding."""
    made = "document.querySelectorAll('#grid [role=row]').length"
    page.tab.locator("#unfold-all").click()
    page.wait(f"+grid.getAttribute('aria-rowcount') >= {modules}")
    assert page.tab.evaluate(made) < 80
    page.tab.evaluate("void (scroller.scrollTop = scroller.scrollHeight)")
    page.wait(
        "[...document.querySelectorAll('#grid [role=row]:not([hidden])')].some("
        "(e) => e.getAttribute('aria-rowindex') === grid.getAttribute('aria-rowcount'))"
    )
    assert page.tab.evaluate(made) < 80
    page.tab.locator("#groups button").first.click()
    page.wait("document.querySelector('#spacer').scrollWidth > 400")
    page.tab.locator("a.to-map").first.click()
    told = page.detail("replica-mismatch")
    assert re.search(rf"B rank {rank}\b|rank {rank} \(this\)", told), told[:2000]


def test_only_what_is_in_sight_is_made(large: Path, open_page) -> None:
    assert large.stat().st_size < LARGEST / 2
    page = open_page(large)
    page.tab.locator("#grid [role=row]").first.wait_for()
    assert page.is_in_first_screen("#verdict dl.first")
    looked_at(page, 400, 21)
    page.tab.locator("#filter").fill("layers.19.*")
    page.wait("+grid.getAttribute('aria-rowcount') < 30")


def test_a_narrow_page_says_whose_values_are_not_here(trace_of, tmp_path: Path, open_page) -> None:
    trace = open_trace(trace_of("missing") / "trace")
    out = write_page(trace, tmp_path / "page.html", path="layers.1*")
    page = open_page(out, fragment="path=layers.0.norm&step=0&phase=forward&rank=0")
    told = page.detail("layers.0.norm")
    assert "as the others" in told and "--path" in told
    assert page.text("#left-out") in told
    page.tab.evaluate("location.hash = 'path=layers.1.norm&step=0&phase=forward&rank=0'")
    page.wait("document.querySelector('#detail h3').textContent === 'layers.1.norm'")
    assert page.tab.locator("#detail .slot table").count() > 0


@pytest.mark.soak
def test_the_largest_trace_gives_a_page_below_ten_megabytes(tmp_path: Path, open_page) -> None:
    trace = big_trace(tmp_path / "trace", ranks=256, modules=2000, steps=10)
    out = write_page(open_trace(trace), tmp_path / "page.html")
    assert out.stat().st_size < LARGEST
    page = open_page(out)
    page.tab.locator("#grid [role=row]").first.wait_for()
    assert not page.tab.locator("#left-out").is_visible(), "all values fit"
    looked_at(page, 2000, 85)
