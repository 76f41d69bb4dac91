"""Light and dark, on paper, with large text and without motion."""

from __future__ import annotations

from tests.page.test_looks import COLOURS, ready


def test_light_and_dark_have_colours_of_their_own_and_change_while_open(page_of, open_page) -> None:
    page = ready(open_page(page_of("nonfinite-origin")))
    paper = "getComputedStyle(document.body).backgroundColor"
    light, light_cells = page.tab.evaluate(paper), page.tab.evaluate(COLOURS)
    assert light == "rgb(255, 255, 255)" and len(light_cells) == 3
    page.tab.emulate_media(color_scheme="dark")
    page.wait(f"{paper} !== '{light}'")
    page.tab.wait_for_function(
        f"(was) => !({COLOURS})().some((each) => was.includes(each))", arg=light_cells
    )


def test_on_paper_verdict_and_map_are_whole_and_controls_are_gone(page_of, open_page, shot) -> None:
    page = ready(open_page(page_of("nonfinite-origin"), scheme="dark"))
    page.tab.emulate_media(media="print")
    page.wait("(e => e.scrollHeight <= e.clientHeight + 1)(document.querySelector('#scroller'))")
    assert page.tab.locator("#verdict").is_visible() and page.tab.locator("#legend").is_visible()
    assert not page.tab.locator("#controls").is_visible()
    assert not page.tab.locator("#groups").is_visible()
    assert (
        page.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    rows = int(page.tab.locator("#grid").get_attribute("aria-rowcount"))
    page.wait(
        f"document.querySelectorAll('#grid [role=row]:not([hidden])').length >= {min(rows, 200)}"
    )
    page.tab.screenshot(path=shot("print"), full_page=True)
    assert len(page.tab.pdf()) > 10_000


def test_motion_is_left_out_where_people_asked_for_it(page_of, open_page) -> None:
    page = open_page(page_of("crash"), reduced_motion="reduce")
    assert page.tab.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


def test_a_large_text_size_keeps_the_page_whole(page_of, open_page) -> None:
    """As zoomed in twice on a small screen."""
    page = ready(open_page(page_of("group-mismatch"), width=640, height=400, device_scale_factor=2))
    assert not page.overflows()
    assert "FAULT" in page.text("#verdict").upper()
