"""Packages made for one test, and a mapping that is empty again after each."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from rankscope.compat import clear_patch_mapping

MakePackage = Callable[[str, Mapping[str, str]], ModuleType]


@pytest.fixture(autouse=True)
def empty_mapping() -> Iterator[None]:
    yield
    clear_patch_mapping()


@pytest.fixture
def make_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePackage]:
    """Write `{file: source}` as a package, import its top and return it; gone after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def make(name: str, files: Mapping[str, str]) -> ModuleType:
        for file, source in {"__init__.py": "", **files}.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        made.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    for name in made:
        for key in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            del sys.modules[key]
