"""Fault schedules of every sort, a few in every run of the tests; that the oracle notices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.lab.soak.faults import KINDS
from tests.lab.soak.oracle import accounts, compare
from tests.lab.soak.schedule import draw
from tests.launcher.ways import installed

pytestmark = [pytest.mark.launch, pytest.mark.xdist_group("soak"), installed]

PROGRAM = Path(__file__).with_name("program.py")


def soak(*options: str) -> None:
    """Play schedules as a process of its own, which has the mount namespace that disks need."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.lab.soak", *options],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_faults_of_processes_disks_and_links_lose_and_double_nothing():
    soak("--seed", "7", "--single", "1", "--mixed", "1", "--at-once", "2")


def test_what_a_black_box_was_asked_for_is_there_or_named():
    """Ranks that are restarted, in each of whose lives the same happens; several faults at once."""
    soak("--seed", "566", "--single", "1", "--mixed", "1", "--at-once", "2")


@pytest.mark.soak
def test_the_causes_that_lost_last_steps_lose_none():
    soak("--blackbox", "24", "--seed", "1", "--at-once", "2")


@pytest.mark.soak
def test_two_hundred_schedules_of_one_fault_and_of_several_lose_and_double_nothing():
    soak("--single", "100", "--mixed", "100")


@pytest.mark.soak
@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "--net", "true"], capture_output=True).returncode != 0,
    reason="needs the right to make namespaces of mounts and of networks",
)
def test_hosts_that_die_or_are_cut_off_leave_a_tree():
    soak("--hosts", "8", "--at-once", "2")


def test_a_seed_draws_the_same_schedule_and_single_ones_go_through_every_fault_that_can_be_had():
    once, again = ([draw(seed, is_mixed=True) for seed in range(20)] for _ in range(2))
    assert once == again
    drawn = [draw(seed, is_mixed=False).faults[0].name for seed in range(2 * len(KINDS))]
    assert {name for name in KINDS if "disk" not in name and "clock" not in name} <= {*drawn}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank of the program, and its trace."""
    return traced_in(tmp_path_factory.mktemp("traced"), "all")


def traced_in(folder: Path, steps: str, *options: str) -> Path:
    (folder / "accounts").mkdir()
    words = ["--steps", "8" if options else "4", "--pause-ms", "0", *options]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    forked.run(
        [sys.executable, PROGRAM, folder / "accounts", *words],
        env={
            **os.environ,
            **alone,
            "RANKSCOPE": "1",
            "RANKSCOPE_OUT": str(folder / "trace"),
            "RANKSCOPE_SPOOL": str(folder / "spool"),
            "RANKSCOPE_STEPS": steps,
        },
        check=True,
    )
    return folder


def test_the_oracle_finds_nothing_in_a_trace_that_is_right(traced: Path):
    found = compare(traced / "trace", accounts(traced / "accounts"))
    assert found.is_right, found.examples
    assert (found.calls, found.is_complete) == (4 * 11, True)


@pytest.mark.parametrize(
    ("written", "noticed"),
    [
        ("call 9 blocks.0\n", "lost"),
        (f"value 9 blocks.0 {(1.0).hex()} {(2.0).hex()}\n", "lost"),
        (f"value 2 blocks.0 {(1.0).hex()} {(2.0).hex()}\n", "wrong"),
    ],
)
def test_the_oracle_notices_what_a_trace_lacks_or_has_wrong(
    traced: Path, tmp_path: Path, written: str, noticed: str
):
    shutil.copytree(traced / "accounts", tmp_path / "accounts")
    (account,) = (tmp_path / "accounts").iterdir()
    with account.open("a") as file:
        file.write(written)
    found = compare(traced / "trace", accounts(tmp_path / "accounts"))
    assert getattr(found, noticed) == 1
    assert not found.is_right


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank that holds its last two steps back, a value that is not finite, and its trace."""
    return traced_in(tmp_path_factory.mktemp("held"), "last:2", "--nan", "5@0")


def test_the_oracle_knows_what_was_asked_for(held: Path):
    found = compare(held / "trace", accounts(held / "accounts"), last=2)
    assert found.is_right, found.examples
    assert (found.asked, found.there, found.named, found.is_complete) == (3, 3, 0, True)


def test_the_oracle_notices_what_a_black_box_lacks_and_what_it_says_falsely(
    held: Path, tmp_path: Path
):
    told = accounts(held / "accounts")
    shutil.copytree(held / "trace", tmp_path / "trace")
    path = tmp_path / "trace/trace.json"
    document = json.loads(path.read_text())
    (step,) = (step for step in document["steps"] if step["step"] == 4)
    document["steps"].remove(step)
    path.write_text(json.dumps(document))
    found = compare(tmp_path / "trace", told, last=2)
    assert (found.there, found.lost > 0, found.is_falsely_complete) == (2, True, True)
    lack = {"ranks": "0", "steps": "4", "why": "it was let go"}
    document["completeness"]["asked"][0]["missing"] = [lack]
    path.write_text(json.dumps(document))
    found = compare(tmp_path / "trace", told, last=2)
    assert (found.lost, found.named, found.false, found.is_falsely_complete) == (0, 1, 0, True)
    document["completeness"]["complete"] = False
    path.write_text(json.dumps(document))
    assert compare(tmp_path / "trace", told, last=2).is_right
    lack["steps"] = "3-4"
    path.write_text(json.dumps(document))
    assert compare(tmp_path / "trace", told, last=2).false == 1
    document["completeness"]["asked"] = []
    path.write_text(json.dumps(document))
    assert compare(tmp_path / "trace", told, last=2).lost > 0


def test_the_oracle_notices_what_is_there_twice_and_what_never_was(traced: Path, tmp_path: Path):
    shutil.copytree(traced / "trace", tmp_path / "trace")
    path = tmp_path / "trace/trace.json"
    document = json.loads(path.read_text())
    document["steps"].append(document["steps"][1])
    path.write_text(json.dumps(document))
    found = compare(tmp_path / "trace", accounts(traced / "accounts"))
    assert found.doubled >= 11
    document["steps"].pop()
    document["steps"][1]["step"] = 17
    path.write_text(json.dumps(document))
    found = compare(tmp_path / "trace", accounts(traced / "accounts"))
    assert (found.invented, found.lost) == (11, 21)
