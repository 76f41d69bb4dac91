"""Light and dark, on paper, on a phone, with a screen reader."""

from __future__ import annotations

import pytest

from tests.page.driven import Driven, serious_faults

PAGES = [
    ("nonfinite-origin", "light"),
    ("hang", "dark"),
    *(
        pytest.param(*page, marks=pytest.mark.lab)
        for page in (("hostile", "light"), ("clean", "dark"), ("diff-divergence", "light"))
    ),
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
