"""The native way and Python's write the same records, cell by cell, but for times and for what was
reused (whether an address recurs is chance); what the native way cannot read it leaves to Python.
"""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rankscope
from rankscope.agent.hooks.tracer import Tracer
from rankscope.capture import kernel
from rankscope.record.value import ValueFlag
from rankscope.spool.recordformat import FIRST, HEADER_BYTES, RecordKind
from rankscope.spool.writer import SpoolWriter
from tests.agent import programs

TIMES = {
    RecordKind.ENTER: 16, RecordKind.EXIT: 8, RecordKind.VALUE: 8, RecordKind.STEP: 0,
    RecordKind.END: 0, RecordKind.ERROR: 8,
}  # fmt: skip
"""Where the time of a record begins in its payload."""
FLAGS_OFFSET = HEADER_BYTES + 24
PROGRAMS = [
    programs.evaluation_between_steps, programs.teacher_and_student, programs.tied_weights,
    programs.submodules_called_directly, programs.modules_added_and_replaced, programs.odd_classes,
    programs.parametrized, programs.recurrent, programs.transformer, programs.in_place,
    programs.transformer_in_inference, programs.nested_inputs, programs.thousands_of_inputs,
    programs.hooks_of_the_user, programs.functional_calls,
]  # fmt: skip


def cells_of(
    program: Callable[[], Any], out: Path, *, native: bool, **settings: Any
) -> tuple[np.ndarray, int]:
    """Return the cells that a program wrote, and how many calls Python's pre-hook was asked of."""
    cells: list[np.ndarray] = []
    asked: list[nn.Module] = []
    close, before = SpoolWriter.close, Tracer.before_forward

    def closing(writer: SpoolWriter, *reason: Any) -> None:
        if not writer.is_closed:
            cells.append(writer._segment.cells(0).copy())  # type: ignore[union-attr]
        close(writer, *reason)

    def asking(tracer: Tracer, module: nn.Module, *call: Any) -> None:
        asked.append(module)
        before(tracer, module, *call)

    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpoolWriter, "close", closing)
        patch.setattr(Tracer, "before_forward", asking)
        if not native:
            patch.setattr(kernel.Kernel, "hooks", lambda kernel, things: None)
        with rankscope.trace(out=out, **settings):
            program()
    return cells[0], len(asked)


def without_chance(cells: np.ndarray) -> np.ndarray:
    """Return cells without checksums, times, what was reused, and the first record: the rank's."""
    first = (cells[:, 5] & FIRST).astype(bool)
    cells = cells[np.flatnonzero(first)[1] :].copy()
    first = (cells[:, 5] & FIRST).astype(bool)
    cells[:, :4] = 0
    for kind, offset in TIMES.items():
        begin = HEADER_BYTES + offset
        cells[first & (cells[:, 4] == kind), begin : begin + 8] = 0
    cells[first & (cells[:, 4] == RecordKind.VALUE), FLAGS_OFFSET] &= 255 - int(ValueFlag.REUSED)
    return cells


def assert_same_cells(program: Callable[[], Any], folder: Path, **settings: Any) -> tuple[int, int]:
    """Return how many calls were recorded, and of how many Python was asked."""
    assert kernel.build() is not None, kernel.why_none()
    natively, asked = cells_of(program, folder / "native", native=True, **settings)
    by_python, _ = cells_of(program, folder / "python", native=False, **settings)
    a, b = without_chance(natively), without_chance(by_python)
    assert a.shape == b.shape
    unlike = np.flatnonzero((a != b).any(axis=1))
    assert not unlike.size, [
        (RecordKind(a[i, 4]).name, np.flatnonzero(a[i] != b[i])) for i in unlike
    ]
    is_enter = (natively[:, 4] == RecordKind.ENTER) & (natively[:, 5] & FIRST).astype(bool)
    return int(np.count_nonzero(is_enter)), asked


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("settings", [{}, {"digest": "none"}], ids=["whole", "structure"])
def test_programs_leave_the_same_records(
    tmp_path: Path, program: Callable[[], Any], settings: dict[str, Any]
) -> None:
    assert_same_cells(program, tmp_path, **settings)


@dataclass
class Pair:
    left: torch.Tensor
    right: object


class Subclass(torch.Tensor):
    pass


