"""The browsers and traces of tests/page, and Firefox."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.lab.page.bidi import Firefox
from tests.page.conftest import browser, open_page, page_of, program, shot, trace_of

__all__ = ["browser", "firefox", "open_page", "page_of", "shot", "trace_of"]


@pytest.fixture(scope="package")
def firefox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    """Firefox, headless: one tab, in which each test opens what it wants to see."""
    pytest.importorskip("websockets", reason="the extra rankscope[browser] is not installed")
    path = program(("firefox-esr", "firefox"), "firefox-esr")
    with contextlib.closing(Firefox(path, tmp_path_factory.mktemp("firefox"))) as opened:
        yield opened
