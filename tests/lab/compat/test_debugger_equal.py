"""Beside transformers 5.23.0: over its models both debuggers write the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compat.debugger_files import (
    needs_transformers,
    ours,
    references,
    restored,
    theirs,
    tree,
    values,
)
from tests.lab.compat.debugger_models import MODELS, made

pytestmark = [needs_transformers, pytest.mark.parity]

FLAGS = [(prunes, as_text) for prunes in (True, False) for as_text in (True, False)]


def written(which: Any, name: str, folder: Path, prunes: bool, as_text: bool) -> Path:
    model, run = made(name)
    with which(model, folder, do_prune_layers=prunes, use_repr=as_text):
        run(model)
    restored()
    return folder


@pytest.mark.parametrize(("prunes", "as_text"), FLAGS)
@pytest.mark.parametrize("name", MODELS)
def test_both_write_the_same_files_byte_for_byte(
    tmp_path: Path, name: str, prunes: bool, as_text: bool
) -> None:
    """Every file is compared as bytes. Two things are set aside, which are faults of 5.23: files
    that its own JSON does not name (orphans), and that a module called twice has one file for both
    calls; there, names differ by the number of the call, and its file is held against our last.
    """
    one = written(theirs, name, tmp_path / "theirs", prunes, as_text)
    two = written(ours, name, tmp_path / "ours", prunes, as_text)
    renamed = _later_calls(tree(one), tree(two))
    assert bool(renamed) is (name in ("t5", "vit") and not as_text)
    wanted = {path.name for path in one.glob("*.json")} | references(tree(one))
    found = {path.name for path in two.iterdir()}
    assert found - set(renamed) == wanted
    latest = {their: our for our, their in renamed.items()}
    for file in sorted(wanted):
        bytes_found = (two / latest.get(file, file)).read_bytes()
        if file.endswith(".json"):
            for our, their in renamed.items():
                bytes_found = bytes_found.replace(f"./{our}".encode(), f"./{their}".encode())
        assert bytes_found == (one / file).read_bytes(), file


def _later_calls(one: dict[str, Any], two: dict[str, Any]) -> dict[str, str]:
    """{our file: theirs} where the names differ."""
    pairs = zip(values(one), values(two), strict=True)
    named = [(a["value"], b["value"]) for a, b in pairs if isinstance(a["value"], str)]
    renamed = {b.removeprefix("./"): a.removeprefix("./") for a, b in named if a != b}
    for our, their in renamed.items():
        assert any(our.replace(f"_{n}_", "_", 1) == their for n in range(1, 9)), (our, their)
    return renamed


def test_the_same_model_gives_the_same_files_under_gradients_off_and_by_forward_itself(
    tmp_path: Path,
) -> None:
    import torch

    model, _ = made("llama")
    tokens = torch.arange(5, 15)[None]
    for number, which in enumerate((theirs, ours)):
        with which(model, tmp_path / f"{number}"), torch.inference_mode():
            model.forward(input_ids=tokens, use_cache=False)
        restored()
    assert _files(tmp_path / "0") == _files(tmp_path / "1")


def test_dtypes_and_nested_arguments_are_written_alike(tmp_path: Path) -> None:
    from tests.compat.debugger_modules import Nesting

    for number, which in enumerate((theirs, ours)):
        model = Nesting()
        with which(model, tmp_path / f"{number}"):
            model.run()
        restored()
    assert _files(tmp_path / "0") == _files(tmp_path / "1")


@pytest.mark.parametrize("as_text", [True, False])
def test_a_frozen_parameter_is_printed_as_one(tmp_path: Path, as_text: bool) -> None:
    """(Of one that needs a gradient `requires_grad` is left out here, as of every tensor.)"""
    import torch
    from torch import nn

    from tests.compat.debugger_modules import Take

    given = nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)
    on_meta = nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
    for number, which in enumerate((theirs, ours)):
        model = Take()
        with which(model, tmp_path / f"{number}", use_repr=as_text), torch.no_grad():
            model([given, {"same": given.t()}, *([on_meta] if as_text else [])])
        restored()
    assert _files(tmp_path / "0") == _files(tmp_path / "1")
    if as_text:
        assert (
            "Parameter containing:"
            in (tmp_path / "1").joinpath("Take_debug_tree_FULL_TENSORS.json").read_text()
        )


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "options",
    [
        {"profile": "full"},
        {"profile": "short", "threshold": 20},
        {"precision": 7, "edgeitems": 1, "threshold": 5},
        {"edgeitems": 0, "threshold": 0, "linewidth": 40, "sci_mode": False},
    ],
    ids=str,
)
def test_print_options_of_the_program_count_as_there(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """All but the length of a line and the notation, which both set themselves."""
    import torch

    from tests.compat.debugger_modules import NoParameters

    shapes, model = ((), (3,), (40, 40), (2, 0), (3, 2, 50)), NoParameters()
    for number, which in enumerate((theirs, ours)):
        torch.manual_seed(0)
        for place, shape in enumerate(shapes):
            if 0 in shape and which is theirs:
                continue  # an empty tensor ends the forward there
            folder = tmp_path / f"{number}" / f"{place}"
            torch.set_printoptions(**options)
            before = torch._tensor_str.get_printoptions()
            with which(model, folder):
                model(torch.randn(shape))
            if which is ours:
                assert torch._tensor_str.get_printoptions() == before
                if 0 not in shape:
                    assert _files(folder) == _files(tmp_path / "0" / f"{place}"), shape
            restored()
