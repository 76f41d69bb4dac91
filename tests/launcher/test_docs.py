"""The pages name every setting, with the default it has, and every trigger of the black box."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankscope.record.finding import Kind
from rankscope.record.stepselection import Trigger
from rankscope.settings import SETTINGS, Setting

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "commands/run.md"
HAPPENINGS = DOCS / "how-it-works/black-box.md"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_stands_in_the_page_with_its_default(setting: Setting):
    rows = re.findall(rf"^\| `--rs-{setting.name}[ `].*$", PAGE.read_text(), re.MULTILINE)
    (row,) = rows
    if setting.default:
        assert f"| `{setting.default}` |" in row


@pytest.mark.parametrize("trigger", Trigger)
def test_every_trigger_stands_in_the_pages_with_what_it_means(trigger: Trigger):
    rows = re.findall(rf"^\* `{trigger.word}`: .*$", PAGE.read_text(), re.MULTILINE)
    (row,) = rows
    words = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", row).replace("`", "")
    assert trigger.value.meaning.replace("`", "") in words
    assert re.findall(rf"^\| .*`{trigger.word}`.* \|", HAPPENINGS.read_text(), re.MULTILINE)


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_finding_stands_in_a_page(kind: Kind):
    pages = (DOCS / "commands/check.md", DOCS / "commands/diff.md")
    assert any(f"`{kind.value}`" in page.read_text() for page in pages)
