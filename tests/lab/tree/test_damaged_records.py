"""Records of real jobs, damaged at random: `recover` reads on behind the damage and names it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from rankscope.tree.build import recover
from rankscope.tree.reader import open_trace
from tests.tree.record_golden import JOBS, unpacked

NAMES = sorted(JOBS)


def received(out: Path) -> int:
    ranks = json.loads((out / "trace.json").read_bytes())["completeness"]["ranks"]
    return sum(rank["received"] for rank in ranks)


def damage(folder: Path, chosen: random.Random) -> list[tuple[str, int, int]]:
    """Overwrite one to three stretches behind the first record of streams."""
    done = []
    files = sorted(folder.rglob("*.cells"))
    for _ in range(chosen.randrange(1, 4)):
        file, span = chosen.choice(files), chosen.choice([1, 64, 640, 6400, 65536])
        data = bytearray(file.read_bytes())
        first = (int.from_bytes(data[6:8], "little") + 1) * 64
        at = chosen.randrange(first, len(data))
        end = min(len(data), at + span)
        data[at:end] = chosen.randbytes(end - at) if chosen.random() < 0.5 else bytes(end - at)
        file.write_bytes(data)
        done.append((file.name, at, end))
    return done


def part_left(tmp_path: Path, seed: int) -> float:
    """Damage a job and recover it; return which part of its bytes is left."""
    chosen = random.Random(seed)
    name = NAMES[seed % len(NAMES)]
    whole, hurt = tmp_path / f"{name}-whole", tmp_path / "hurt"
    if not whole.exists():
        recover([unpacked(name, tmp_path / name)], whole)
    shutil.copytree(tmp_path / name, hurt)
    done = damage(hurt, chosen)
    recover([hurt], tmp_path / "out")
    trace = open_trace(tmp_path / "out")
    left, all_of_it = received(tmp_path / "out"), received(whole)
    assert len(trace.steps) > 0
    assert left == all_of_it or not trace.is_complete, f"seed {seed}, {name}: {done}"
    for folder in (hurt, tmp_path / "out"):
        shutil.rmtree(folder)
    return left / all_of_it


def test_damaged_records_cost_what_is_damaged_and_are_named(tmp_path):
    assert sum(part_left(tmp_path, seed) for seed in range(8)) / 8 > 0.8


@pytest.mark.soak
def test_many_damaged_jobs_are_recovered(tmp_path):
    seeds = range(1000, 1200)
    parts = [part_left(tmp_path, seed) for seed in seeds]
    print(f"{len(parts)} damaged jobs: {sum(parts) / len(parts):.3f} of their bytes came back")
    assert sum(parts) / len(parts) > 0.8
