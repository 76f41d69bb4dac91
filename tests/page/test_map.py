"""The map: what unfolds, what is filtered, where links and keys lead, what stands under a cell."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import rankscope
from rankscope.record.phases import Phase
from rankscope.tree.reader import open_trace
from tests.cli.test_commands import rankscope as command
from tests.page.driven import Driven, write_page
from tests.tree.record_golden import rebuilt, unpacked
from tests.waiting import wait_until

ACT = "layers.1.feed_forward.act"
"""Where the infinity of the page `nonfinite-origin` begins, in step 3 on rank 1."""


@pytest.fixture
def infinity(page_of, open_page) -> Driven:
    """The page of four ranks and four steps in which all ranks differ, from its first view."""
    page = open_page(page_of("nonfinite-origin"), height=1400)
    page.tab.locator("#grid [role=row]").first.wait_for()
    return page


@pytest.fixture
def grouped(page_of, open_page) -> Driven:
    """The page in which ranks 0 and 2 are alike, and 1 and 3."""
    page = open_page(page_of("group-mismatch"), height=1400)
    page.tab.locator("#grid [role=row]").first.wait_for()
    return page


def rows_there_are(page: Driven) -> int:
    """How many rows the map has, in sight or not."""
    return int(page.tab.locator("#grid").get_attribute("aria-rowcount"))


# ---- folding -------------------------------------------------------------------------------------


def test_a_group_of_ranks_unfolds_and_folds(grouped: Driven) -> None:
    def ranks_told() -> set[str]:
        told = [re.search(r", ranks? ([\d,-]+): (?!alike)", each) for each in grouped.tips("embed")]
        return {match[1] for match in told if match}

    assert ranks_told() == {"0,2", "1,3"}
    button = grouped.tab.locator("#groups button", has_text="ranks 0,2")
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert button.evaluate("e => e === document.activeElement")
    assert wait_until(lambda: ranks_told() == {"0", "2", "1,3"}, 60)
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert wait_until(lambda: ranks_told() == {"0,2", "1,3"}, 60)


def test_a_click_on_the_head_of_a_group_unfolds_it(grouped: Driven) -> None:
    found = grouped.tips("embed")
    cells = grouped.tab.locator("#cells").bounding_box()
    x = next(place[0] for told, place in found.items() if "ranks 1,3:" in told)
    for y in range(2, 40, 6):
        grouped.tab.mouse.move(x, cells["y"] + y)
        if grouped.text("#tip").startswith("ranks 1,3: alike everywhere; click to unfold"):
            grouped.tab.mouse.click(x, cells["y"] + y)
            break
    assert wait_until(lambda: any(", rank 3:" in told for told in grouped.tips("embed")), 60)


def test_modules_fold_and_unfold(infinity: Driven) -> None:
    everything = rows_there_are(infinity)
    assert {"layers.1", "layers.2", ACT} <= {*infinity.rows()}
    infinity.tab.locator("#fold-all").click()
    infinity.wait("document.querySelectorAll('#grid [role=row]:not([hidden])').length < 8")
    assert [*infinity.rows()] == ["(root)", "embed", "positions", "layers", "norm", "head"]
    layers = infinity.tab.locator("#grid [role=row]:visible", has_text="layers")
    assert layers.get_attribute("aria-expanded") == "false"
    layers.locator(".fold").click()
    infinity.wait("document.querySelectorAll('#grid [role=row]:not([hidden])').length > 8")
    assert [*infinity.rows()][3:7] == ["layers", "layers.0", "layers.1", "layers.2"]
    infinity.tab.locator("#unfold-all").click()
    infinity.wait(f"+grid.getAttribute('aria-rowcount') === {everything}")


def test_a_folded_module_shows_what_is_wrong_inside(infinity: Driven) -> None:
    infinity.tab.locator("#fold-all").click()
    infinity.wait("document.querySelectorAll('#grid [role=row]:not([hidden])').length < 8")
    assert wait_until(
        lambda: any(
            "inside: not finite" in told and "rank 1:" in told for told in infinity.tips("layers")
        ),
        60,
    )


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


def test_phases_ranks_and_slots_are_filtered(infinity: Driven) -> None:
    infinity.tab.locator("#axis").select_option("ranks")

    def columns() -> set[tuple[str, str]]:
        said = [
            re.search(r", (\w+) of .*?, ranks? (\S+?):", told) for told in infinity.tips("head")
        ]
        return {(match[1], match[2]) for match in said}

    assert {phase for phase, _ in columns()} >= {"forward", "backward", "grads", "params"}
    for phase in ("backward", "grads", "params", "collective", "setup"):
        box = infinity.tab.get_by_label(phase, exact=True)
        if box.count():
            box.uncheck()
    assert columns() == {("forward", f"{rank}") for rank in range(4)}
    infinity.tab.locator("#ranks").fill("1-2")
    assert columns() == {("forward", "1"), ("forward", "2")}
    assert infinity.link["ranks"] == "1-2" and infinity.link["phases"] == "forward"
    infinity.tab.locator("#ranks").fill("first")
    assert infinity.tab.locator("#ranks").get_attribute("aria-invalid") == "true"
    infinity.tab.locator("#ranks").fill("")
    infinity.tab.locator("#slots").fill("input*")
    assert wait_until(lambda: not any("not finite" in text for text in infinity.tips(ACT)), 60)
    infinity.tab.locator("#slots").fill("output*")
    assert wait_until(lambda: any("not finite" in text for text in infinity.tips(ACT)), 60)


# ---- steps and links -----------------------------------------------------------------------------


def test_the_slider_goes_over_the_steps(infinity: Driven) -> None:
    infinity.tab.locator("#axis").select_option("ranks")
    assert infinity.text("#step-name") == "train step 3"
    assert wait_until(lambda: any("not finite" in told for told in infinity.tips(ACT)), 60)
    infinity.tab.locator("#step").focus()
    infinity.press("ArrowLeft")
    assert infinity.text("#step-name") == "train step 2" and infinity.link["step"] == "2"
    infinity.tab.locator("#step-back").click()
    assert infinity.link["step"] == "1"
    told = infinity.tips(ACT)
    assert told and all("of train step 1" in each and "not finite" not in each for each in told)
    infinity.tab.locator("#step-on").click()
    infinity.tab.locator("#step").press("End")
    assert infinity.link["step"] == "3"


def test_columns_may_be_steps(infinity: Driven) -> None:
    infinity.tab.locator("#axis").select_option("steps")
    assert wait_until(lambda: any("not finite" in told for told in infinity.tips(ACT)), 60)
    told = infinity.tips(ACT)
    wrong = {re.search(r"of (.*?),", each)[1] for each in told if "not finite" in each}
    assert wrong == {"train step 3"}
    assert infinity.link["columns"] == "steps"


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


def test_a_link_to_what_is_not_there_says_so(page_of, open_page) -> None:
    page = open_page(page_of("crash"), fragment="path=nothing&step=9&phase=forward&rank=77")
    page.tab.locator(
        "#no-match", has_text="This page has no step 9 and no module nothing"
    ).wait_for()
    assert not page.tab.locator("#detail").is_visible()
    page.tab.set_viewport_size({"width": 900, "height": 700})
    page.wait("document.querySelector('#scroller').clientWidth < 880")
    assert "no module nothing" in page.text("#no-match")
    page.tab.locator("#fold-all").click()
    page.wait("document.querySelector('#no-match').textContent === ''")


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


def test_keys_change_the_step_go_to_findings_and_to_the_filter(infinity: Driven) -> None:
    infinity.tab.locator("#grid").focus()
    infinity.press("f")
    assert infinity.detail("nonfinite-origin").startswith(ACT)
    infinity.press(",")
    assert infinity.link["step"] == "2"
    infinity.press(".")
    assert infinity.link["step"] == "3"
    infinity.press("/", "e", "m", "b", ",", "f")
    assert infinity.tab.locator("#filter").input_value() == "emb,f"
    assert infinity.link["step"] == "3", "keys in a field are text"


def test_rows_unfold_by_keys_and_say_so(infinity: Driven) -> None:
    infinity.tab.locator("#fold-all").click()
    infinity.tab.locator("#grid").focus()
    at = "document.querySelector('#grid .row.at .name').title.split('  ')[0]"
    infinity.wait(f"{at} === 'layers'")  # around the module that was looked at
    infinity.press("Home", "Shift+Home", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown")
    infinity.wait(f"{at} === 'norm'")
    infinity.press("ArrowUp", "ArrowRight")
    infinity.wait(
        "document.querySelector('#grid .row.at').getAttribute('aria-expanded') === 'true'"
    )
    infinity.press("ArrowLeft")
    infinity.wait(
        "document.querySelector('#grid .row.at').getAttribute('aria-expanded') === 'false'"
    )


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


def test_the_detail_leads_to_producers_and_consumers(infinity: Driven) -> None:
    infinity.tab.locator("a.to-map").first.click()
    infinity.detail("nonfinite-origin")
    button = infinity.tab.locator("#detail .links button", has_text="up_proj").first
    button.click()
    told = infinity.detail("layers.1.feed_forward.up_proj")
    assert told.startswith("layers.1.feed_forward.up_proj")
    assert infinity.link["path"] == "layers.1.feed_forward.up_proj"
    assert infinity.tab.evaluate("document.activeElement.id") == "detail"


def test_the_detail_has_trend_and_layout(page_of, open_page) -> None:
    page = open_page(
        page_of("clean"), fragment="path=layers.0.attention.q_proj&step=1&phase=forward"
    )
    page.detail("layers.0.attention.q_proj")
    assert page.tab.locator("#detail figure svg, #detail svg .line").count() > 0
    picture = page.tab.locator("#detail svg[aria-label^=mesh]").first
    assert "tp=2" in picture.get_attribute("aria-label")
    held = picture.locator("text").all_text_contents()
    assert {each[0] for each in held} >= {"0", "1", "2", "3"}


def test_the_detail_says_how_to_keep_the_elements_of_a_finding(infinity: Driven) -> None:
    infinity.tab.locator("a.to-map").first.click()
    told = infinity.detail("nonfinite-origin")
    assert f"rankscope run --rs-tensors '{ACT}:output'" in told


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


def test_a_collective_says_who_takes_part(page_of, open_page) -> None:
    page = open_page(page_of("hang"), fragment="path=layers.1.gate&step=1&phase=collective&rank=0")
    told = page.detail("all_reduce")
    assert "all_reduce(sum)" in told and "over 0-3" in told
    assert re.search(r"unfinished on ranks? 0-1,3", told)


def test_phases_of_findings_are_phases_of_the_map(page_of, open_page) -> None:
    """Every phase has a letter of its own in the head of the map."""
    page = open_page(page_of("recompute-mismatch"))
    page.tab.locator("#legend em").wait_for()
    told = page.text("#legend em")
    words = {phase.word for phase in Phase}
    letters = dict(reversed(each.split(" ", 1)) for each in told.split(", "))
    assert {*letters} <= words and len({*letters.values()}) == len(letters)


def test_the_loss_is_a_chart_over_the_steps_and_tells_a_step_that_is_not_finite(
    page_of, open_page, shot
) -> None:
    page = open_page(page_of("losses"))
    page.tab.locator("#chart-list figure", has_text="Loss by step").wait_for()
    figure = page.tab.locator("#chart-list figure", has_text="Loss by step")
    assert figure.locator("path.line").count() == 3, "mean, least and greatest of the ranks"
    assert figure.locator("text.odd").count() == 1
    label = figure.locator("svg").get_attribute("aria-label")
    assert label.startswith("Loss by step: mean: largest train step 0 4.75")
    figure.screenshot(path=shot("loss"))
    page.tab.screenshot(path=shot("losses"), full_page=True)
