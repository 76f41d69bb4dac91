"""Jobs that end in rarer ways: closed streams, other lives, signals, error files."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

import pytest

from rankscope.diagnosis.check import check
from rankscope.record.finding import Kind
from rankscope.tree.reader import open_trace
from tests import forked
from tests.launcher.test_exit import (
    ENDS,
    FAILURES,
    TORCHRUN,
    TRAINS,
    WRAPPER,
    installed,
    last_lines,
    run,
    script,
)

pytestmark = pytest.mark.launch


def test_the_error_file_of_a_rank_tells_its_exception(tmp_path: Path):
    path = script(
        tmp_path,
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('in the file')\nmain()",
    )
    done = run(WRAPPER, "--rs-out", tmp_path / "t", path)
    assert last_lines(done)[0] == (
        "the job failed: rank 0 first, with exit code 1: ValueError: in the file"
    )


def test_two_jobs_of_one_host_that_name_no_port_run_beside_each_other(tmp_path: Path):
    """Port 29500, which torchrun of torch 2.8 takes for every job, is taken."""
    path = script(tmp_path, ENDS)
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # somebody else has it
            other.bind(("127.0.0.1", 29500))
            other.listen()
        done = run(WRAPPER, "--rs-out", tmp_path / "t", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 []\n"


def test_what_torchrun_itself_raises_is_how_the_job_failed(tmp_path: Path):
    path = script(tmp_path, ENDS)
    done = run(WRAPPER, "--rs-out", tmp_path / "t", "--redirects", "x", path)
    assert last_lines(done)[0].startswith("the job failed: ValueError: x does not match")


def test_ranks_that_can_make_no_spool_train_and_no_line_sends_anybody_to_recover(tmp_path: Path):
    installed("ranks are armed by the start-up file")
    path = script(tmp_path, TRAINS)
    command = ["sh", "-c", 'ulimit -f 200; exec "$@"', "sh", *WRAPPER]
    done = run(command, "--rs-out", tmp_path / "t", "--rs-spool", tmp_path / "sp", path)
    assert done.returncode == 0, done.stderr
    assert "cannot reserve" in done.stderr
    (last,) = [line for line in done.stderr.splitlines()[-1:] if line.startswith("rankscope: ")]
    assert "nothing was traced" in last
    assert "recover" not in done.stderr


def test_the_traceback_of_a_failed_job_is_torchruns_without_frames_of_the_command_line(
    tmp_path: Path,
):
    path = script(tmp_path, FAILURES["exits with 3"])
    command = [sys.executable, "-m", "rankscope", "run"]
    plain, ours = run(TORCHRUN, path), run(command, "--rs-out", tmp_path / "trace", path)
    assert ours.returncode == plain.returncode
    frames = [done.stderr.count('  File "') for done in (plain, ours)]
    assert 0 < frames[1] <= frames[0] + 2
    assert "/typer/" not in ours.stderr and "/click/" not in ours.stderr


def test_the_error_file_of_a_failed_rank_is_written_as_torchrun_does(tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text(
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main():\n    raise ValueError('in the file')\nmain()\n"
    )
    error_file = tmp_path / "error.json"
    done = forked.run(
        [*WRAPPER, "--rs-out", str(tmp_path / "trace"), str(path)],
        capture_output=True,
        timeout=300,
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)},
    )
    assert done.returncode == 1
    assert "in the file" in error_file.read_text()


def test_logs_specs_take_torchruns_own_arguments(tmp_path: Path):
    installed("torchrun --logs-specs finds its entry point")
    path = script(tmp_path, "print('to a file')")
    done = forked.run(
        [*TORCHRUN, "--logs-specs", "rankscope", "--redirects", "3", "--tee", "1"]
        + ["--log-dir", str(tmp_path / "logs"), str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "RANKSCOPE_OUT": str(tmp_path / "trace")},
    )
    assert done.returncode == 0, done.stderr
    assert "to a file" in done.stdout
    assert "nothing was traced" in done.stderr
    assert [p.name for p in (tmp_path / "logs").rglob("stdout.log")] == ["stdout.log"]


def test_logs_specs_with_settings_that_cannot_be_used_warn_once_and_train(tmp_path: Path):
    installed("torchrun --logs-specs finds its entry point")
    path = script(tmp_path, "print('trained', os.environ['RANKSCOPE'])")
    done = forked.run(
        [*TORCHRUN, "--logs-specs", "rankscope", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "RANKSCOPE_STEPS": "sometimes"},
    )
    assert done.returncode == 0
    assert done.stdout == "trained 0\n"
    assert done.stderr.count("rankscope: ") == 1
    assert "RANKSCOPE_STEPS" in done.stderr


def test_what_a_rank_raised_in_another_life_is_not_said_of_one_that_calls_no_module(
    tmp_path: Path,
):
    installed("ranks are armed by the start-up file")
    path = script(
        tmp_path,
        """import torch
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    raise KeyError("the second life")
torch.nn.Linear(2, 2)(torch.ones(1, 2))
raise ValueError("the first life")""",
    )
    done = run(WRAPPER, "--rs-out", tmp_path / "t", "--max-restarts", 1, path)
    first, _ = last_lines(done)
    told = "the job failed: rank 0 first, with exit code 1: KeyError: 'the second life'"
    assert first.startswith(told)


def test_of_ranks_that_sigterm_ended_the_one_that_torchrun_did_not_end_is_first(tmp_path: Path):
    installed("ranks are armed by the start-up file")
    path = script(
        tmp_path,
        """import signal, time, torch
torch.nn.Linear(2, 2)(torch.ones(1, 2))
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(100)""",
    )
    done = run(WRAPPER, "--rs-out", tmp_path / "t", "--nproc-per-node", 2, path)
    assert "rankscope: the job failed: rank 1 first, killed by SIGTERM" in done.stderr


IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
"""torchrun may be quicker than gloo to tell the peer."""


LEAVES_A_WORKER = """if os.fork() == 0:
            time.sleep(20)
            os._exit(0)"""
"""As a loader's: it holds the connection, so gloo notices nothing."""


@pytest.mark.parametrize(
    ("first", "before_its_end"),
    [(IGNORES_SIGTERM, ""), ("", LEAVES_A_WORKER)],
    ids=["gloo_tells_the_peer", "torchrun_ends_the_peer"],
)
def test_a_rank_that_is_killed_before_a_collective_is_a_crash_and_its_peer_does_not_hang(
    tmp_path: Path, first: str, before_its_end: str
):
    installed("ranks are armed by the start-up file")
    path = script(
        tmp_path,
        f"""import signal, time, torch, torch.distributed as dist
{first}
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    if step == 2 and dist.get_rank() == 1:
        {before_its_end}
        os.kill(os.getpid(), signal.SIGKILL)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()""",
    )
    done = run(WRAPPER, "--rs-out", tmp_path / "t", "--nproc-per-node", 2, path)
    trace = open_trace(tmp_path / "t")
    assert trace.run["killed"] == [{"rank": 1, "by": "SIGKILL"}]
    report = check(trace)
    assert [(f.kind, f.ranks) for f in report.origins] == [(Kind.CRASH, (1,))], done.stderr
    assert "killed by SIGKILL" in report.origins[0].message
    assert "wait" not in report.origins[0].message
