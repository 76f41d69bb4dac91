"""Odd tensors that go in and out of modules while everything is kept: each kept one is bitwise what
the program's own `clone()` at the same place gave, each other one has a reason, and the program
computes what it computes untraced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankscope
from rankscope.capture.pytree import walk
from rankscope.spool.chunks import writing as chunks
from rankscope.tree.views import Trace
from tests.unharmed import traced_unharmed

Cloned = dict[tuple[str, str], list[bytes | None]]


def bytes_of(tensor: torch.Tensor) -> bytes | None:
    """Row-major bytes of a tensor as torch itself clones it; None of one that has no such."""
    with torch.no_grad():
        try:
            plain = tensor.detach().clone().resolve_conj().resolve_neg().contiguous()
            return bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return None


class Odd(nn.Module):
    """Hands on what a function makes of its inputs; saves both inside its own forward."""

    def __init__(self, name: str, make: Callable[..., Any], cloned: Cloned | None) -> None:
        super().__init__()
        self.name, self.make, self.cloned = name, make, cloned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._save("input", list(args) if len(args) > 1 else args[0] if args else None, args)
        made = self.make(*args, **kwargs)
        self._save("output", made)
        return made

    def _save(self, kind: str, value: Any, args: tuple[Any, ...] | None = None) -> None:
        if self.cloned is None:
            return
        for slot, leaf in walk(kind, args if args is not None else value):
            if isinstance(leaf, torch.Tensor):
                can_clone = self.name not in ("freed", "too_short", "repeated")
                read = bytes_of(leaf) if can_clone or kind == "input" else None
                self.cloned.setdefault((self.name, slot), []).append(read)


class Root(nn.Module):
    """Calls odd modules by name and then spoils what they returned."""

    def __init__(self, makes: dict[str, Callable[..., Any]], cloned: Cloned | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.parts = nn.ModuleDict(
            {f"odd_{name}": Odd(name, make, cloned) for name, make in makes.items()}
        )

    def forward(self, x: torch.Tensor, spoil: Callable[[Any], None]) -> torch.Tensor:
        for part in self.parts.values():
            spoil(part(x.detach().clone()))
        return (x * self.weight).sum()


def compared(trace: Trace, cloned: Cloned) -> dict[tuple[str, str], bool]:
    """Hold everything kept against the clones; return for each slot whether it was kept."""
    files = trace.tensor_files
    found: dict[tuple[str, str], bool] = {}
    calls: dict[str, int] = {}
    nodes = sorted(
        (n for n in trace.walk() if n.phase.word == "forward"), key=lambda n: n.time.start_us
    )
    for node in nodes:
        name = node.path.removeprefix("parts.odd_")
        which = calls[name] = calls.get(name, -1) + 1
        for view in node.slots:
            if (name, view.slot) not in cloned:
                continue
            reference = int(view.step["values.reference"][view.rows.start])
            found[name, view.slot] = bool(reference)
            if reference:
                stored = files.find(0, 0, reference)
                assert stored.is_intact, (name, view.slot)
                assert stored.data.tobytes() == cloned[name, view.slot][which], (name, view.slot)
            else:
                assert view.not_kept == (0,), (name, view.slot)
    return found


def free(made: Any) -> None:
    """Overwrite the memory of what a module returned, and take it away."""
    for _, leaf in walk("output", made):
        try:
            storage = leaf.untyped_storage()
            if storage.device.type == "cpu" and storage.nbytes():
                storage.fill_(0xA5)
            storage.resize_(0)
        except (RuntimeError, NotImplementedError):
            pass  # it has no memory of its own, or memory that cannot be taken


def too_short(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made.untyped_storage().resize_(made.nbytes // 2)
    return made


def freed(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made.untyped_storage().resize_(0)
    return made


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "same": lambda x: x,
    "strided": lambda x: x[:, ::2],
    "transposed": lambda x: x.T,
    "narrowed": lambda x: x[1:-1, 3:5],
    "expanded": lambda x: x[:1].expand(50, 8),
    "expanded_scalar": lambda x: x[0, 0].expand(3, 4, 5),
    "windows": lambda x: x.reshape(-1).as_strided((10, 6), (2, 1)),
    "offset": lambda x: x.reshape(-1)[5:],
    "scalar": lambda x: x[2, 3],
    "one": lambda x: x[2:3, 3:4],
    "empty": lambda x: x[:0],
    "no_columns": lambda x: x[:, :0],
    "many_dims": lambda x: x.reshape(1, 2, 1, 2, 1, 1, 2, 1, 2, 2, 1, 1),
    "bfloat16": lambda x: x.bfloat16().T,
    "half": lambda x: x.half()[::2],
    "double": lambda x: x.double(),
    "e4m3": lambda x: x.to(torch.float8_e4m3fn),
    "e5m2": lambda x: x.to(torch.float8_e5m2).T,
    "e4m3fnuz": lambda x: x.to(torch.float8_e4m3fnuz),
    "complex": lambda x: torch.complex(x, -x),
    "conjugate": lambda x: torch.complex(x, -x).conj(),
    "conjugate_transposed": lambda x: torch.complex(x, -x).mH,
    "negative_bit": lambda x: torch.complex(x, -x).conj().imag,
    "real": lambda x: torch.complex(x, -x).real,
    "bool": lambda x: x > 0,
    "uint16": lambda x: x.abs().mul(100).to(torch.uint16),
    "uint64": lambda x: x.abs().mul(100).to(torch.uint64),
    "nan": lambda x: torch.full_like(x, float("nan")).view(torch.int32).add_(7).view(torch.float32),
    "minus_zero": lambda x: torch.zeros_like(x).neg(),
    "subclass": lambda x: x.as_subclass(Plain),
    "parameter": lambda x: nn.Parameter(x.clone()),
    "tuple": lambda x: (x, [x.T, {"a": x[0]}], x),
    "numpy": lambda x: torch.from_numpy(x.numpy()[:, ::3]),
    "inference": lambda x: _inference(x),
    "channels_last": lambda x: x.reshape(1, 2, 4, 4).to(memory_format=torch.channels_last),
    "large_transposed": lambda x: x.repeat(300, 40).T,
    "shared": lambda x: x.clone().share_memory_(),
}
NOT_KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1, :3]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged),
    "complex128": lambda x: torch.complex(x, x).to(torch.complex128),
    "complex32": lambda x: torch.complex(x, x).to(torch.complex32),
    "mkldnn": lambda x: x.to_mkldnn(),
    "freed": freed,
    "too_short": too_short,
    "repeated": lambda x: x[0, 0].expand(1 << 15, 1 << 12),
}


def _inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x + 1


@pytest.mark.filterwarnings("ignore")
def test_every_odd_tensor_is_kept_as_its_clone_or_said_not_to_be(tmp_path: Path) -> None:
    cloned: Cloned = {}

    def program() -> object:
        # the clones of the traced run replace those of the plain one
        cloned.clear()
        model = Root({**KEPT, **NOT_KEPT}, cloned)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            loss = model(torch.randn(4, 8), free)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return model, losses

    trace = traced_unharmed(program, tmp_path / "t", tensors="parts.*", digest="full")
    found = compared(trace, cloned)
    kept = {
        name for (name, slot), is_kept in found.items() if slot.startswith("output") and is_kept
    }
    assert kept == {*KEPT}
    missed = {name for (name, slot), is_kept in found.items() if slot[0] == "o" and not is_kept}
    assert missed == {*NOT_KEPT}
    assert all(is_kept for (_, slot), is_kept in found.items() if slot.startswith("input"))
    (rank,) = trace.completeness["ranks"]
    assert rank["errors"] == [] == rank["notes"]
    assert trace.is_complete


class Identities(nn.Module):
    """The same module three times, another that shares its weight, and many inputs at once."""

    def __init__(self, cloned: Cloned | None) -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.twice.weight
        self.parts = nn.ModuleDict(
            {"odd_many": Odd("many", lambda *xs: [x * 2 for x in xs], cloned)}
        )

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(torch.stack(self.parts["odd_many"](*xs)).sum(0)))
        return self.tied(x)


def test_many_inputs_tied_weights_and_outputs_that_come_back_as_inputs(tmp_path: Path) -> None:
    cloned: Cloned = {}

    def program() -> object:
        cloned.clear()
        model = Identities(cloned)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        xs = [torch.full((4,), float(n)) for n in range(400)]
        losses = []
        for step in range(3):
            y = model(*xs)
            y.sum().backward()
            optimizer.step()
            xs[step] = y.detach()
            losses.append(y)
        return model, optimizer, losses

    trace = traced_unharmed(program, tmp_path / "t", tensors="**")
    found = compared(trace, cloned)
    assert len(found) == 800 and all(found.values())
    first = {
        view.slot: int(view.step["values.reference"][view.rows.start])
        for node in trace.find("twice", phase="setup")
        for view in node.slots
    }
    again = {
        view.slot: int(view.step["values.reference"][view.rows.start])
        for node in trace.find("tied", phase="setup")
        for view in node.slots
    }
    assert first["param:weight"] and again["param:bias"]
    assert again.get("param:weight", first["param:weight"]) == first["param:weight"]


def test_what_another_thread_writes_meanwhile_is_kept_with_the_checksum_of_what_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Hogwild training, or a loader that uses its buffers again: which of the values it is
    nobody can say, but it is one whose bytes are whole, and nothing is called damaged.

    The other thread writes at the worst place each time: what goes to the disk next was looked at,
    and is not there yet.
    """
    passes, x, writes = nn.Identity(), torch.zeros(1000, 1000), 0
    to_disk = chunks.write_all

    def after_a_write_of_another_thread(number: int, data: memoryview, at: int) -> None:
        nonlocal writes
        writes += 1
        other = threading.Thread(target=lambda: x.numpy().__iadd__(1))
        other.start()
        other.join()
        to_disk(number, data, at)

    monkeypatch.setattr(chunks, "write_all", after_a_write_of_another_thread)
    given = [x, x.T, x[:, :900], x, x.T]
    with rankscope.trace(passes, out=tmp_path / "t", digest="none", tensors="**:input.0") as handle:
        for view in given:
            passes(view)
    files = handle.open().tensor_files
    stored = [tensor for _, tensor in files.tensors(*files.streams())]
    assert writes > len(given) == len(stored)
    assert all(tensor.is_intact for tensor in stored)


