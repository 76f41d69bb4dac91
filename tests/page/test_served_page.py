"""The page beside a running job, in Chromium: it grows while somebody looks at it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rankscope.spool.recordformat import StepEvent
from rankscope.tree.reader import open_trace
from rankscope.words.page.pages import check_page
from rankscope.words.page.pageserver import PageServer, PageSource
from tests.diagnosis.paper import module, numbers
from tests.page.driven import Driven
from tests.page.papertraces import written
from tests.tree.ranks_on_paper import PaperRank
from tests.waiting import wait_until


@dataclass
class Job:
    """A job whose trace is another one from step to step."""

    folder: Path
    steps: int = 2
    is_live: bool = True
    made: dict[int, Path] = field(default_factory=dict)

    def page(self):
        """Return the page of what is there so far, and whether the job goes on."""
        if self.steps not in self.made:
            self.made[self.steps] = written(self.folder / f"{self.steps}", self.write)
        content, _ = check_page(open_trace(self.made[self.steps]))
        return replace(content, data=content.data | {"live": self.is_live}), self.is_live

    def write(self, rank: PaperRank) -> None:
        """Record a model whose second layer is wrong on one rank from step 3 on."""
        for step in range(self.steps):
            rank.step(StepEvent.BEGIN, step)
            with rank.call(class_name="Model", step=step) as top:
                rank.value(top, "input.0", numbers(step))
                for name in ("first", "second", *(["third"] if step > 3 else [])):
                    is_wrong = (name, rank.rank) == ("second", 2) and step >= 3
                    made = numbers(step) * (float("nan") if is_wrong else 1)
                    module(rank, name, numbers(step), made, step=step)
            rank.step(StepEvent.END, step)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def server(job: Job) -> Iterator[PageServer]:
    found = PageServer(PageSource(job.page))
    thread = threading.Thread(target=found.serve)
    thread.start()
    yield found
    found.close()
    thread.join(60)


@pytest.fixture
def live(server: PageServer, open_page) -> Driven:
    """The page as it was when the job had done two steps."""
    page = open_page(server.url)
    page.tab.locator("#grid [role=row]").first.wait_for()
    page.tab.locator("#live", has_text="live").wait_for()
    return page


def test_steps_findings_and_modules_arrive_and_where_one_looks_stays(
    job: Job, live: Driven
) -> None:
    assert live.text("#verdict").startswith("NO FAULT FOUND")
    live.tab.locator("#grid").focus()
    live.press("ArrowDown", "ArrowRight", "Enter")
    before = live.detail("first")
    link = live.link
    job.steps = 6
    live.tab.locator("#verdict", has_text="nonfinite-origin").wait_for()
    live.wait("+document.querySelector('#step').max === 5")
    assert live.text("#detail").split("\n")[0] == before.split("\n")[0]
    assert live.link == link
    assert wait_until(lambda: "third" in live.rows(), 60)
    live.tab.locator("a.to-map").first.click()
    assert "not finite" in live.detail("nonfinite-origin")
    job.is_live = False
    job.steps = 7
    live.tab.locator("#live", has_text="the job has ended").wait_for()
