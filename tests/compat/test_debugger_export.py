"""The files of transformers' debugger from a trace: texts as torch prints them, names, pruning,
traces that kept less than everything.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankscope
from rankscope.compat.debugger.text import Arena, glimpse_of, statistics_of, tensor_text
from rankscope.export.formats import Selection, export
from tests.compat import debugger_modules as modules
from tests.compat.debugger_files import call, references, tree, values, walk
from tests.torches import PRINTS_WIDE

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip
ODD = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"), "-0": -0.0}


def some_tensor(choose: random.Random) -> torch.Tensor:
    dtype = choose.choice(DTYPES)
    sizes = [0, 1, 2, 3, 5, 6, 7, 8, 12, 40]
    shape = [choose.choice(sizes) for _ in range(choose.randint(0, 4))]
    found = torch.randn(shape, dtype=torch.float64) * 10 ** choose.randint(-8, 8)
    kind = choose.choice(["plain", "whole", "zero", "mixed", "all"])
    if kind == "whole":
        found = found.round()
    elif kind == "zero":
        found = found * 0
    elif kind in ("mixed", "all"):
        odd = torch.full(shape, choose.choice([*ODD.values()]), dtype=torch.float64)
        found = torch.where(torch.rand(shape) < (0.3 if kind == "mixed" else 2), odd, found)
    if dtype.is_complex:
        return torch.complex(found, torch.randn(shape, dtype=torch.float64)).to(dtype)
    if dtype is torch.bool:
        return found > 0
    if not dtype.is_floating_point:
        low = -100 if dtype.is_signed else 0
        return torch.nan_to_num(found, 0, 100, 0).clamp(low, 100).to(dtype)
    return found.to(dtype)


def broken(text: str) -> str:
    """Return a printed tensor as far as torch breaks its lines in the right places."""
    return "".join(text.split()) if PRINTS_WIDE else text


def test_tensors_and_statistics_are_written_as_torch_prints_them() -> None:
    choose = random.Random(3)
    torch.manual_seed(3)
    compared, arena = 0, Arena()
    for number in range(600):
        options = {
            "threshold": choose.choice((0, 30, math.inf)),
            "edgeitems": choose.choice((0, 1, 2, 5)),
            "precision": choose.choice((0, 2, 7)),
        }
        chosen: dict[str, Any] = options if number % 2 else {}  # torch's own, or the program's
        with torch._tensor_str.printoptions(sci_mode=True, linewidth=120, **chosen):
            tensor = some_tensor(choose)
            seen = glimpse_of(tensor, arena=arena)
            text = str(tensor)
            assert broken(tensor_text(seen)) == broken(text), (tensor.dtype, tensor.shape, chosen)
            if statistics_of(seen) and tensor.numel() > 1:
                compared += 1
                for name, said in statistics_of(seen).items():
                    assert broken(said) == broken(repr(getattr(tensor, name)()))
    assert compared > 50


def exported(
    model: nn.Module, out: Path, *given: Any, options: dict[str, object], **settings: Any
) -> Path:
    settings = {"tensors": "**", **settings}
    with rankscope.trace(model, out=out / "trace", **settings) as handle, torch.no_grad():
        model(*given)
    selection = Selection.parse(path="*", step="", mode="", phase="", rank="")
    target = out / "files"
    export(handle.open(), "hf", target, selection, lambda *_: None, options)
    return target


def test_only_tensors_of_layers_that_are_left_have_files(tmp_path: Path) -> None:
    model = modules.TwoLists(5)
    for name, options in (("few", {}), ("all", {"all_layers": True})):
        given = {"safetensors": True, **options}
        files = exported(model, tmp_path / name, torch.ones(2, 4), options=given)
        found = {path.name for path in files.glob("*.safetensors")}
        assert found == references(tree(files))
        assert len([*walk(tree(files))]) == (1 + 20 if options else 1 + 8)


def test_a_trace_without_forms_is_nested_as_far_as_its_slots_tell(tmp_path: Path) -> None:
    model = modules.Told()
    files = exported(model, tmp_path, torch.ones(2, 4), options={},
                     tensors="**:input*,**:output*")  # fmt: skip
    node = call(tree(files), ".inner")
    assert node["inputs"]["args"][0]["shape"] == "torch.Size([2, 4])"
    assert call(tree(files), ".fc")["outputs"]["shape"] == "torch.Size([2, 4])"


def test_a_tensor_that_was_not_kept_says_why(tmp_path: Path) -> None:
    model = modules.Told()
    files = exported(model, tmp_path, torch.ones(2, 4), options={},
                     tensors="**:form:*,inner.fc:output")  # fmt: skip
    (value,) = values(call(tree(files), ".inner.fc")["inputs"])
    assert value["value"] is None and "does not take it" in value["note"]
    assert call(tree(files), ".inner.fc")["outputs"]["value"] is not None


def test_the_summary_is_the_tree_without_values_and_both_are_json(tmp_path: Path) -> None:
    model = modules.Nesting()
    with rankscope.trace(model, out=tmp_path / "trace", tensors="**") as handle:
        model.run()
    selection = Selection.parse(path="*", step="", mode="", phase="", rank="")
    export(handle.open(), "hf", tmp_path / "files", selection, lambda *_: None, {})
    full = tree(tmp_path / "files")
    for value in values(full):
        del value["value"]
    assert full == tree(tmp_path / "files", "SUMMARY")
    for path in (tmp_path / "files").iterdir():
        text = path.read_text()
        assert text == json.dumps(json.loads(text), indent=2)


def test_a_trace_without_a_forward_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rankscope_error(), match="no forward"):
        exported(modules.Told(), tmp_path, torch.ones(2, 4), options={}, phases="setup")


def rankscope_error() -> type[Exception]:
    from rankscope.errors import SelectionError

    return SelectionError