def test_forwards_of_several_threads_are_each_kept_as_they_were(tmp_path: Path) -> None:
    """Each is a step of its own, and ends those of the others while they run."""
    threads = 4

    def work(model: nn.Module, number: int) -> None:
        with torch.no_grad():
            for step in range(20):
                model(torch.full((4, 8), 100.0 * number + step))

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with rankscope.trace(model, out=tmp_path / "t", tensors="0:*put*") as handle:
        workers = [threading.Thread(target=work, args=(model, n)) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    trace = handle.open()
    files, seen = trace.tensor_files, []
    for node in trace.find("0", phase="forward"):
        by_slot = {view.slot: view for view in node.slots}
        references = {
            slot: int(view.step["values.reference"][view.rows.start])
            for slot, view in by_slot.items()
        }
        given = torch.tensor(files.find(0, 0, references["input.0"]).array())
        made = torch.tensor(files.find(0, 0, references["output"]).array())
        with torch.no_grad():
            assert torch.equal(made, model[0](given))
        seen.append(given[0, 0].item())
    assert sorted(seen) == [100.0 * n + step for n in range(threads) for step in range(20)]


def test_gradients_that_come_steps_after_their_forward_are_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with rankscope.trace(model, out=tmp_path / "t", tensors="1:grad_*") as handle:
        losses = []
        for step in range(5):
            losses.append(model(torch.full((3, 4), float(step))).sum())
            rankscope.step()
        sum(losses).backward()
    trace = handle.open()
    kept = [
        bool(view.references()) for node in trace.find("1", phase="backward") for view in node.slots
    ]
    assert kept == [True] * 10
