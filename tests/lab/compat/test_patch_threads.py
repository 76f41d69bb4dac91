"""Blocks in several threads: what is replaced shows everywhere, and is gone when the last ended."""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import nn

from rankscope.compat import apply_patches, register_patch_mapping
from tests.compat.conftest import MakePackage

PARTS = """
from torch import nn

class Block(nn.Module):
    pass

def build():
    return Block()
"""


class Swapped(nn.Module):
    pass


class Other(nn.Module):
    pass


@pytest.fixture
def parts(make_package: MakePackage) -> Any:
    late = {f"late{number}.py": "from machine.parts import Block\n" for number in range(40)}
    make_package("machine", {"parts.py": PARTS, **late})
    return importlib.import_module("machine.parts")


def in_thread(work: Callable[[], None]) -> Callable[[], None]:
    """Start `work` in a thread and return what waits for it and raises what it raised."""
    pool = ThreadPoolExecutor(1)
    done = pool.submit(work)
    pool.shutdown(wait=False)

    def wait() -> None:
        done.result(120)

    return wait


def test_blocks_of_two_threads_that_overlap_leave_the_original(parts: Any) -> None:
    original = parts.Block
    register_patch_mapping({"Block": Swapped})
    second_is_in, first_is_out = threading.Event(), threading.Event()

    def second() -> None:
        with apply_patches("machine"):
            second_is_in.set()
            assert first_is_out.wait(120)
            assert type(parts.build()) is Swapped

    with apply_patches("machine"):
        finish = in_thread(second)
        assert second_is_in.wait(120)
    first_is_out.set()
    finish()
    assert parts.Block is original


def test_other_threads_see_the_replacement_while_a_block_is_open(parts: Any) -> None:
    register_patch_mapping({"Block": Swapped})
    seen: list[type] = []
    with apply_patches("machine"):
        in_thread(lambda: seen.append(type(parts.build())))()
    assert seen == [Swapped]


def test_many_threads_with_blocks_of_their_own_never_build_the_original_inside_one(
    parts: Any,
) -> None:
    original = parts.Block
    register_patch_mapping({"Block": Swapped})

    def work(seed: int) -> set[type]:
        order = random.Random(seed)
        made: set[type] = set()
        for _ in range(30):
            with apply_patches("machine"):
                made.add(type(parts.build()))
                if order.random() < 0.3:
                    with apply_patches("machine"):
                        made.add(type(parts.build()))
        return made

    with ThreadPoolExecutor(6) as pool:
        assert set().union(*pool.map(work, range(6))) == {Swapped}
    assert parts.Block is original


def test_imports_blocks_and_changes_of_the_mapping_in_many_threads_end_with_the_original(
    parts: Any,
) -> None:
    original = parts.Block
    register_patch_mapping({"Block": Swapped})

    def work(worker: int) -> None:
        for number in range(10):
            register_patch_mapping({"Block": (Swapped, Other)[number % 2]}, overwrite=True)
            with apply_patches("machine"):
                importlib.import_module(f"machine.late{(worker * 10 + number) % 40}")
                assert type(parts.build()) in {Swapped, Other, original}

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    late = [importlib.import_module(f"machine.late{number}") for number in range(40)]
    assert {module.Block for module in (parts, *late)} == {original}
