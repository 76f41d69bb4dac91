"""Names and filters of any characters, as people reach them in a page."""

from __future__ import annotations

import json
import random
import re
from importlib.resources import files
from urllib.parse import quote

from rankscope.globs import glob_matches
from rankscope.record.texts import visible
from tests.page.papertraces import HOSTILE
from tests.page.test_hostile import INJECTED


def test_every_module_is_reached_by_keys_and_its_detail_says_its_name(page_of, open_page) -> None:
    page = open_page(page_of("hostile"), height=1200)
    page.tab.locator("#grid [role=row]").first.wait_for()
    page.tab.locator("#unfold-all").click()
    grid = page.tab.locator("#grid")
    rows = int(grid.get_attribute("aria-rowcount"))
    assert rows >= 2 * len(HOSTILE)
    grid.focus()
    page.press("Home", "Shift+Home")
    seen = []
    for _ in range(rows):
        page.press("Enter")
        page.wait("document.activeElement.id === 'detail'")
        page.wait(
            "new URLSearchParams(location.hash.slice(1)).get('path').slice(0, 100) === "
            "document.querySelector('#detail h3').textContent.replace('(root)', '').slice(0, 100)"
        )
        seen.append(page.link["path"])
        page.press("Escape", "ArrowDown")
    assert len({*seen}) == rows
    assert {visible(name) for name in HOSTILE} <= {*seen}
    assert page.tab.evaluate(INJECTED) == 0


def test_a_link_to_a_bad_name_lands_on_it(page_of, open_page) -> None:
    first, *others = (f"path={quote(visible(name), safe='')}&step=1" for name in HOSTILE)
    page = open_page(page_of("hostile"), fragment=first)
    for name, link in zip(HOSTILE, (first, *others)):
        page.tab.evaluate(f"location.hash = '{link}&phase=forward&rank=0'")
        shown = json.dumps(visible(name)[:2000])
        page.wait(f"document.querySelector('#detail h3')?.textContent === {shown}")
        assert page.text("#no-match") == "" and not page.overflows(), name


def test_bad_filters_break_nothing(page_of, open_page) -> None:
    page = open_page(page_of("hostile"))
    page.tab.locator("#grid [role=row]").first.wait_for()
    for field in ("#filter", "#slots", "#ranks"):
        for text in (
            "[",
            "[!",
            "[]-a]",
            "***********************a",
            "\\",
            "<script>",
            "9" * 400,
            "a{2,1}",
        ):
            page.tab.locator(field).fill(text)
        page.tab.locator(field).fill("")
    page.tab.locator("#filter").fill("<!--<script>*")
    page.wait("+grid.getAttribute('aria-rowcount') > 0")
    assert "<!--<script>" in page.rows()


def test_values_that_are_no_numbers_are_said_in_words(page_of, open_page) -> None:
    page = open_page(page_of("hostile"), fragment="path=&step=0&phase=forward&rank=0")
    told = page.detail("output.nan")
    table = re.search(r"output\.nan.*?\n(.*?)output\.inf", told, flags=re.S)[1]
    assert "NaN" not in table.split("\n")[-1], "what has no finite element has no mean"
    assert "1" in re.search(r"output\.inf.*?output\.largest", told, flags=re.S)[0]
    assert "3.40282e+38" in told or "3.403e+38" in told


def test_filters_mean_what_globs_mean_elsewhere_and_take_no_time(browser) -> None:
    chosen = random.Random(0)
    pieces = ["a", "b", "*", "?", ".", "[ab]", "[!a]", "[]a]", "[^b]", "[", "\\", "(", "$", "**"]
    globs = ["".join(chosen.choices(pieces, k=chosen.randrange(7))) for _ in range(3000)]
    names = ["".join(chosen.choices("ab.]^\\($[", k=chosen.randrange(7))) for _ in globs]
    page = browser.new_page()
    page.goto("about:blank")
    code = (files("rankscope.words.page") / "static" / "elements.js").read_text()
    each = f"{code}; return globs.map((glob, at) => globOf(glob).test(names[at]));"
    told = page.evaluate(f"([globs, names]) => {{ {each} }}", [globs, names])
    assert told == [glob_matches(*each) for each in zip(globs, names)] and sum(told) > 100
    slow = ["*a" * 60 + "b", "*" * 60 + "b", "*?" * 60 + "b"]
    long = f"{code}; return globs.map((g) => globOf(g).test('a'.repeat(20000)));"
    assert page.evaluate(f"(globs) => {{ {long} }}", slow) == [False] * 3
    page.close()
