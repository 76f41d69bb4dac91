"""Modules that are first imported, or first asked for a name, while a block is open."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import pytest
from torch import nn

from rankscope.compat import apply_patches, clear_patch_mapping, register_patch_mapping
from tests.compat.conftest import MakePackage

PARTS = "from torch import nn\nclass Block(nn.Module):\n    pass\n"
LATE = """
from machine.parts import Block
from torch import nn

class LateBlock(Block):
    pass

class Head(nn.Module):
    pass

def build():
    return Block(), Head()
"""
LAZY = """
import importlib

def __getattr__(name):
    if name in ("Block", "Head"):
        home = "parts" if name == "Block" else "late"
        globals()[name] = getattr(importlib.import_module(f"machine.{home}"), name)
        return globals()[name]
    raise AttributeError(name)

def __dir__():
    return ["Block", "Head"]
"""
FILES = {"parts.py": PARTS, "late.py": LATE, "broken.py": "import machine.late\n1 / 0\n"}


class Swapped(nn.Module):
    pass


def finders() -> list[object]:
    return list(sys.meta_path)


def test_a_module_imported_inside_is_patched_and_as_good_as_new_afterwards(
    make_package: MakePackage,
) -> None:
    make_package("machine", FILES)
    parts: Any = importlib.import_module("machine.parts")
    original = parts.Block
    register_patch_mapping({"^(Block|Head)$": Swapped})
    with apply_patches("machine"):
        late: Any = importlib.import_module("machine.late")
        assert [type(one) for one in late.build()] == [Swapped, Swapped]
    assert late.Block is original and late.Head.__module__ == "machine.late"
    assert late.LateBlock.__bases__ == (original,), "a class was derived from the replacement"
    assert [type(one) for one in late.build()] == [original, late.Head]


def test_a_module_of_another_package_imported_inside_keeps_no_replacement(
    make_package: MakePackage,
) -> None:
    make_package("machine", FILES)
    make_package("users", {"own.py": "from machine.parts import Block\nclass Own(Block): pass\n"})
    parts: Any = importlib.import_module("machine.parts")
    original = parts.Block
    register_patch_mapping({"Block": Swapped})
    with apply_patches("machine"):
        own: Any = importlib.import_module("users.own")
        assert parts.Block is Swapped
        assert own.Block is original and own.Own.__bases__ == (original,)
    assert parts.Block is original


def test_matching_imports_nothing(make_package: MakePackage) -> None:
    make_package("machine", {**FILES, "__init__.py": LAZY})
    register_patch_mapping({".*": Swapped})
    with apply_patches("machine"):
        assert "machine.parts" not in sys.modules and "machine.late" not in sys.modules


def test_a_name_a_lazy_package_fetched_inside_is_fetched_anew_afterwards(
    make_package: MakePackage,
) -> None:
    machine: Any = make_package("machine", {**FILES, "__init__.py": LAZY})
    register_patch_mapping({"^Block$": Swapped})
    with apply_patches("machine"):
        assert machine.Block is Swapped
        register_patch_mapping({"^Head$": Swapped})
        with apply_patches("machine"):
            assert machine.Head is Swapped and machine.Block is Swapped
        assert machine.Head.__module__ == "machine.late" and machine.Block is Swapped
    assert machine.Block.__module__ == "machine.parts"
    assert machine.Head.__module__ == "machine.late"


def test_a_lazy_package_outside_of_what_the_block_covers_keeps_nothing_either(
    make_package: MakePackage,
) -> None:
    machine: Any = make_package("machine", {**FILES, "__init__.py": LAZY})
    importlib.import_module("machine.parts")
    register_patch_mapping({"^Block$": Swapped})
    with apply_patches("machine.parts"):
        assert machine.Block is Swapped
    assert machine.Block.__module__ == "machine.parts"


def test_a_replacement_at_home_in_a_lazy_package_stays_there(make_package: MakePackage) -> None:
    own = LAZY + "\nfrom torch import nn\nclass Fast(nn.Module):\n    pass\n"
    machine: Any = make_package("machine", {**FILES, "__init__.py": own, "more.py": own})
    fast = machine.Fast
    register_patch_mapping({"Block": fast})
    with apply_patches("machine"):
        assert machine.Block is fast
        more: Any = importlib.import_module("machine.more")
        assert machine.Fast is fast
    assert machine.Fast is fast and more.Fast.__module__ == "machine.more"


def test_an_import_that_fails_inside_leaves_the_block_as_it_was(make_package: MakePackage) -> None:
    make_package("machine", FILES)
    parts: Any = importlib.import_module("machine.parts")
    original = parts.Block
    register_patch_mapping({"^Block$": Swapped})
    with apply_patches("machine"):
        with pytest.raises(ZeroDivisionError):
            importlib.import_module("machine.broken")
        assert parts.Block is Swapped and sys.modules["machine.late"].Block is Swapped
        with pytest.raises(ModuleNotFoundError, match=r"machine\.nowhere"):
            importlib.import_module("machine.nowhere")
        assert parts.Block is Swapped
    assert parts.Block is original and sys.modules["machine.late"].Block is original


def test_imports_are_watched_while_a_block_is_open_and_modules_keep_their_own_loader(
    make_package: MakePackage,
) -> None:
    make_package("machine", FILES)
    register_patch_mapping({"^Block$": Swapped})
    before = finders()
    with apply_patches("machine"):
        inside = finders()
        with apply_patches("machine"):
            late = importlib.import_module("machine.late")
        assert inside == finders() and inside[1:] == before
    assert finders() == before
    assert late.__spec__ is not None and late.__spec__.loader is late.__loader__
    assert type(late.__loader__).__module__ == "_frozen_importlib_external"
    assert "class Head" in inspect.getsource(late)


def test_without_a_mapping_a_block_does_nothing_at_all(make_package: MakePackage) -> None:
    make_package("machine", FILES)
    parts: Any = importlib.import_module("machine.parts")
    before = finders()
    with apply_patches("machine"):
        assert finders() == before
        register_patch_mapping({"Block": Swapped})
        assert parts.Block is not Swapped
    clear_patch_mapping()
    assert finders() == before
