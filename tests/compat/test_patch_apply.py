"""Classes of any package replaced while a block runs, and nothing of it left afterwards."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.compat import (
    apply_patches,
    clear_patch_mapping,
    register_patch_mapping,
    unregister_patch_mapping,
)
from tests.compat.conftest import MakePackage

PARTS = """
from torch import nn

class RedBlock(nn.Module):
    def forward(self, x):
        return x + 1

class BlueBlock(nn.Module):
    def forward(self, x):
        return x + 2

class RedSettings:
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.red = RedBlock()
        self.blue = BlueBlock()

    def forward(self, x):
        return self.blue(self.red(x))
"""
FILES = {
    "parts.py": PARTS,
    "again.py": "from machine.parts import RedBlock, BlueBlock\nOther = BlueBlock\ndel BlueBlock\n",
}


class Tenfold(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 10


class Zero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0


@pytest.fixture
def parts(make_package: MakePackage) -> Any:
    make_package("machine", FILES)
    importlib.import_module("machine.again")
    return importlib.import_module("machine.parts")


def everything(*names: str) -> dict[str, dict[str, object]]:
    return {
        name: dict(vars(module))
        for name, module in sys.modules.items()
        if name.split(".")[0] in (names or ("machine",))
    }


def test_models_made_in_the_block_hold_the_replacement_and_later_ones_the_original(
    parts: Any,
) -> None:
    original = parts.RedBlock
    before = everything()
    register_patch_mapping({"RedBlock": Tenfold})
    with apply_patches("machine"):
        inside = parts.Net()
        assert parts.RedBlock is Tenfold and sys.modules["machine.again"].RedBlock is Tenfold
    after = parts.Net()
    assert (type(inside.red), type(after.red)) == (Tenfold, original)
    assert everything() == before
    ones = torch.ones(2)
    assert inside(ones).tolist() == [12, 12] and after(ones).tolist() == [4, 4]


def test_an_exact_name_comes_before_a_pattern_and_the_first_pattern_before_others(
    parts: Any,
) -> None:
    register_patch_mapping({".*Block$": Zero, "^Red": nn.Identity, "RedBlock": Tenfold})
    with apply_patches("machine"):
        assert (parts.RedBlock, parts.BlueBlock) == (Tenfold, Zero)
    unregister_patch_mapping(["RedBlock"])
    with apply_patches("machine"):
        assert (parts.RedBlock, parts.BlueBlock) == (Zero, Zero)


def test_overwriting_an_entry_takes_hold_in_the_next_block(parts: Any) -> None:
    register_patch_mapping({"RedBlock": Zero})
    with apply_patches("machine"):
        register_patch_mapping({"RedBlock": Tenfold}, overwrite=True)
        assert parts.RedBlock is Zero
    with apply_patches("machine"):
        assert parts.RedBlock is Tenfold


def test_a_name_bound_under_another_name_is_matched_by_that_other_name(parts: Any) -> None:
    register_patch_mapping({"BlueBlock": Tenfold})
    again: Any = sys.modules["machine.again"]
    with apply_patches("machine"):
        assert parts.BlueBlock is Tenfold and again.Other is not Tenfold


def test_classes_that_are_no_modules_stay(parts: Any) -> None:
    settings = parts.RedSettings
    register_patch_mapping({"^Red": Tenfold})
    with apply_patches("machine"):
        assert parts.RedSettings is settings and parts.RedBlock is Tenfold


def test_only_the_packages_named_are_touched(parts: Any, make_package: MakePackage) -> None:
    make_package("machine_tools", {"parts.py": PARTS})
    tools: Any = importlib.import_module("machine_tools.parts")
    register_patch_mapping({"RedBlock": Tenfold})
    with apply_patches("machine"):
        assert parts.RedBlock is Tenfold and tools.RedBlock is not Tenfold
    with apply_patches():
        assert parts.RedBlock is not Tenfold
    with apply_patches(["machine.again", "machine_tools"]):
        assert parts.RedBlock is not Tenfold and tools.RedBlock is Tenfold
        assert sys.modules["machine.again"].RedBlock is Tenfold


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_the_block_raises_the_originals_are_back(
    parts: Any, error: type[BaseException]
) -> None:
    before = everything()
    register_patch_mapping({".*Block": Tenfold})

    def raising() -> None:
        with apply_patches("machine"):
            assert parts.RedBlock is Tenfold
            raise error

    with pytest.raises(error):
        raising()
    assert everything() == before


def test_an_inner_block_gives_way_to_the_outer_one_when_it_ends(parts: Any) -> None:
    before = everything()
    register_patch_mapping({"RedBlock": Tenfold})
    with apply_patches("machine"):
        outer = everything()
        register_patch_mapping({"RedBlock": Zero, "BlueBlock": Zero}, overwrite=True)
        with apply_patches("machine"):
            assert (parts.RedBlock, parts.BlueBlock) == (Zero, Zero)
        assert everything() == outer
        clear_patch_mapping()
        with apply_patches("machine"):
            assert everything() == outer
    assert everything() == before


def test_blocks_may_end_in_any_order(parts: Any) -> None:
    before = everything()
    register_patch_mapping({"RedBlock": Tenfold})
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(apply_patches("machine"))
    register_patch_mapping({"RedBlock": Zero}, overwrite=True)
    second.enter_context(apply_patches("machine"))
    first.close()
    assert parts.RedBlock is Zero
    second.close()
    assert everything() == before


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
