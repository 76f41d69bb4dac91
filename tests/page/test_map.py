"""The map: what unfolds, what is filtered, where links and keys lead, what stands under a cell."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import rankscope
from rankscope.tree.reader import open_trace
from tests.cli.test_commands import rankscope as command
from tests.page.driven import Driven, write_page
from tests.tree.record_golden import rebuilt, unpacked
from tests.waiting import wait_until

ACT = "layers.1.feed_forward.act"
"""Where the infinity of the page `nonfinite-origin` begins, in step 3 on rank 1."""

NORM = "layers.1.feed_forward_norm"
"""What rank 1 has in another dtype in the page `dtype-mismatch`."""


@pytest.fixture
def infinity(page_of, open_page) -> Driven:
    """The page of four ranks and four steps in which all ranks differ, from its first view."""
    page = open_page(page_of("nonfinite-origin"), height=1400)
    page.tab.locator("#grid [role=row]").first.wait_for()
    return page


@pytest.fixture
def grouped(page_of, open_page) -> Driven:
    """The page in which rank 1 alone has another dtype."""
    page = open_page(page_of("dtype-mismatch"), height=1400)
    page.tab.locator("#grid [role=row]").first.wait_for()
    return page


# ---- folding -------------------------------------------------------------------------------------


def test_a_group_of_ranks_unfolds_and_folds(grouped: Driven) -> None:
    def ranks_told() -> set[str]:
        told = [re.search(r", ranks? ([\d,-]+): (?!alike)", each) for each in grouped.tips(NORM)]
        return {match[1] for match in told if match}

    assert ranks_told() == {"0,2-3", "1"}
    button = grouped.tab.locator("#groups button", has_text="ranks 0,2-3")
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert button.evaluate("e => e === document.activeElement")
    assert wait_until(lambda: ranks_told() == {"0", "1", "2", "3"}, 60)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert wait_until(lambda: ranks_told() == {"0,2-3", "1"}, 60)


# ---- filters -------------------------------------------------------------------------------------


def test_modules_are_filtered_by_a_glob_and_by_a_part_of_the_path(infinity: Driven) -> None:
    field = infinity.tab.locator("#filter")
    field.fill("layers.1.feed_forward.*")
    infinity.wait("+grid.getAttribute('aria-rowcount') === 7")
    outer = ["(root)", "layers", "layers.1", "layers.1.feed_forward"]
    infinity.wait("document.querySelectorAll('#grid [role=row]:not([hidden])').length === 7")
    inner = [f"layers.1.feed_forward.{name}" for name in ("up_proj", "act", "down_proj")]
    assert [*infinity.rows()] == outer + inner
    assert infinity.link["filter"] == "layers.1.feed_forward.*"
    field.fill("2.attention.q")
    infinity.wait("+grid.getAttribute('aria-rowcount') === 5")
    infinity.wait("document.querySelectorAll('#grid [role=row]:not([hidden])').length === 5")
    assert [*infinity.rows()][-1] == "layers.2.attention.q_proj"
    field.fill("nobody")
    infinity.tab.locator("#no-match", has_text="No module matches nobody").wait_for()
    field.fill("")
    infinity.wait("+grid.getAttribute('aria-rowcount') > 20")


# ---- steps and links -----------------------------------------------------------------------------


def test_a_link_lands_on_the_cell_and_follows_whoever_moves(page_of, open_page) -> None:
    page = open_page(
        page_of("nonfinite-origin"), fragment=f"path={ACT}&step=3&phase=forward&rank=1"
    )
    first = page.detail("nonfinite-origin")
    assert first.startswith(ACT) and "forward of train step 3, rank 1" in first
    before = page.link
    page.tab.locator("#grid").focus()
    page.press("ArrowDown", "Enter")
    page.wait(f"!document.querySelector('#detail h3').textContent.includes('{ACT}')")
    assert page.link["path"] != before["path"]
    told = page.text("#detail")
    again = open_page(page_of("nonfinite-origin"), fragment=page.tab.url.partition("#")[2])
    again.detail(told.split("\n")[0])
    assert again.text("#detail") == told
    again.tab.evaluate(f"location.hash = 'path={ACT}&step=3&phase=forward&rank=1'")
    assert again.detail("nonfinite-origin").startswith(ACT)


# ---- keys ----------------------------------------------------------------------------------------


def test_the_keyboard_alone_reaches_a_cell_and_comes_back(page_of, open_page) -> None:
    page = open_page(page_of("placement-mismatch"))
    page.tab.locator("#grid [role=row]").first.wait_for()
    for _ in range(60):
        page.press("Tab")
        if page.tab.evaluate("document.activeElement.id") == "grid":
            break
    assert page.tab.evaluate("document.activeElement.id") == "grid", page.focused()
    page.press("Home", "ArrowRight", "ArrowRight")
    page.wait("said.textContent !== ''")
    told = page.tab.locator("#said").text_content()
    assert re.match(r"layers\.1\.feed_forward\.inner, .*, ranks? [\d,-]+: ", told), told
    assert page.tab.locator("#grid").get_attribute("aria-activedescendant")
    page.press("Enter")
    detail = page.detail("layers.1.feed_forward.inner")
    assert page.tab.evaluate("document.activeElement.id") == "detail"
    assert page.is_in_first_screen("#detail h3")
    page.press("Escape")
    assert page.tab.evaluate("document.activeElement.id") == "grid"
    page.press("ArrowUp", "Enter")
    page.wait(f"document.querySelector('#detail').innerText !== {detail!r}")


# ---- under a cell --------------------------------------------------------------------------------


def test_the_detail_has_the_recorded_values(trace_of, page_of, open_page) -> None:
    page = open_page(
        page_of("nonfinite-origin"), fragment=f"path={ACT}&step=3&phase=forward&rank=1"
    )
    page.detail("nonfinite-origin")
    slot = page.tab.locator("#detail .slot.found")
    head = slot.locator("thead th").all_inner_texts()
    rows = [line.locator("td").all_inner_texts() for line in slot.locator("tbody tr").all()]
    trace = open_trace(trace_of("nonfinite-origin") / "trace")
    recorded = trace.value(ACT, "output", step=3).per_rank
    assert len(rows) == len(recorded) == 4
    for rank, digest in recorded.items():
        (row,) = (each for each in rows if re.search(rf"rank {rank}\b", each[0]))
        for name in ("mean", "std", "min", "max", "l2"):
            shown = float(row[head.index(name)].replace(",", ""))
            assert shown == pytest.approx(getattr(digest, name), rel=1e-4), name
        assert row[head.index("posinf")] == str(digest.posinf)
    assert "(this)" in next(each[0] for each in rows if "rank 1" in each[0])


def test_the_line_that_prints_what_was_kept_prints_it(tmp_path: Path, open_page) -> None:
    out = tmp_path / "it's a trace"
    rebuilt(unpacked("by_hand", tmp_path / "records"), out)
    page = open_page(write_page(open_trace(out), tmp_path / "page.html"))
    page.tab.evaluate("location.hash = 'path=feed.up&step=0&phase=forward&rank=1'")
    page.detail("rankscope tensor")
    line = page.tab.locator("#detail .copy code", has_text="rankscope tensor").first.inner_text()
    program, *words = shlex.split(line)
    assert program == "rankscope" and str(out) in words
    code, printed, said = command(*words)
    assert code == 0, said
    value = rankscope.open_trace(out).value("feed.up", "output", step=0)
    rank = int(words[words.index("--rank") + 1])
    assert rank == 1
    assert str([*value.local(rank).shape]) in printed
