"""Whatever a name in a trace is, it is text: nothing runs, nothing breaks, all is reached."""

from __future__ import annotations

import json
import re

ELEMENTS = "[...document.querySelectorAll('script, img, iframe, object, embed, base, b')]"
INJECTED = """document.querySelectorAll(
  '[onerror], [onload], [onclick], [srcdoc], script:not([type]):not(:last-child), img, iframe'
).length"""


def test_nothing_of_a_name_becomes_an_element_or_runs(page_of, open_page) -> None:
    page = open_page(page_of("hostile"))
    page.tab.locator("#grid [role=row]").first.wait_for()
    page.tab.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    scripts = page.tab.evaluate(f"{ELEMENTS}.map(e => `${{e.tagName}} ${{e.type}}`)")
    assert {*scripts} == {"SCRIPT ", "SCRIPT application/json", "SCRIPT application/octet-stream"}
    assert scripts.count("SCRIPT ") == 1
    assert page.tab.evaluate(INJECTED) == 0
    assert page.tab.title().startswith("rankscope - fault: ")


BAD_LINKS = (
    "path=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E&step=%3Cscript%3E&phase=constructor&rank=-1",
    "path=&step=__proto__&phase=__proto__&rank=99999999999",
    "filter=[[[***(((&slots=[]]&ranks=0-999999999999&phases=,,,&columns=eval",
    "filter=%00%0A&rank=1-0&path=%E0%A4%A&step=1e9",
    "=&&==&path",
)


def test_a_bad_link_breaks_nothing(page_of, open_page) -> None:
    page = open_page(page_of("hostile"), fragment=BAD_LINKS[0])
    for link in (*BAD_LINKS[1:], *BAD_LINKS):
        page.tab.evaluate(f"location.hash = '{link}'")
        assert page.tab.evaluate(INJECTED) == 0
        page.tab.evaluate("location.hash = 'path=__proto__&step=1&phase=forward&rank=0'")
        page.wait("document.querySelector('#detail h3')?.textContent === '__proto__'")
        page.tab.evaluate("location.hash = 'path=constructor&step=1&phase=forward&rank=0'")
        page.wait("document.querySelector('#detail h3')?.textContent === 'constructor'")


def test_names_in_the_data_cannot_end_their_element(page_of) -> None:
    text = page_of("hostile").read_text()
    assert text.count("</script>") == text.count("<script")
    (data,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.S
    )
    assert "<" not in data and json.loads(data)["modules"]["paths"]
    assert "\x00" not in text and "\u202e" not in text
