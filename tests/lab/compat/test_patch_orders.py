"""Blocks opened, closed, and modules imported in any order: a name always shows what it should."""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from rankscope.compat import apply_patches, clear_patch_mapping, register_patch_mapping

PARTS = "from torch import nn\nclass Red(nn.Module): pass\nclass Blue(nn.Module): pass\n"
LATE = "from {top}.parts import Red, Blue\nclass Green(Red): pass\n"
LAZY = """
def __getattr__(name):
    if name in ("Red", "Blue"):
        import any_order.parts
        globals()[name] = getattr(any_order.parts, name)
        return globals()[name]
    raise AttributeError(name)
"""
REPLACEMENTS = [type(f"New{number}", (nn.Module,), {}) for number in range(3)]
KEYS = ["Red", "^Blue$", "e", "Green|Red", "^R"]

Mapping = dict[str, type[nn.Module]]
Blocks = list[tuple[Mapping, tuple[str, ...]]]
mappings = st.dictionaries(
    st.sampled_from(KEYS), st.sampled_from(REPLACEMENTS), min_size=1, max_size=3
)
packages = st.sampled_from(
    [("any_order",), ("any_order.late",), ("any_order.parts",), ("any_order", "other_order")]
)
operations = st.one_of(
    st.tuples(st.just("open"), mappings, packages),
    st.tuples(st.just("close"), st.integers(0, 5), st.none()),
    st.tuples(
        st.just("import"), st.sampled_from(["any_order.late", "other_order.late"]), st.none()
    ),
    st.tuples(st.just("ask"), st.sampled_from(["Red", "Blue"]), st.none()),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("orders")
    for top in ("any_order", "other_order"):
        (folder / top).mkdir()
        (folder / top / "__init__.py").write_text(LAZY if top == "any_order" else "")
        (folder / top / "parts.py").write_text(PARTS)
        (folder / top / "late.py").write_text(LATE.format(top=top))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    forget()


def forget() -> None:
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("any_order", "other_order")
    ]:
        del sys.modules[name]


def shown(name: str, module: str, blocks: Blocks) -> type | None:
    """What a name should show: None for the original."""
    for mapping, covered in reversed(blocks):
        if not any(module == package or module.startswith(f"{package}.") for package in covered):
            continue
        if name in mapping:
            return mapping[name]
        for key, replacement in mapping.items():
            if re.search(key, name):
                return replacement
    return None


def check(blocks: Blocks) -> None:
    for module_name in (
        "any_order.parts",
        "any_order.late",
        "other_order.parts",
        "other_order.late",
    ):
        module: Any = sys.modules.get(module_name)
        home = module_name.split(".")[0]
        for name in ("Red", "Blue", "Green"):
            if module is None or not hasattr(module, name):
                continue
            wanted = shown(name, module_name, blocks)
            found = getattr(module, name)
            assert found is wanted or (wanted is None and found.__module__.startswith(home))
            if found.__name__ == "Green":
                assert found.__bases__[0].__module__ == f"{home}.parts"


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(operations, max_size=12))
def test_every_name_shows_the_replacement_of_the_last_block_that_has_one(
    written: Path, steps: list[tuple[str, Any, Any]]
) -> None:
    forget()
    clear_patch_mapping()
    finders = list(sys.meta_path)
    importlib.import_module("any_order.parts")
    blocks: Blocks = []
    with ExitStack() as all_of_them:
        stacks: list[ExitStack] = []
        for step in steps:
            take(step, stacks, blocks, all_of_them)
            check(blocks)
        for name in ("Red", "Blue"):
            ask(name, blocks)
    check([])
    ask("Red", [])
    ask("Blue", [])
    clear_patch_mapping()
    assert sys.meta_path == finders


def take(
    step: tuple[str, Any, Any], stacks: list[ExitStack], blocks: Blocks, everything: ExitStack
) -> None:
    kind, what, where = step
    if kind == "open":
        clear_patch_mapping()
        register_patch_mapping(what)
        stack = everything.enter_context(ExitStack())
        stack.enter_context(apply_patches(where))
        stacks.append(stack)
        blocks.append((what, where))
    elif kind == "close" and stacks:
        stacks.pop(what % len(stacks)).close()
        blocks.pop(what % len(blocks))
    elif kind == "import":
        importlib.import_module(what)
    elif kind == "ask":
        ask(what, blocks)


def ask(name: str, blocks: Blocks) -> None:
    """Fetch a name through the lazy package: from its home, or as the package kept it before."""
    top: Any = sys.modules["any_order"]
    is_kept = vars(top).get(name) is not None
    found = getattr(top, name)
    wanted = [shown(name, "any_order.parts", blocks)]
    if is_kept:
        wanted.append(shown(name, "any_order", blocks))
    is_original = found.__module__ == "any_order.parts"
    assert found in wanted or (is_original and None in wanted), (found, wanted)
    if not blocks:
        assert is_original and found is sys.modules["any_order.parts"].__dict__[name]
