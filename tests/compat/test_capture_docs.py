"""The examples of output capture in docs/compat.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SECTIONS = ["capture_outputs", "merge_with_config_defaults"]


@pytest.mark.parametrize("section", SECTIONS)
def test_the_examples_of_a_section_run(section: str, repository: Path) -> None:
    text = (repository / "docs" / "compat.md").read_text()
    body = text.split(f"\n## `{section}`\n")[1].split("\n## ")[0]
    examples = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, f"docs/compat.md, {section}", "exec"), {"__name__": section})
