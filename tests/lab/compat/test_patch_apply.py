"""Classes replaced while a block runs, in modules and classes of rarer kinds."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from rankscope.compat import (
    apply_patches,
    register_patch_mapping,
)
from tests.compat.conftest import MakePackage
from tests.compat.test_patch_apply import PARTS, Tenfold, Zero, everything
from tests.compat.test_patch_apply import parts as parts


def test_it_decorates_a_function_too(parts: Any) -> None:
    register_patch_mapping({"RedBlock": Tenfold})

    @apply_patches("machine")
    def build() -> nn.Module:
        made: nn.Module = parts.Net()
        return made

    assert type(build().red) is Tenfold and type(parts.Net().red) is not Tenfold
    assert type(build().red) is Tenfold


def test_a_replacement_may_derive_from_what_it_replaces_and_live_beside_it(
    make_package: MakePackage,
) -> None:
    make_package(
        "machine",
        {
            "parts.py": PARTS,
            "fast.py": "from machine.parts import RedBlock\nclass FastBlock(RedBlock):\n    pass\n",
        },
    )
    fast: Any = importlib.import_module("machine.fast")
    parts: Any = importlib.import_module("machine.parts")
    before = everything()
    register_patch_mapping({"Block$": fast.FastBlock})
    with apply_patches("machine"), apply_patches("machine"):
        assert type(parts.Net().red) is fast.FastBlock is parts.RedBlock
    assert everything() == before


def test_what_another_put_in_place_meanwhile_stays(parts: Any) -> None:
    register_patch_mapping({"RedBlock": Tenfold, "BlueBlock": Tenfold})
    with apply_patches("machine"):
        parts.RedBlock = Zero
        del parts.BlueBlock
    assert parts.RedBlock is Zero and not hasattr(parts, "BlueBlock")


def test_an_odd_entry_of_sys_modules_is_neither_asked_nor_changed(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hostile(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("asked")

        def __setattr__(self, name: str, value: object) -> None:
            raise RuntimeError("changed")

    hostile: Any = Hostile("machine.hostile")
    del vars(hostile)["__name__"]
    vars(hostile)["RedBlock"] = parts.RedBlock
    original = parts.RedBlock
    monkeypatch.setitem(sys.modules, "machine.hostile", hostile)
    monkeypatch.setitem(sys.modules, "machine.nothing", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "machine.object", object())  # type: ignore[arg-type]
    register_patch_mapping({"Red": Tenfold})
    with apply_patches("machine"):
        assert vars(hostile)["RedBlock"] is Tenfold
    assert vars(hostile)["RedBlock"] is original


def test_a_module_is_restored_though_it_left_sys_modules_or_is_there_twice(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "elsewhere", parts)
    original = parts.RedBlock
    register_patch_mapping({"RedBlock": Tenfold})
    with apply_patches("machine"):
        with apply_patches("machine"):
            assert parts.RedBlock is Tenfold
        assert parts.RedBlock is Tenfold
        del sys.modules["machine.parts"]
    assert parts.RedBlock is original


def test_a_decorated_class_with_its_own_metaclass_is_replaced_without_being_asked(
    make_package: MakePackage,
) -> None:
    source = """
from torch import nn

class Loud(type):
    def __eq__(cls, other):
        raise RuntimeError("compared")
    def __hash__(cls):
        raise RuntimeError("hashed")
    def __getattribute__(cls, name):
        if name in ("__bases__", "__mro__", "__class__"):
            raise RuntimeError(name)
        return super().__getattribute__(name)

class RedBlock(nn.Module, metaclass=Loud):
    pass
"""
    make_package("machine", {"parts.py": source})
    parts: Any = importlib.import_module("machine.parts")
    original = parts.RedBlock
    register_patch_mapping({"RedBlock": Tenfold})
    with apply_patches("machine"):
        assert parts.RedBlock is Tenfold
    assert parts.RedBlock is original


def test_the_sources_of_a_patched_package_can_still_be_read(parts: Any) -> None:
    register_patch_mapping({"RedBlock": Tenfold})
    with apply_patches("machine"):
        assert "class Net" in inspect.getsource(parts.Net)
