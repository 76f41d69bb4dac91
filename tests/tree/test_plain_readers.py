"""A trace read by somebody who has docs/trace-format.md alone: json, safetensors, nothing of ours.

Every program below is run by a Python that cannot import rankscope.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

READER = """
import json, sys
from math import prod
from safetensors import safe_open

assert sys.modules["rankscope"] is None
top = sys.argv[1]
trace, tree = (json.load(open(f"{top}/{name}.json")) for name in ("trace", "tree"))
assert (trace["format"], tree["format"]) == ("rankscope.trace/3", "rankscope.tree/1")

def named(group):
    return tuple(group.get(name) for name in ("incarnation", "mode", "step"))

entries = {named(entry): entry for entry in trace["setup"] + trace["steps"]}

def columns_of(entry):
    first, last = entry["rows"]["values"]
    with safe_open(f"{top}/{entry['file']}", "np") as file:
        assert file.metadata()["format"] == "rankscope.steps/1"
        return {name.partition(".")[2]: file.get_tensor(name)[first:last] for name in file.keys()
                if name.startswith("values.")}

def nodes_of(group):
    waiting = list(group["nodes"])
    while waiting:
        node = waiting.pop()
        waiting += node["children"]
        yield node

def ranks_of(text):
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)

found, places = [], {}
for group in tree["setup"] + tree["steps"]:
    life, columns = group["incarnation"], columns_of(entries.pop(named(group)))
    for node in nodes_of(group):
        for entry in node["slots"]:
            shapes = {rank: (value["shape"], value.get("digest", {}).get("count"))
                      for value in entry["values"] for rank in ranks_of(value["ranks"])}
            kept = set(ranks_of(entry.get("kept", "")))
            assert kept.isdisjoint(ranks_of(entry.get("not_kept", "")))
            for row in range(*entry["rows"]):
                rank = int(columns["rank"][row])
                chunk, key = int(columns["chunk"][row]), int(columns["reference"][row])
                assert (rank in kept) == (chunk > 0) == (key > 0)
                if not key:
                    continue
                folder = f"{trace['storage']['tensors']}/rank{rank:05d}" + (f".{life}" if life else "")
                path = f"{top}/{folder}/{chunk:06d}.safetensors"
                with safe_open(path, "pt") as file:
                    meta = file.metadata()
                    assert meta["format"] == "rankscope.tensors/1"
                    assert (int(meta["rank"]), int(meta["incarnation"])) == (rank, life)
                    assert int(meta["chunk"]) == chunk
                    tensor = file.get_tensor(str(key))
                shape, count = shapes[rank]
                assert list(tensor.shape) == shape
                assert str(tensor.dtype) == "torch." + entry["dtype"]
                assert count in (None, prod(shape) * (2 if tensor.is_complex() else 1))
                places.setdefault((path, key), []).append((named(group), row))
                found.append({"path": node["path"], "slot": entry["slot"], "phase": node["phase"],
                              "rank": rank, "step": group.get("step"),
                              "numbers": tensor.double().flatten().tolist()})
assert not entries
twice = sum(len(rows) > 1 for rows in places.values())
print(json.dumps({"found": found, "twice": twice, "places": len(places),
                  "said": [text for rank in trace["completeness"]["ranks"] for text in rank.get("tensors", [])]}))
"""  # noqa: E501  # a program, as wide as it likes


def read_plainly(trace: Path) -> dict[str, Any]:
    """Run the reader where nothing of this project can be imported."""
    blocked = "import sys; sys.modules['rankscope'] = None  # an import of it fails\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", blocked + READER, str(trace)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def numbers(found: dict[str, Any], path: str, slot: str, rank: int = 0) -> list[list[float]]:
    return [
        each["numbers"]
        for each in found["found"]
        if (each["path"], each["slot"], each["rank"]) == (path, slot, rank)
    ]


class Mixed(torch.nn.Module):
    """Outputs of every dtype a training job has, one of them handed on unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same = torch.nn.Linear(4, 3), torch.nn.Identity()
        self.many = Many()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = self.many(self.same(self.first(x)))
        return made


class Many(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "bf16": x.bfloat16(),
            "fp8": x.to(torch.float8_e4m3fn),
            "fp8b": x.to(torch.float8_e5m2),
            "half": x.half(),
            "empty": x[:0],
            "scalar": x.sum(),
            "integers": x.long(),
            "bools": x > 0,
            "turned": x.t(),
        }


def test_values_of_every_dtype_are_read_with_safetensors_alone_and_equal_ones_stand_once(tmp_path):
    import rankscope

    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(2, 4)
    with rankscope.trace(model, out=tmp_path / "trace", tensors="**"):
        made = model(x)
    found = read_plainly(tmp_path / "trace")
    for name, tensor in made.items():
        (held,) = numbers(found, "many", f"output.{name}")
        assert held == tensor.detach().double().flatten().tolist(), name
    assert numbers(found, "first", "output") == numbers(found, "same", "output")
    assert found["twice"] >= 3, "the output of one module is the input of the next"
    assert found["said"] == []
