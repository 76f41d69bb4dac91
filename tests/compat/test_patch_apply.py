"""Classes of any package replaced while a block runs, and nothing of it left afterwards."""

from __future__ import annotations

import contextlib
import importlib
import sys
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
