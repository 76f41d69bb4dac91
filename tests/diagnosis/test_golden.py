"""What was found in recorded jobs is found today: a tenth of them here, all by the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.diagnosis import check as checking
from rankscope.diagnosis.rules.equality import unequal_replicas
from tests.lab import golden

_EVERY = 10
_DRIFTING = "router-seed faulty 2 ranks float32 seed 0"

pytestmark = pytest.mark.skipif(
    not golden.FOLDER.is_dir(), reason="the recorded jobs are in the repository, not in an sdist"
)


@pytest.mark.parametrize("board", golden.BOARDS)
def test_a_tenth_of_the_recorded_jobs_gives_what_it_gave(board: str) -> None:
    jobs = dict(list(golden.read_jobs(board).items())[::_EVERY])
    with golden.unpacked(board, [*jobs.values()]) as records:
        lines = [
            f"{name}: {line}"
            for name, job in jobs.items()
            for line in golden.differences(job.found, golden.replayed(records, job))
        ]
    assert not lines, "\n".join(lines)


def test_a_rule_that_is_missing_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    job = golden.read_jobs("faults")[_DRIFTING]
    rules = tuple(rule for rule in checking.STEP_RULES if rule.judge is not unequal_replicas)
    monkeypatch.setattr(checking, "STEP_RULES", rules)
    with golden.unpacked("faults", [job]) as records:
        lines = [*golden.differences(job.found, golden.replayed(records, job))]
    assert any(line.startswith(("findings", "verdict")) for line in lines), lines


@pytest.mark.parametrize("board", ["real", "tests"])
def test_rules_find_the_same_in_any_order(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job for job in golden.read_jobs(board).values() if job.asked == "check"][::_EVERY]
    monkeypatch.setattr(checking, "STEP_RULES", checking.STEP_RULES[::-1])
    with golden.unpacked(board, jobs) as records:
        lines = [
            line
            for job in jobs
            for line in golden.differences(job.found, golden.replayed(records, job))
        ]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("now", "line"),
    [
        ({"verdict": "clean", "findings": []}, "findings is 0 of them (), was 1 of them (a)"),
        ({"verdict": "fault", "findings": [{"kind": "a"}]}, "verdict is fault, was clean"),
        ({"verdict": "clean", "findings": [{"kind": "b"}]}, "findings[0].kind is b, was a"),
        ({"findings": [{"kind": "a"}]}, "verdict is nothing, was clean"),
    ],
)
def test_every_difference_is_a_line(now: object, line: str) -> None:
    before = {"verdict": "clean", "findings": [{"kind": "a"}]}
    assert [*golden.differences(before, now)] == [line]
    assert [*golden.differences(now, now)] == []


def test_replaying_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; from tests.lab import golden; golden.main()"
    command = [sys.executable, "-c", program, "faults", "--only", _DRIFTING]
    done = subprocess.run(command, cwd=golden.REPOSITORY, capture_output=True, text=True)
    assert done.stdout == "1 jobs, 0 differ\n", done.stderr


@pytest.mark.lab
def test_an_accepted_difference_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = golden.read_jobs("faults")
    changed = json.loads((golden.FOLDER / "faults.json").read_text())
    changed[_DRIFTING]["found"]["verdict"] = "clean"
    (tmp_path / "faults.json").write_text(json.dumps(changed))
    (tmp_path / "faults.tar.xz").symlink_to(golden.FOLDER / "faults.tar.xz")
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["golden", "faults", "--only", _DRIFTING])
    assert golden.main() == 1
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--accept"])
    assert golden.main() == 0
    assert golden.read_jobs("faults") == jobs
