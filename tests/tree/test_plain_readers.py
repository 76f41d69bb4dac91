"""A trace read by somebody who has docs/trace-format.md alone: json, safetensors, nothing of ours.

Every program below is run by a Python that cannot import rankscope.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.launcher.launches import BIN
from tests.waiting import wait_until

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


def test_the_shards_of_every_rank_are_read_with_safetensors_alone(ranks, tmp_path):
    from tests.distributed import global_tensors_job as job

    ranks.run(job.run, "tp", str(tmp_path / "trace"), world_size=2)
    found = read_plainly(tmp_path / "trace")
    whole = job.net().up.weight.detach().double()
    for rank, shard in enumerate(whole.chunk(2)):
        setup = [
            each["numbers"]
            for each in found["found"]
            if (each["path"], each["slot"], each["phase"], each["rank"])
            == ("up", "param:weight", "setup", rank)
        ]
        assert setup == [shard.flatten().tolist()]


SCRIPT = """
import os, pathlib, sys, time
import torch
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    output = model(torch.full((2, 4), step + 1.0))
    torch.save(output.detach(), f"{sys.argv[1]}/output.{rank}.{step}")
    output.sum().backward()
    optimizer.step()
pathlib.Path(f"{sys.argv[1]}/pid.{rank}").write_text(str(os.getpid()))
while True:
    time.sleep(0.02)
"""


@pytest.mark.launch
@pytest.mark.parametrize("victim", [0, 1])
def test_a_chunk_that_a_kill_left_unfinished_is_read_with_safetensors_alone(tmp_path, victim):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [
        BIN / "rankscope", "run", "--rs-out", tmp_path / "trace", "--rs-tensors", "**:output",
        "--rs-spool", tmp_path / "spool", "--nproc-per-node", 2, tmp_path / "script.py", tmp_path,
    ]  # fmt: skip
    job = forked.Popen([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert wait_until(lambda: all((tmp_path / f"pid.{rank}").exists() for rank in (0, 1)))
        assert wait_until(lambda: (tmp_path / f"pid.{victim}").read_text())
        os.kill(int((tmp_path / f"pid.{victim}").read_text()), signal.SIGKILL)
        job.communicate(timeout=300)
    finally:
        job.kill()
        job.wait()
    found = read_plainly(tmp_path / "trace")
    for rank in (0, 1):
        wanted = [torch.load(tmp_path / f"output.{rank}.{step}") for step in range(3)]
        held = numbers(found, "0", "output", rank)
        assert held == [each.double().flatten().tolist() for each in wanted]
    assert any("was left unfinished with" in text for text in found["said"])
