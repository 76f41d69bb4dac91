"""Browsers for the tests of this folder, all of which run in one of pytest's workers.

A browser ends behind the last test of the folder: Playwright's loop, which runs as long, would be
in the way of others.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankscope.diagnosis.comparison.diff import diff
from rankscope.layout.layoutfile import LayoutFile
from rankscope.tree.reader import open_trace
from rankscope.words.page.pagecontent import write_file
from rankscope.words.page.pages import diff_page
from tests.page.driven import CHROMIUM, Open, opened, write_page
from tests.page.papertraces import PAPER
from tests.page.realtraces import REAL

if TYPE_CHECKING:
    from playwright.sync_api import Browser

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
def trace_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return the folder of a trace by its name, of those on paper or else of the real jobs: there
    lie `trace`, and where there are some `layout.toml` and `reference`. Made once."""

    @functools.cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        if name in PAPER:
            PAPER[name](folder)
        else:
            REAL[name](request.getfixturevalue("ranks"), folder)
        return folder

    return folder_of


@pytest.fixture(scope="package")
def page_of(trace_of: Callable[[str], Path]) -> Callable[[str], Path]:
    """Return the page of such a trace, of `diff` where it has a reference. Written once."""

    @functools.cache
    def written(name: str) -> Path:
        folder = trace_of(name)
        file, out = folder / "layout.toml", folder / "page.html"
        layouts = LayoutFile.load(file) if file.exists() else None
        trace, reference = open_trace(folder / "trace"), folder / "reference"
        if reference.exists():
            compare = functools.partial(diff, open_trace(reference), trace, layouts=layouts)
            return write_file(diff_page(open_trace(reference), trace, compare)[0], out)
        return write_page(trace, out, layouts=layouts)

    return written


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
