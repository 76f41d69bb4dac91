"""A page in Chromium, with what it said and asked for while it was open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from rankscope.words.page.pagecontent import write_file
from rankscope.words.page.pages import check_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Request

    from rankscope.tree.views import Trace

__all__ = ["CHROMIUM", "Driven", "Open", "opened", "serious_faults", "write_page"]

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""What it is called on `PATH`."""

PATIENCE_MS = 60_000.0
"""How long an action waits for what it needs: it only ends what hangs."""
_OWN = ("data:", "blob:")
"""Beginnings of URLs that a page asks itself for."""
_GRAVE = {"serious", "critical"}


def write_page(trace: Trace, out: Path, **wishes: Any) -> Path:
    """Write the page of a trace as `rankscope report` does; `wishes` as of `check_page`."""
    return write_file(check_page(trace, **wishes)[0], out)


class Driven:
    """A page that was opened. `tab` is Playwright's own page, for all that has no name here."""

    def __init__(self, tab: Page, url: str) -> None:
        self.tab = tab
        self.url = url
        self.said: list[str] = []
        """Warnings and errors on the console."""
        self.raised: list[str] = []
        """Exceptions that nothing caught."""
        self.asked: list[str] = []
        """URLs that were asked for, besides the page itself, what it carries, and of a page that is
        served what its own server was asked for."""
        self.boxes: list[str] = []
        """Texts of alerts, questions and the like, all dismissed."""
        tab.set_default_timeout(PATIENCE_MS)
        tab.on("console", lambda m: m.type in {"warning", "error"} and self.said.append(m.text))
        tab.on("pageerror", lambda error: self.raised.append(str(error)))
        tab.on("request", self._note)
        tab.on("dialog", self._dismiss)
        tab.goto(url)

    def _note(self, request: Request) -> None:
        own, asked = urlsplit(self.url), urlsplit(request.url)
        is_file = asked.path == own.path or own.scheme != "file"
        is_own = is_file and (asked.scheme, asked.netloc) == (own.scheme, own.netloc)
        if not is_own and not request.url.startswith(_OWN):
            self.asked.append(request.url)

    def _dismiss(self, dialog: Any) -> None:
        self.boxes.append(dialog.message)
        dialog.dismiss()

    @property
    def noise(self) -> dict[str, list[str]]:
        """All that a page of one file never does: {what: each time}; empty where it did nothing."""
        noise = {
            "console": self.said,
            "exceptions": self.raised,
            "requests": self.asked,
            "dialogs": self.boxes,
        }
        return {what: times for what, times in noise.items() if times}

    def text(self, selector: str = "body") -> str:
        """Return the text that a person sees of the first such element."""
        return self.tab.locator(selector).first.inner_text()

    def is_in_first_screen(self, selector: str) -> bool:
        """Whether the first such element lies, whole, in what is seen without scrolling."""
        box = self.tab.locator(selector).first.bounding_box()
        seen = self.tab.viewport_size
        if box is None or seen is None:
            return False
        ends = box["x"] + box["width"], box["y"] + box["height"]
        begins_inside = min(box["x"], box["y"]) >= 0
        return begins_inside and ends[0] <= seen["width"] and ends[1] <= seen["height"]

    def overflows(self) -> bool:
        """Whether the page as a whole has to be scrolled sideways."""
        return bool(
            self.tab.evaluate(
                "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            )
        )

    def rows(self) -> dict[str, float]:
        """Return the modules whose rows the map shows, from the top, by path: {path: middle of the
        row in CSS pixels from the top of the screen}, of the root "(root)"."""
        found = self.tab.evaluate(
            """() => [...document.querySelectorAll("#grid [role=row]:not([hidden]) .name")]
            .map((e) => [e.title.split("  ")[0], e.getBoundingClientRect()])
            .map(([path, box]) => [path, box.top + box.height / 2])
            .sort((a, b) => a[1] - b[1])"""
        )
        return dict(found)

    def tips(self, path: str) -> dict[str, tuple[float, float]]:
        """Move the pointer over the cells of a row, and return what was told of each, with a place
        of the pointer where it was. The row has to be among those made."""
        self.tab.evaluate("document.querySelector('#map').scrollIntoView({behavior: 'instant'})")
        found = self.tab.evaluate(
            """(clientY) => {
              const cells = document.querySelector("#cells");
              const tip = document.querySelector("#tip");
              const { left, right } = cells.getBoundingClientRect();
              const found = [];
              for (let clientX = left + 2; clientX < right; clientX += 2) {
                cells.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY }));
                if (!tip.hidden) found.push([tip.textContent, [clientX, clientY]]);
              }
              return found.reverse();
            }""",
            self.rows()[path],
        )
        return {told: (x, y) for told, (x, y) in reversed(dict(found).items())}

    def wait(self, condition: str) -> None:
        """Wait until a script's expression holds."""
        self.tab.wait_for_function(f"() => {condition}")

    def detail(self, words: str) -> str:
        """Wait until the detail says these words, and return all of it."""
        self.tab.locator("#detail", has_text=words).wait_for()
        return self.text("#detail")

    @property
    def link(self) -> dict[str, str]:
        """What the link to this view says, by name."""
        return dict(parse_qsl(urlsplit(self.tab.url).fragment, keep_blank_values=True))

    def press(self, *keys: str) -> None:
        """Press keys one after the other, by Playwright's names."""
        for key in keys:
            self.tab.keyboard.press(key)

    def focused(self) -> str:
        """Return what the element that has the keyboard is, in words for messages."""
        return str(
            self.tab.evaluate(
                "(e => `${e.tagName} #${e.id} .${e.className} ${e.getAttribute('role')} "
                "${(e.getAttribute('aria-label') || e.textContent || '').trim().slice(0, 80)}`)"
                "(document.activeElement)"
            )
        )


Open = Callable[..., Driven]
"""The fixture `open_page`: `open_page(path or url, fragment="", width=1280, height=800,
scheme="light", media="screen", **what Browser.new_context takes)`."""


def opened(
    browser: Browser,
    contexts: list[BrowserContext],
    page: Path | str,
    *,
    fragment: str = "",
    width: int = 1280,
    height: int = 800,
    scheme: str = "light",
    media: str = "screen",
    **more: Any,
) -> Driven:
    """Open a page in a profile of its own, which is appended to `contexts`. Sizes in CSS pixels."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, **more
    )
    contexts.append(context)
    tab = context.new_page()
    tab.emulate_media(media=media)
    url = page.resolve().as_uri() if isinstance(page, Path) else page
    return Driven(tab, f"{url}#{fragment}" if fragment else url)


def serious_faults(driven: Driven) -> list[str]:
    """Return the serious and critical faults that axe-core finds in a page as it is now, each with
    the elements that have it. The page has to be opened with `bypass_csp=True` where its policy
    lets no script in."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(driven.tab).response["violations"]
    told = []
    for each in found:
        where = [f"{n['html'][:160]} [{n['failureSummary']}]" for n in each["nodes"][:5]]
        if each["impact"] in _GRAVE:
            told.append(f"{each['id']} ({each['impact']}): {each['help']}: {'; '.join(where)}")
    return told