def odd_values() -> dict[str, Any]:
    """Return values of every kind that a call may be handed."""
    x = torch.randn(2, 6, 40)
    inside: list[object] = [x]
    inside.append(inside)
    mask = torch.zeros(2, 1, 8, 8).masked_fill(torch.eye(8).bool(), torch.finfo(torch.float32).min)
    broken = x.clone()
    broken[0, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    with torch.inference_mode():
        inference = torch.randn(5)
    freed = torch.randn(64)
    freed.untyped_storage().resize_(0)
    return {
        "plain": x, "large": torch.randn(1100, 500), "rows": torch.randn(20_000, 3),
        "negative zero": -torch.zeros(300), "nan": broken, "mask": mask, "tiny": x * 1e-30,
        "around": x * 1e-4 + 1000.0, "double": x.double(), "extreme": x.double() * 1e200,
        "long": torch.arange(600).view(2, 300), "bool": x > 0, "byte": (x > 0).byte(),
        "half": x.half(), "bfloat16": x.bfloat16(), "float8": x.to(torch.float8_e4m3fn),
        "complex": torch.complex(x, x), "imaginary": torch.complex(x, x).conj().imag,
        "scalar": torch.tensor(3.5), "empty": torch.zeros(2, 0), "transposed": x.transpose(1, 2),
        "stepped": x[..., ::2], "offset": x[1], "repeated": torch.ones(1).expand(4000),
        "sparse": torch.eye(4).to_sparse(), "meta": torch.zeros(3, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
        "subclass": x.as_subclass(Subclass), "parameter": nn.Parameter(torch.ones(70)),
        "inference": inference, "freed": freed, "dims": torch.ones(1, 1, 1, 1, 1, 1, 1, 1, 2),
        "none": None, "true": True, "number": 7, "one": 1, "text": "a", "shape": x.shape,
        "tuple": (x, None, (x[0], [])), "dict": {"a": x, "b": {"c": x[0]}}, "keys": {1: x, "1": x},
        "ordered": OrderedDict(a=x), "user": UserDict(a=x), "pair": Pair(x, [x, 3]),
        "itself": inside, "many": [x[0, 0]] * 20, "tokens": list(range(40)), "nothing": {},
        "deep": [[[[[[[[[[x]]]]]]]]]],
    }  # fmt: skip


class Passes(nn.Module):
    def forward(self, value: Any, *more: Any, **named: Any) -> Any:
        return value


class Takes(nn.Module):
    def forward(self, value: Any, flag: bool = False) -> Any:
        return value


class Handed(nn.Module):
    """Hands every odd value to modules in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.passes, self.takes = Passes(), Takes()

    def forward(self, values: dict[str, Any]) -> torch.Tensor:
        for value in values.values():
            self.passes(value)
            self.takes(value)
            self.takes(value=value, flag=True)
        self.passes(None, 1, named=values["plain"])
        self.takes(values["plain"], flag=True)
        return self.scale * 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["gradients", "none", "a default device", "torch.func"])
def test_every_odd_value_leaves_the_same_records_and_harms_nothing(
    tmp_path: Path, mode: str
) -> None:
    def program() -> None:
        torch.manual_seed(1)
        model, values = Handed(), odd_values()
        if mode == "a default device":
            with torch.device("cpu"):
                model(values)
        elif mode == "torch.func":
            torch.func.vmap(lambda x: model({"plain": x}))(values["plain"])
        else:
            with torch.set_grad_enabled(mode == "gradients"):
                model(values)

    calls, asked = assert_same_cells(program, tmp_path)
    assert asked < calls / 10 or mode == "torch.func"


def test_a_forward_that_is_replaced_after_its_first_call_shows_its_keywords(tmp_path: Path) -> None:
    def program() -> None:
        model = nn.Sequential(Takes(), Takes())
        model.register_parameter("scale", nn.Parameter(torch.ones(1)))

        def forward(x: torch.Tensor) -> torch.Tensor:
            return model[0](x)

        model.forward = forward  # type: ignore[method-assign]
        with torch.no_grad():
            model(torch.ones(3))
            model[0].forward = lambda value, **named: value  # type: ignore[method-assign]
            model.forward = lambda x: model[0](x, scale=x)  # type: ignore[method-assign]
            model(torch.ones(3))

    assert_same_cells(program, tmp_path)
