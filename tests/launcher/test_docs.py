"""The page of `rankscope run` names every setting, with the default it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankscope.settings import SETTINGS, Setting

PAGE = Path(__file__).parents[2] / "docs/commands/run.md"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_stands_in_the_page_with_its_default(setting: Setting):
    rows = re.findall(rf"^\| `--rs-{setting.name}[ `].*$", PAGE.read_text(), re.MULTILINE)
    (row,) = rows
    if setting.default and setting.name not in {"phases", "keep-spool"}:
        assert f"| `{setting.default}` |" in row
