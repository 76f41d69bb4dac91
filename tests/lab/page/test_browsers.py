"""The browsers do what the tests of pages rely on: a page that is not quiet is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.page.driven import opened, serious_faults
from tests.ports import free_port
from tests.waiting import wait_until

LOUD = """<!doctype html><html lang="en"><title>loud</title><body>
<script>
console.error("told");
alert("asked");
fetch("http://127.0.0.1:PORT/nothing").catch(() => 0).finally(
  () => setTimeout(() => { document.title = "done"; throw new Error("thrown"); }));
</script><img src="picture.png"></body></html>"""
QUIET = """<!doctype html><html lang="en"><head><title>quiet</title>
<meta name="viewport" content="width=device-width"><style>
:root { color-scheme: light dark } body { margin: 0 }
@media (prefers-color-scheme: dark) { main { --is: dark } }
@media print { main { --is: print } }
</style></head><body><main><h1>Verdict</h1><p style="margin-top: 2000px">below</p></main>
</body></html>"""


def test_a_page_that_speaks_or_asks_is_noticed(tmp_path: Path, browser) -> None:
    (tmp_path / "page.html").write_text(LOUD.replace("PORT", free_port()))
    contexts = []
    page = opened(browser, contexts, tmp_path / "page.html")
    page.tab.wait_for_function("document.title === 'done'")
    noise = page.noise
    assert "told" in noise["console"]
    assert noise["exceptions"] == ["thrown"]
    assert noise["dialogs"] == ["asked"]
    assert {url.rpartition("/")[2] for url in noise["requests"]} == {"nothing", "picture.png"}
    assert any(fault.startswith("image-alt (critical)") for fault in serious_faults(page))
    contexts[0].close()


def test_a_page_is_opened_as_asked_for(tmp_path: Path, open_page, shot) -> None:
    (tmp_path / "page.html").write_text(QUIET)
    kind = "getComputedStyle(document.querySelector('main')).getPropertyValue('--is').trim()"
    page = open_page(tmp_path / "page.html", width=360, scheme="dark", fragment="step=1")
    assert page.tab.evaluate(kind) == "dark" and page.tab.evaluate("innerWidth") == 360
    assert page.tab.evaluate("location.hash") == "#step=1"
    assert page.is_in_first_screen("h1") and not page.is_in_first_screen("p")
    assert not page.overflows() and page.text("h1") == "Verdict"
    assert serious_faults(page) == []
    assert page.tab.screenshot(path=shot("quiet")).startswith(b"\x89PNG")
    assert open_page(tmp_path / "page.html", media="print").tab.evaluate(kind) == "print"


def test_firefox_opens_pages_runs_scripts_and_shows_them(tmp_path: Path, firefox, shot) -> None:
    (tmp_path / "page.html").write_text(QUIET)
    loud = LOUD.replace('alert("asked");', "").replace("PORT", free_port())
    (tmp_path / "loud.html").write_text(loud)
    firefox.open((tmp_path / "loud.html").as_uri())
    assert wait_until(lambda: firefox.evaluate("document.title") == "done")
    assert {each.partition(": ")[2].removeprefix("Error: ") for each in firefox.said} >= {
        *("told", "thrown")
    }
    assert any("nothing" in url for url in firefox.asked)
    firefox.open((tmp_path / "page.html").as_uri(), width=500)
    assert firefox.evaluate("[innerWidth, document.querySelector('h1').innerText]") == [
        *(500, "Verdict")
    ]
    firefox.evaluate("void (onkeydown = event => document.title += event.key)")
    firefox.press("a", "\ue008", "b")  # WebDriver's name for Shift
    assert firefox.evaluate("document.title") == "quietaShiftb"
    with pytest.raises(RuntimeError, match="boom"):
        firefox.evaluate("(() => { throw new Error('boom') })()")
    assert firefox.screenshot(shot("firefox")).read_bytes().startswith(b"\x89PNG")
    assert [each for each in firefox.asked if not each.startswith("file:")] == []
