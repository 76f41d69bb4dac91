"""Browsers for the tests of this folder, all of which run in one of pytest's workers.

A browser ends behind the last test of the folder: Playwright's loop, which runs as long, would be
in the way of others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.page.driven import Open, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.page.bidi import Firefox

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FIREFOX = ("firefox-esr", "firefox")
_HELP = (
    "install the system's package {package}, or have launcher/test do it: as root, with "
    "RANKSCOPE_INSTALL_BROWSER=1"
)


def program(names: tuple[str, ...], package: str) -> str:
    """Return the path of a browser; skip the test where there is none."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no {' or '.join(names)} on PATH: {_HELP.format(package=package)}")
    return found


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium, headless."""
    driver = pytest.importorskip(
        "playwright.sync_api", reason="the extra rankscope[browser] is not installed"
    )
    path = program(CHROMIUM, "chromium")
    with driver.sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=path, chromium_sandbox=os.geteuid() != 0, timeout=120_000
        )
        yield found
        found.close()


@pytest.fixture(scope="package")
def firefox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    """Firefox, headless: one tab, in which each test opens what it wants to see."""
    pytest.importorskip("websockets", reason="the extra rankscope[browser] is not installed")
    from tests.page.bidi import Firefox

    path = program(FIREFOX, "firefox-esr")
    found = Firefox(path, tmp_path_factory.mktemp("firefox"))
    with contextlib.closing(found):
        yield found


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Open pages in Chromium. When the test ends, none of them may have raised anything, have
    written a warning or an error, or have asked any host for anything."""
    contexts, pages = [], []

    @functools.wraps(opened)
    def opening(*args, **how):
        pages.append(opened(browser, contexts, *args, **how))
        return pages[-1]

    yield opening
    noise = {page.url: page.noise for page in pages if page.noise}
    for context in contexts:
        context.close()
    assert not noise


@pytest.fixture
def shot(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """Name a file for a screenshot: in the folder RANKSCOPE_SCREENSHOTS, or for this test alone."""
    folder = Path(os.environ.get("RANKSCOPE_SCREENSHOTS") or tmp_path / "screenshots").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return lambda name: folder / f"{name}.png"
