"""The served page in Firefox, and behind a wrong token."""

from __future__ import annotations

from urllib.parse import urlsplit

from rankscope.words.page.pageserver import PageServer
from tests.page.driven import opened
from tests.page.test_served_page import Job
from tests.page.test_served_page import job as job
from tests.page.test_served_page import server as server
from tests.waiting import wait_until


def test_the_token_is_needed_and_the_page_says_when_its_server_does_not_answer(
    server: PageServer, browser, job: Job
) -> None:
    contexts: list = []
    plain = opened(browser, contexts, server.url.partition("?")[0])
    assert plain.tab.locator("#map").count() == 0
    page = opened(browser, contexts, server.url)
    page.tab.locator("#live", has_text="live").wait_for()
    verdict = page.text("#verdict")
    contexts[-1].set_offline(True)
    page.tab.locator("#live", has_text="rankscope serve does not answer").wait_for()
    assert page.text("#verdict") == verdict
    contexts[-1].set_offline(False)
    page.tab.locator("#live", has_text="live: as of").wait_for()
    asked = {urlsplit(url).netloc for url in page.asked}
    assert not asked and not page.raised
    for context in contexts:
        context.close()


def test_the_served_page_in_firefox(server: PageServer, firefox, job: Job) -> None:
    firefox.open(server.url)
    said = "document.body.innerText"
    assert wait_until(lambda: "live: as of" in firefox.evaluate(said), 60)
    job.steps = 5
    assert wait_until(lambda: "nonfinite-origin" in firefox.evaluate(said), 60)
    assert firefox.said == []
    asked = {url for url in firefox.asked if not url.startswith(("data:", "blob:"))}
    assert {urlsplit(url).port for url in asked} == {server.port}
