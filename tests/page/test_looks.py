"""Light and dark, on paper, on a phone, with a screen reader."""

from __future__ import annotations

import pytest

from tests.page.driven import Driven, serious_faults

PAGES = [
    ("nonfinite-origin", "light"),
    ("hang", "dark"),
    ("hostile", "light"),
    ("clean", "dark"),
    ("diff-divergence", "light"),
]
COLOURS = """() => {
  const cells = document.querySelector("#cells");
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [cells.width, cells.height];
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(cells, 0, 0);
  const pixels = pen.getImageData(0, 0, cells.width, cells.height).data;
  const seen = new Map();
  for (let at = 0; at < pixels.length; at += 4) {
    if (pixels[at + 3] < 255) continue;
    const colour = [...pixels.slice(at, at + 3)].join(" ");
    seen.set(colour, (seen.get(colour) ?? 0) + 1);
  }
  return [...seen].sort((a, b) => b[1] - a[1]).slice(0, 3).map(([colour]) => colour);
}"""


def ready(page: Driven) -> Driven:
    """Wait until the map is painted."""
    page.tab.locator("#grid [role=row]").first.wait_for()
    page.tab.wait_for_function(f"() => ({COLOURS})().length > 0")
    return page


@pytest.mark.parametrize(("name", "scheme"), PAGES)
def test_axe_finds_no_serious_fault(name: str, scheme: str, page_of, open_page, shot) -> None:
    page = ready(open_page(page_of(name), scheme=scheme, bypass_csp=True))
    page.tab.screenshot(path=shot(f"{name}-{scheme}"))
    if page.tab.locator("a.to-map").count():
        page.tab.locator("a.to-map").first.click()
    else:
        page.tab.locator("#grid").focus()
        page.press("ArrowDown", "Enter")
    page.tab.locator("#detail h3").first.wait_for()
    page.tab.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    page.tab.screenshot(path=shot(f"{name}-{scheme}-cell"), full_page=True)
    assert serious_faults(page) == []


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


@pytest.mark.parametrize("name", ["nonfinite-origin", "hostile", "hang"])
def test_a_narrow_screen_needs_no_scrolling_sideways(name: str, page_of, open_page, shot) -> None:
    page = ready(open_page(page_of(name), width=360, height=740, has_touch=True))
    assert page.is_in_first_screen("#verdict .verdict")
    assert not page.overflows()
    page.tab.locator("a.to-map").first.click()
    page.tab.locator("#detail h3").wait_for()
    assert not page.overflows()
    assert page.tab.locator("#cells").bounding_box()["width"] > 100
    page.tab.screenshot(path=shot(f"{name}-360"), full_page=True)


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
