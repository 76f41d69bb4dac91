"""Reading what a debugger wrote, and holding two of them against each other."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

RELEASE = "5.23.0"
INSTALLED = (
    importlib.metadata.version("transformers")
    if importlib.util.find_spec("transformers")
    else "nothing"
)
needs_transformers = pytest.mark.skipif(
    INSTALLED != RELEASE, reason=f"needs transformers=={RELEASE}, found {INSTALLED}"
)


def theirs(model: nn.Module, folder: Path, **flags: Any) -> AbstractContextManager[nn.Module]:
    from transformers.model_debugging_utils import model_addition_debugger_context

    return model_addition_debugger_context(model, debug_path=str(folder), **flags)


def ours(model: nn.Module, folder: Path, **flags: Any) -> AbstractContextManager[nn.Module]:
    from rankscope.compat import model_addition_debugger_context

    return model_addition_debugger_context(model, debug_path=str(folder), **flags)


def tree(folder: Path, kind: str = "FULL_TENSORS", mark: str = "") -> dict[str, Any]:
    """The one tree of this kind in a folder, of the forward that `mark` names."""
    (path,) = folder.glob(f"*_debug_tree{mark}_{kind}.json")
    return json.loads(path.read_text())


def walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("children", ()):
        yield from walk(child)


def call(root: dict[str, Any], path: str, which: int = 0) -> dict[str, Any]:
    return [node for node in walk(root) if node["module_path"].endswith(path)][which]


def values(data: Any) -> Iterator[dict[str, Any]]:
    """Every tensor of a tree, in its order."""
    if isinstance(data, dict):
        if isinstance(data.get("shape"), str):
            yield data
        else:
            for each in data.values():
                yield from values(each)
    elif isinstance(data, list):
        for each in data:
            yield from values(each)


def references(root: dict[str, Any]) -> set[str]:
    """Names of the tensor files a tree speaks of."""
    found = (value["value"] for value in values(root))
    return {text.removeprefix("./") for text in found if isinstance(text, str)}


def restored() -> None:
    """Put back what the debugger of transformers leaves changed in torch."""
    torch.set_printoptions(profile="default")
