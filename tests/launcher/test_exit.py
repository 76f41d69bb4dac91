"""A job keeps its exit code and its stdout, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.tree.reader import open_trace
from tests import forked
from tests.launcher.launches import before_verdict, wait_until_it_watches

pytestmark = pytest.mark.launch
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
WRAPPER = [
    sys.executable,
    "-c",
    "import sys; from rankscope_launcher.runcommand import main; main(sys.argv[1:])",
]

ENDS = "print('rank', os.environ['RANK'], sys.argv[1:])"
TRAINS = """import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()"""
TRAINS_ALONE = """import torch
if os.environ["RANK"] == "0":
    torch.nn.Linear(2, 2)(torch.ones(1, 2))"""
STARTS_ANOTHER = """import subprocess, torch
subprocess.run([sys.executable, "-c", "raise SystemExit(1)"])"""
FAILURES = {
    "exits with 3": "sys.exit(3)",
    "raises": "raise RuntimeError('on purpose')",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "aborts": "os.abort()",
}


def script(folder: Path, ending: str) -> Path:
    path = folder / "script.py"
    path.write_text(f"import os, signal, sys\n{ending}\n")
    return path


def run(start: list[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [*start, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": ""},
    )


def test_a_job_that_calls_no_module_keeps_code_and_stdout_and_is_told_so_without_waiting(
    tmp_path: Path,
):
    path = script(tmp_path, ENDS)
    plain = run(TORCHRUN, "--nproc-per-node", 1, path, "--lr", "1")
    out = tmp_path / "new" / "trace"
    waits_long = ["--rs-finish-seconds", 6000]
    ours = run(WRAPPER, "--rs-out", out, *waits_long, "--nproc-per-node", 1, path, "--lr", "1")
    assert (ours.returncode, plain.returncode) == (0, 0)
    assert ours.stdout == plain.stdout
    lines = [line for line in ours.stderr.splitlines() if line.startswith("rankscope: ")]
    assert lines[0] == f"rankscope: tracing into {out}"
    assert lines[1:] == ["rankscope: nothing was traced: no rank imported torch"]
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"], "folders it made itself"


def last_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what rankscope says at the end, without where the trace goes, and its verdict."""
    lines = before_verdict(done.stderr.splitlines())
    assert lines[0].startswith("rankscope: tracing into ")
    return [line.removeprefix("rankscope: ") for line in lines[1:]]


@pytest.mark.parametrize(
    ("ending", "how", "came_to"),
    [
        ("sys.exit(3)", "with exit code 3; what it said stands above", "imported torch"),
        (
            "import nosuch.part",
            "with exit code 1: ModuleNotFoundError: No module named 'nosuch'",
            "imported torch",
        ),
        (FAILURES["is killed"], "killed by SIGKILL", "imported torch"),
        (
            "import torch\nraise RuntimeError('on purpose')",
            "with exit code 1: RuntimeError: on purpose at ",
            "called a torch module",
        ),
    ],
)
def test_a_job_that_fails_before_any_module_is_said_to_have_failed_and_how(
    ending: str, how: str, came_to: str, tmp_path: Path
):
    """That nothing was traced is then no news, and never all there is to say: nor are guesses."""
    installed("ranks have the start-up file")
    done = run(WRAPPER, "--rs-out", tmp_path / "t", script(tmp_path, ending))
    first, second = last_lines(done)
    assert first.startswith(f"the job failed: rank 0 first, {how}")
    assert second == f"nothing was traced: no rank {came_to} before the job failed"


@pytest.mark.parametrize(
    ("words", "ending", "line"),
    [
        (
            ["--rs-ranks", "1", "--nproc-per-node", "2"],
            TRAINS_ALONE,
            "no rank but rank 0, left out",
        ),
        (["--no-python"], ENDS, "no rank started a Python that has rankscope (is it installed"),
        ([], STARTS_ANOTHER, "no rank called a torch module"),
    ],
    ids=["left-out", "no-python", "children"],
)
def test_why_nothing_was_traced_is_what_the_ranks_came_to(
    words: list[str], ending: str, line: str, tmp_path: Path
):
    installed("ranks have the start-up file")
    path = script(tmp_path, ending)
    if "--no-python" in words:
        path.write_text("#!/bin/sh\ntrue\n")
        path.chmod(0o755)
    done = run(WRAPPER, "--rs-out", tmp_path / "t", *words, path)
    assert done.returncode == 0, done.stderr
    (last,) = last_lines(done)
    assert last.startswith(f"nothing was traced: {line}")


