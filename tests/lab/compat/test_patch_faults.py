"""Every fault of class patching in transformers 5.23.0: it fails there, and not here.

Each test runs with both. The runs with transformers are expected to fail, strictly: the day one
passes, docs/compat.md has to say so.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.conftest import MakePackage
from tests.compat.peer import (
    Calls,
    inputs,
    needs_transformers,
    ours,
    said_by,
    theirs,
    tiny,
    untouched,
)

IMPLEMENTATIONS: dict[str, Callable[[], Calls]] = {"rankscope": ours, "transformers": theirs}
HUB = "transformers_modules"
"""A package that both patch by default: where transformers puts downloaded code."""
PARTS = """
from torch import nn

class RedBlock(nn.Module):
    pass

class RedSettings:
    pass
"""


class First(nn.Module):
    pass


class Second(nn.Module):
    pass


@pytest.fixture(
    params=[
        "rankscope",
        pytest.param(
            "transformers",
            marks=[
                needs_transformers,
                pytest.mark.parity,
                pytest.mark.xfail(
                    strict=True,
                    raises=(AssertionError, pytest.fail.Exception),
                    reason="a fault of transformers 5.23.0",
                ),
            ],
        ),
    ]
)
def calls(request: pytest.FixtureRequest) -> Iterator[Calls]:
    chosen = IMPLEMENTATIONS[request.param]()
    chosen.clear_patch_mapping()
    yield chosen
    chosen.clear_patch_mapping()


@pytest.fixture
def parts(make_package: MakePackage) -> Any:
    late = f"from {HUB}.parts import RedBlock\nclass LateBlock(RedBlock):\n    pass\n"
    files = {"parts.py": PARTS, "late.py": late}
    make_package(HUB, files)
    return importlib.import_module(f"{HUB}.parts")


# measured in seeds: what the page of behaviour lists -------------------------------------------


@pytest.mark.parametrize("bad", [{"Bad": First()}, {"Bad": dict}, {"Taken": First}])
def test_a_bad_entry_leaves_the_mapping_as_it_was(calls: Calls, bad: Any) -> None:
    calls.register_patch_mapping({"Taken": Second})
    with pytest.raises((TypeError, ValueError)):
        calls.register_patch_mapping({"Good": First, **bad})
    assert calls.get_patch_mapping() == {"Taken": Second}


def test_an_exception_in_the_block_leaves_no_class_replaced(calls: Calls, parts: Any) -> None:
    original = parts.RedBlock
    calls.register_patch_mapping({"RedBlock": First})
    with contextlib.suppress(ValueError), calls.apply_patches():
        raise ValueError
    assert parts.RedBlock is original


def layers_of_its_own(kind: str) -> tuple[type[Any], Any, str, type[nn.Module]]:
    """A model class with recorders of its own, its config, and its layer class by name."""
    cls, config = tiny(kind)
    recorders = {"hidden_states": cls._can_record_outputs["hidden_states"]}
    own = type(f"Own{cls.__name__}", (cls,), {"_can_record_outputs": recorders})
    layer = next(m for m in cls(config).modules() if type(m).__name__.endswith("Layer"))

    def forward(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x * 2

    replacement = type(
        "OwnLayer", (nn.Module,), {"__init__": lambda self, *_, **__: nn.Module.__init__(self)}
    )
    replacement.forward = forward  # type: ignore[attr-defined]
    return own, config, type(layer).__name__, replacement


def states(model: nn.Module, kind: str) -> int:
    with torch.no_grad():
        return len(model(**inputs(kind), output_hidden_states=True).hidden_states)


@needs_transformers
@pytest.mark.parity
@pytest.mark.parametrize("kind", ["llama", "bert", "mixtral"])
def test_a_fresh_model_after_clearing_returns_its_hidden_states(calls: Calls, kind: str) -> None:
    cls, config, layer, replacement = layers_of_its_own(kind)
    calls.register_patch_mapping({f"^{layer}$": replacement})
    with calls.apply_patches():
        model = cls(config)
    calls.patch_output_recorders(model)
    assert type(model).__name__.startswith("Own") and states(model, kind) == 3
    calls.clear_patch_mapping()
    assert states(cls(config), kind) == 3
    assert states(model, kind) == 3


@needs_transformers
@pytest.mark.parity
def test_a_model_made_before_keeps_its_hidden_states(calls: Calls) -> None:
    cls, config, layer, replacement = layers_of_its_own("llama")
    before = cls(config)
    calls.register_patch_mapping({f"^{layer}$": replacement})
    with calls.apply_patches():
        model = cls(config)
    calls.patch_output_recorders(model)
    assert states(model, "llama") == 3
    assert states(before, "llama") == 3


@needs_transformers
@pytest.mark.parity
def test_a_model_that_has_captured_before_captures_its_replaced_layers(calls: Calls) -> None:
    cls, config, layer, replacement = layers_of_its_own("llama")
    calls.register_patch_mapping({f"^{layer}$": replacement})
    with calls.apply_patches():
        model = cls(config)
    assert states(model, "llama") == 0
    calls.patch_output_recorders(model)
    assert states(model, "llama") == 3


@needs_transformers
@pytest.mark.parity
def test_opening_and_closing_a_block_costs_less_than_a_third_of_transformers() -> None:
    for kind in ("llama", "bert", "mixtral"):
        tiny(kind)

    def seconds(calls: Calls, repeats: int) -> float:
        calls.register_patch_mapping({"^NoSuchClassAnywhere$": First})
        times = []
        for _ in range(repeats):
            start = time.thread_time()
            with calls.apply_patches():
                pass
            times.append(time.thread_time() - start)
        calls.clear_patch_mapping()
        return min(times)

    assert seconds(ours(), 5) < seconds(theirs(), 2) / 3


@needs_transformers
@pytest.mark.parity
def test_a_key_that_is_no_expression_is_said_once(calls: Calls, parts: Any) -> None:
    with said_by("transformers") as messages, warnings.catch_warnings(record=True) as warned:
        calls.register_patch_mapping({"Broken[": First})
        with calls.apply_patches():
            pass
    assert len(messages) + len(warned) == 1


# found while building this -----------------------------------------------------------------------


def test_unregistering_an_unknown_key_removes_no_other(calls: Calls) -> None:
    calls.register_patch_mapping({"A": First, "B": First})
    with pytest.raises(ValueError):
        calls.unregister_patch_mapping(["A", "Unknown"])
    assert list(calls.get_patch_mapping()) == ["A", "B"]


def test_a_key_that_is_no_text_is_refused_at_once(calls: Calls) -> None:
    with pytest.raises(TypeError):
        calls.register_patch_mapping({First: Second})


def test_blocks_of_two_threads_that_overlap_leave_the_original(calls: Calls, parts: Any) -> None:
    original = parts.RedBlock
    calls.register_patch_mapping({"RedBlock": First})
    second_is_in, first_is_out = threading.Event(), threading.Event()

    def second() -> None:
        with calls.apply_patches():
            second_is_in.set()
            assert first_is_out.wait(120)

    with ThreadPoolExecutor(1) as pool:
        with calls.apply_patches():
            done = pool.submit(second)
            assert second_is_in.wait(120)
        first_is_out.set()
        done.result(120)
    assert parts.RedBlock is original


def test_a_class_that_is_no_module_is_never_replaced_by_one(calls: Calls, parts: Any) -> None:
    settings = parts.RedSettings
    calls.register_patch_mapping({"^Red(Block|Settings)$": First})
    with calls.apply_patches():
        assert (parts.RedBlock, parts.RedSettings) == (First, settings)


def test_a_module_imported_in_the_block_is_patched_in_it(calls: Calls, parts: Any) -> None:
    calls.register_patch_mapping({"LateBlock": First})
    with calls.apply_patches():
        late: Any = importlib.import_module(f"{HUB}.late")
        assert late.LateBlock is First
    assert late.LateBlock.__bases__ == (parts.RedBlock,)


def test_a_module_imported_in_the_block_keeps_no_replacement(calls: Calls, parts: Any) -> None:
    original = parts.RedBlock
    calls.register_patch_mapping({"RedBlock": First})
    with calls.apply_patches():
        late: Any = importlib.import_module(f"{HUB}.late")
    assert late.RedBlock is original and late.LateBlock.__bases__ == (original,)


def test_matching_a_pattern_imports_nothing(calls: Calls, make_package: MakePackage) -> None:
    lazy = (
        "import importlib\n"
        "def __dir__(): return ['RedBlock']\n"
        "def __getattr__(name):\n"
        "    if name == 'RedBlock':\n"
        f"        return importlib.import_module('{HUB}.parts').RedBlock\n"
        "    raise AttributeError(name)\n"
    )
    make_package(HUB, {"__init__.py": lazy, "parts.py": PARTS})
    calls.register_patch_mapping({"^RedBlock$": First})
    with calls.apply_patches():
        assert f"{HUB}.parts" not in sys.modules


def test_a_package_whose_name_begins_alike_is_left_alone(
    calls: Calls, make_package: MakePackage
) -> None:
    make_package("transformers_of_others", {"parts.py": PARTS})
    others: Any = importlib.import_module("transformers_of_others.parts")
    calls.register_patch_mapping({"RedBlock": First})
    with calls.apply_patches():
        assert others.RedBlock is not First


def test_an_entry_of_sys_modules_that_raises_when_asked_changes_nothing(
    calls: Calls, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hostile(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("asked")

    hostile = Hostile("anything")
    del vars(hostile)["__name__"]
    monkeypatch.setitem(sys.modules, "anything", hostile)
    calls.register_patch_mapping({"RedBlock": First})
    try:
        with calls.apply_patches():
            assert parts.RedBlock is First
    except RuntimeError as error:
        raise AssertionError("a module that has nothing to do with it was asked") from error


def test_a_module_that_leaves_sys_modules_in_the_block_is_restored(
    calls: Calls, parts: Any
) -> None:
    original = parts.RedBlock
    calls.register_patch_mapping({"RedBlock": First})
    with contextlib.suppress(KeyError), calls.apply_patches():
        del sys.modules[f"{HUB}.parts"]
    assert parts.RedBlock is original


@needs_transformers
@pytest.mark.parity
def test_patching_the_recorders_twice_is_patching_them_once(calls: Calls) -> None:
    cls, config, layer, replacement = layers_of_its_own("llama")
    calls.register_patch_mapping({f"^{layer}$": replacement, "^OwnLayer$": Second})
    model = cls(config)
    with untouched(cls):
        calls.patch_output_recorders(model)
        calls.patch_output_recorders(model)
        assert model._can_record_outputs["hidden_states"] is replacement


@needs_transformers
@pytest.mark.parity
def test_the_recorders_of_a_compiled_model_are_patched_in_it() -> None:
    cls, config, layer, replacement = layers_of_its_own("llama")
    ours().register_patch_mapping({f"^{layer}$": replacement})
    with ours().apply_patches():
        model = cls(config).eval()
    compiled = torch.compile(model, backend="eager")
    ours().patch_output_recorders(compiled)
    assert states(compiled, "llama") == states(model, "llama") == 3
    assert states(cls(config), "llama") == 3
