"""The map, as far as its first test in tests/page does not go: folding, keys, filters, details."""

from __future__ import annotations

import re

from rankscope.record.phases import Phase
from tests.page.driven import Driven
from tests.page.test_map import ACT
from tests.page.test_map import grouped as grouped
from tests.page.test_map import infinity as infinity
from tests.waiting import wait_until


def rows_there_are(page: Driven) -> int:
    """How many rows the map has, in sight or not."""
    return int(page.tab.locator("#grid").get_attribute("aria-rowcount"))


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