def test_the_rank_that_failed_first_is_told_with_its_exception_not_the_peers_that_were_ended(
    tmp_path: Path,
):
    """torchrun ends the peers with SIGTERM in the same second, and names the lowest rank."""
    installed("ranks are armed by the start-up file")
    path = script(
        tmp_path,
        """import time, torch
class Fails(torch.nn.Linear):
    def forward(self, x):
        if os.environ["RANK"] == "1":
            raise ValueError("on\\npurpose")
        return super().forward(x)
Fails(2, 2)(torch.ones(1, 2))
time.sleep(100)""",
    )
    done = run(WRAPPER, "--rs-out", tmp_path / "t", "--nproc-per-node", 2, path)
    first, second = last_lines(done)
    assert first.startswith("the job failed: rank 1 first, with exit code 1: ValueError: on")
    assert "in (root), train step 0" in first
    assert second.startswith("trace in ")


def test_logs_specs_say_how_the_job_failed_too(tmp_path: Path):
    installed("torchrun --logs-specs finds its entry point")
    path = script(tmp_path, FAILURES["exits with 3"])
    done = forked.run(
        [*TORCHRUN, "--logs-specs", "rankscope", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "RANKSCOPE_OUT": str(tmp_path / "t")},
    )
    assert last_lines(done)[0].startswith("the job failed: rank 0 first, with exit code 3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch.py"], "nosuch.py: no such script in "),
        (["/no/such.py"], "/no/such.py: no such script: nothing was started"),
        (["--run-path", "nosuch.py"], "nosuch.py: no such script in "),
        (["-m", "nosuch.train"], "no module nosuch.train in "),
        (["--no-python", "nosuch-command"], "no such command on PATH"),
        (["--no-python", "./nosuch"], "no such command: nothing was started"),
    ],
)
def test_a_script_that_is_not_there_is_said_before_anything_starts(
    words: list[str], said: str, tmp_path: Path
):
    """With torchrun's exit code; torchrun starts ranks, which fail, and prints a traceback."""
    done = forked.run(
        [*WRAPPER, "--rs-out", "t", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("rankscope run: ") and said in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["python", "train.py"], "leave out `python`: rankscope run train.py"),
        (
            [
                "--nproc-per-node",
                "2",
                "python3",
                "-u",
                "-W",
                "error",
                "-m",
                "own.part",
                "--lr",
                "1",
            ],
            "leave out `python3 -u -W error`: rankscope run --nproc-per-node 2 -m own.part --lr 1",
        ),
        (
            ["torchrun", "--nproc-per-node", "2", "train.py"],
            "leave out `torchrun`: rankscope run --nproc-per-node 2 train.py",
        ),
        (
            [sys.executable, "-m", "torch.distributed.run", "train.py", "a b"],
            f"leave out `{sys.executable} -m torch.distributed.run`: rankscope run train.py 'a b'",
        ),
        (
            ["accelerate", "launch", "train.py"],
            "accelerate starts the ranks itself: RANKSCOPE=1 accelerate launch train.py",
        ),
        (
            ["./script.sh", "8"],
            "./script.sh is not a Python script; as the command of each rank: "
            "rankscope run --no-python ./script.sh 8; "
            "where it starts the ranks itself: RANKSCOPE=1 ./script.sh 8",
        ),
        (["A=1", "train.py"], "put A=1 in front: A=1 rankscope run train.py"),
        (
            ["env", "A=1", "python", "train.py"],
            "env is not a Python script; as the command of each rank: "
            "rankscope run --no-python env A=1 python train.py; "
            "where it starts the ranks itself: RANKSCOPE=1 env A=1 python train.py",
        ),
    ],
    ids=["python", "options", "torchrun", "module", "accelerate", "shell", "variable", "command"],
)
def test_what_people_type_in_place_of_the_script_is_told_with_the_line_that_works(
    words: list[str], said: str, tmp_path: Path
):
    (tmp_path / "train.py").touch()
    (tmp_path / "script.sh").write_text("#!/bin/sh\nexec true\n")
    done = forked.run(
        [*WRAPPER, "--rs-out", "t", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    expected = said.replace("rankscope run ", "rankscope run --rs-out t ")
    assert done.stderr == f"rankscope run: nothing was started: {expected}\n"


@pytest.mark.parametrize(
    "words",
    [["-m", "own.part"], ["-m", "timeit", "-n1", "pass"], ["folder"], ["python"], ["own/run"]],
)
def test_what_python_runs_that_is_no_script_is_not_refused(words: list[str], tmp_path: Path):
    """A module here or anywhere on the path, a folder with __main__.py, a file of any name that
    Python can run: one that a shell can run as well, or one that has the name of a command."""
    for name in ("own/part.py", "folder/__main__.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / "python").touch()
    (tmp_path / "own/run").write_text('#!/bin/sh\n"exec" "python3" "$0"\n')
    done = forked.run([*WRAPPER, *words], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_job_that_ends_before_the_steps_to_trace_is_told_at_which_one_it_ended(tmp_path: Path):
    installed("ranks are armed by the start-up file")
    path = script(tmp_path, TRAINS)
    done = run(WRAPPER, "--rs-out", tmp_path / "trace", "--rs-steps", "40000", path)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "rankscope: no step was traced: the job ended at step 2 (train), before any of 40000; "
    )
    assert done.stderr.count("no step was traced") == 1
    found = open_trace(tmp_path / "trace")
    assert found.is_complete and not found.steps
    assert "before any of 40000" in found.completeness["ranks"][0]["errors"][0]


def test_a_trace_folder_that_was_there_before_stays_when_nothing_is_traced(tmp_path: Path):
    path = script(tmp_path, ENDS)
    (tmp_path / "trace").mkdir()
    run(WRAPPER, "--rs-out", tmp_path / "trace", path)
    assert list((tmp_path / "trace").iterdir()) == []


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """What torchrun makes of a rank that failed: the same however it failed."""
    path = script(tmp_path_factory.mktemp("plain"), FAILURES["exits with 3"])
    return run(TORCHRUN, "--nproc-per-node", 1, path)


@pytest.mark.parametrize("failure", ["raises", "is killed"])
def test_exit_code_and_stdout_of_a_failed_job_are_torchruns(
    failure: str, failed: subprocess.CompletedProcess[str], tmp_path: Path
):
    path = script(tmp_path, FAILURES[failure])
    ours = run(WRAPPER, "--rs-out", tmp_path / "trace", "--nproc-per-node", 1, path)
    assert (ours.returncode, ours.stdout) == (failed.returncode, failed.stdout)
    assert ours.returncode != 0
    assert "rankscope: " in ours.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.lab)]
)
def test_a_signal_ends_the_job_as_it_ends_torchruns(number: signal.Signals, tmp_path: Path):
    ending = "import torch, time; print('up', flush=True); time.sleep(60)"
    path = script(tmp_path, ending)
    starts = [TORCHRUN, [*WRAPPER, "--rs-out", str(tmp_path / "t")]]
    jobs = [
        forked.Popen([*start, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for start in starts
    ]
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == b"up\n"
        wait_until_it_watches(job.pid)
        job.send_signal(number)
    said = [job.communicate(timeout=300)[1].decode() for job in jobs]
    came_to = f"no rank called a torch module before {number.name} ended the job"
    assert f"rankscope: nothing was traced: {came_to}\n" in said[1]
    codes = [job.returncode for job in jobs]
    assert codes[0] == codes[1]
    assert codes[0] != 0


@pytest.mark.parametrize(
    "closed",
    ["<&- >&- 2>&-", *(pytest.param(way, marks=pytest.mark.lab) for way in ("2>&-", ">&-"))],
)
def test_a_job_whose_streams_are_closed_runs_is_traced_and_gets_no_file_of_ours_as_stderr(
    closed: str, tmp_path: Path
):
    """A service manager or a shell may start a job with a stream closed: the lines for it are
    dropped. Libraries write to descriptor 2 whatever it is: it must not be a file of ours."""
    installed("ranks are armed by the start-up file")
    ran = tmp_path / "ran"
    where = "[os.readlink(f'/proc/self/fd/{n}') for n in range(3)]"
    path = script(tmp_path, f"{TRAINS}\nopen({str(ran)!r}, 'w').write(str({where}))")
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *WRAPPER]
    done = run(command, "--rs-out", tmp_path / "t", "--rs-spool", tmp_path / "s", path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert str(tmp_path) not in ran.read_text()
    assert open_trace(tmp_path / "t").is_complete


def installed(what: str) -> None:
    """Skip where rankscope is on the path but not installed."""
    from importlib.metadata import entry_points

    if not entry_points(group="torchrun.logs_specs").select(name="rankscope"):
        pytest.skip(f"{what}: only in an environment made by launcher/test")
