"""Full tensors kept by a traced program: it trains as ever, and what is stored is the value at the
call, whatever became of the tensor afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.checkpoint import checkpoint

import rankscope
from rankscope.tree.build import recover
from rankscope.tree.reader import open_trace
from rankscope.tree.slotview import SlotView
from rankscope.tree.views import Node, Trace
from tests.models import Net, train
from tests.unharmed import traced_unharmed


class Odd(nn.Module):
    """Checkpointing, an in-place module, autocast, a view that is written, tuples, dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.relu = nn.ReLU(inplace=True)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3))
        self.split = Split()
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, *, use_reentrant: bool) -> torch.Tensor:
        x = self.relu(self.first(x))
        x = checkpoint(self.block, x, use_reentrant=use_reentrant)
        low, high = self.split(x)
        low.mul_(2.0)
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(torch.cat([low, high], 1)).float()


class Split(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.clone()
        return x[:, :8], x[:, 8:]


def odd_program(use_reentrant: bool) -> Any:
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        for _ in range(2):
            loss = model(torch.randn(6, 8), use_reentrant=use_reentrant).square().mean()
            loss.backward()
            losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, losses


def values_of(trace: Trace) -> Iterator[tuple[Node, SlotView, int]]:
    """Every slot of every node, and the reference of rank 0's bytes."""
    for node in trace.walk():
        for view in node.slots:
            yield node, view, int(view.step["values.reference"][view.rows.start])


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_training_is_bitwise_the_same_with_everything_kept(tmp_path, use_reentrant):
    trace = traced_unharmed(lambda: odd_program(use_reentrant), tmp_path / "trace", tensors="**")
    assert trace.is_complete
    (rank,) = trace.completeness["ranks"]
    assert rank["errors"] == rank["notes"] == []
    files, seen = trace.tensor_files, set()
    for node, view, reference in values_of(trace):
        if view.dtype == "python":
            assert not reference
            continue
        assert reference, (node, view.slot)
        assert ([*view.references()], view.not_kept) == ([0], ())
        stored = files.find(0, 0, reference)
        (fold,) = view.folds
        assert (stored.dtype, stored.shape) == (view.dtype, fold.shape)
        assert stored.is_intact
        if stored.dtype == "float32" and stored.data.size:
            assert float(stored.array().min()) == fold.digest.min
            assert float(stored.array().max()) == fold.digest.max
        seen.add((node.phase.word, view.slot.split(":")[0].split(".")[0]))
    assert seen >= {
        ("setup", "param"), ("forward", "input"), ("forward", "output"), ("recompute", "output"),
        ("backward", "grad_output"), ("backward", "grad_input"), ("grads", "grad"),
        ("params", "param"),
    }  # fmt: skip


def test_what_is_stored_is_what_hooks_saw_though_it_is_overwritten_right_after(tmp_path):
    """The user's own hooks clone; then the program writes over the tensor, and frees it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    cloned: dict[tuple[str, str], list[torch.Tensor]] = {}

    def before(module: nn.Module, args: tuple[torch.Tensor, ...], name: str) -> None:
        cloned.setdefault((name, "input.0"), []).append(args[0].detach().clone())

    def after(module: nn.Module, args: object, output: torch.Tensor, name: str) -> None:
        cloned.setdefault((name, "output"), []).append(output.detach().clone())

    for name, module in model.named_children():
        module.register_forward_pre_hook(lambda m, a, n=name: before(m, a, n))
        module.register_forward_hook(lambda m, a, o, n=name: after(m, a, o, n))
    globs = "**:input.0,**:output"
    with rankscope.trace(model, out=tmp_path / "t", tensors=globs) as handle, torch.no_grad():
        for _ in range(3):
            x = torch.randn(5, 4)
            y = model(x)
            x.fill_(7.0)
            y.fill_(9.0)
            del x, y
    trace = handle.open()
    files, found = trace.tensor_files, 0
    for node, view, reference in values_of(trace):
        if node.path and node.phase.word == "forward":
            wanted = cloned[node.path, view.slot][_which(trace, node)]
            assert files.find(0, 0, reference).data.tobytes() == wanted.numpy().tobytes()
            found += 1
    assert found == 3 * 3 * 2


def _which(trace: Trace, node: Node) -> int:
    """Which call of its path a node is, in the order they were made."""
    calls = sorted(trace.find(node.path, phase="forward"), key=lambda n: n.time.start_us)
    return calls.index(node)


def test_a_value_seen_twice_is_stored_once_and_only_what_was_asked_for_is(tmp_path):
    with rankscope.trace(out=tmp_path / "t", steps="0", tensors="layers.*:*put*") as handle:
        train(Net())
    trace = handle.open()
    by_slot = {(n.path, n.phase.word, v.slot): r for n, v, r in values_of(trace) if r}
    assert {path.split(".")[0] for path, _, _ in by_slot} == {"layers"}
    assert {slot.split(".")[0] for _, _, slot in by_slot} == {
        "input", "output", "grad_input", "grad_output"
    }  # fmt: skip
    assert by_slot["layers.0", "forward", "output"] == by_slot["layers.1", "forward", "input.0"]
    stored = [reference for reference, _ in trace.tensor_files.tensors(*_streams(trace))]
    assert sorted(stored) == sorted({*by_slot.values()})
    assert len(stored) < len(by_slot)


def _streams(trace: Trace) -> Any:
    return trace.tensor_files.streams()


def test_without_digests_nothing_but_the_tensors_asked_for_is_recorded(tmp_path):
    with rankscope.trace(
        out=tmp_path / "t", steps="0", digest="none", tensors="head:output,**:grad:*,layer.0"
    ) as handle:
        train(Net())
    trace = handle.open()
    slots = {(n.path, v.slot) for n, v, r in values_of(trace)}
    assert slots == {("head", "output")} | {
        (f"layers.{i}.{part}", f"grad:{name}") for i in (0, 1) for part in ("up", "down")
        for name in ("weight", "bias")
    } | {("head", "grad:weight"), ("head", "grad:bias")}  # fmt: skip
    assert all(r for _, _, r in values_of(trace))
    (rank,) = trace.completeness["ranks"]
    assert rank["tensors"] == [
        "tensors: 'layer.0' took nothing: no traced slot of any module has that name"
    ]
    assert trace.is_complete


def test_what_cannot_be_kept_is_marked_and_its_reason_is_in_the_trace(tmp_path, capsys):
    """Beside what can be: sparse, complex128, and everything once the budget is used up."""

    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.to_sparse(), x.to(torch.complex128), x) * self.weight

    class Inner(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return c

    with rankscope.trace(
        out=tmp_path / "t", tensors="inner:*", tensor_budget=(1 << 20) + 8000
    ) as handle:
        model = Strange()
        with torch.no_grad():
            model(torch.ones(3))
            model(torch.ones(3000, 3))
    trace = handle.open()
    first, second = (n for n in trace.find("inner", phase="forward"))
    kept = {v.slot: (tuple(v.references()), v.not_kept) for v in first.slots if v.dtype != "python"}
    assert kept == {
        "input.0": ((), (0,)), "input.1": ((), (0,)), "input.2": ((0,), ()),
        "output": ((0,), ()),
    }  # fmt: skip
    assert {v.not_kept for v in second.slots if v.dtype != "python"} == {(0,)}
    (rank,) = trace.completeness["ranks"]
    said = "\n".join(rank["tensors"])
    assert "2 tensors (0.1 MB) were not kept: complex128: safetensors knows no complex128" in said
    assert "sparse" in said and "(--rs-tensor-budget)" in said
    assert len(rank["tensors"]) == 3
    assert trace.is_complete and not rank["notes"] and not rank["errors"]
    told = capsys.readouterr().err
    assert told.count("tensors are not kept: the disk budget is used up") == 1


def test_a_budget_that_the_disk_does_not_hold_is_refused_before_anything_runs(tmp_path, capsys):
    with rankscope.trace(out=tmp_path / "t", tensors="**", tensor_budget="900000T") as handle:
        train(Net(), steps=1)
    assert handle.path is None
    assert "may keep" in capsys.readouterr().err


def test_bytes_that_are_gone_are_named_and_nothing_refers_to_them(tmp_path):
    with rankscope.trace(out=tmp_path / "t", steps="0", tensors="**", keep_spool=True) as handle:
        train(Net())
    count = len(list(handle.open().tensor_files.tensors(*_streams(handle.open()))))
    (tmp_path / "t/tensors/rank00000/000001.safetensors").unlink()
    recover([tmp_path / "t"], tmp_path / "again")
    trace = open_trace(tmp_path / "again")
    (rank,) = trace.completeness["ranks"]
    assert rank["notes"] == [
        f"tensors/rank00000/000001.safetensors: is not there; the records name {count} tensors "
        "in it"
    ]
    assert not trace.is_complete
    views = [view for _, view, reference in values_of(trace) if not reference]
    assert len(views) == len(list(values_of(trace)))
    assert {v.not_kept for v in views if v.dtype != "python"} == {(0,)}


def test_the_trace_says_where_the_bytes_are_to_whoever_has_only_safetensors(tmp_path):
    """As docs/trace-format.md has it: a row of the columns names file and key."""
    with rankscope.trace(out=tmp_path / "t", steps="0", tensors="head:output") as handle:
        model = Net()
        train(model)
    folder = handle.path
    document = json.loads((folder / "trace.json").read_text())
    assert document["storage"]["tensors"] == "tensors"
    with safe_open(folder / "steps" / "000000.safetensors", "np") as columns:
        reference, chunk = (columns.get_tensor(f"values.{name}") for name in ("reference", "chunk"))
    (row,) = reference.nonzero()[0]
    path = Path(folder, "tensors", "rank00000", f"{chunk[row]:06d}.safetensors")
    with safe_open(path, "pt") as file:
        assert file.get_tensor(str(reference[row])).shape == (4, 3)
