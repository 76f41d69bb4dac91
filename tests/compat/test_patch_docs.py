"""The page on class patching runs as it stands, and names every call."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from rankscope import compat


def page(repository: Path) -> str:
    return (repository / "docs" / "compat.md").read_text()


def test_the_examples_of_class_patching_run_in_the_order_they_stand(repository: Path) -> None:
    text = page(repository)
    sections = text[text.index("## `register_patch_mapping`") :]
    blocks = re.findall(r"^```python\n(.*?)^```", sections, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/compat.md", "exec"), names)


def test_every_call_has_its_section_its_line_and_its_signature_on_the_page(
    repository: Path,
) -> None:
    text = page(repository)
    calls = text.partition("\n## Call by call\n")[2].partition("\n## ")[0]
    for name in compat.__all__:
        assert f"`{name}`" in calls, name
    for name in (name for name in compat.__all__ if "patch" in name):
        section = text.split(f"## `{name}`\n")[1].split("\n## ")[0]
        parameters = inspect.signature(getattr(compat, name)).parameters.values()
        assert section.strip().startswith(f"`{name}("), name
        for parameter in parameters:
            assert parameter.name in section.split(")`")[0], (name, parameter.name)


def test_names_are_loaded_when_used_in_order_and_nothing_else_is_there() -> None:
    assert compat.__all__ == sorted(compat.__all__) and set(compat.__all__) <= set(dir(compat))
    assert all(callable(getattr(compat, name)) for name in compat.__all__)
