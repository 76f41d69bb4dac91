"""A collector started by hand: what it says, what it refuses, and its exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankscope.run.connection import relays_file
from rankscope.run.folders import SHARED
from rankscope.tree.reader import open_trace
from tests import forked
from tests.cli.test_commands import rankscope
from tests.companion.jobs import Host, environment
from tests.keyed import key_file
from tests.ports import free_port
from tests.waiting import wait_until

RANK = """
import rankscope
rankscope.attach()
import torch
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def address() -> str:
    """A port of this host that is free."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def host(tmp_path: Path, address: str) -> Iterator[Host]:
    """Two ranks' host that ships to `address`."""
    made = Host(tmp_path / "host", tmp_path / "trace", address=address)
    yield made
    made.stop()


@pytest.fixture
def collect(tmp_path: Path) -> Iterator[Start]:
    """Start `rankscope collect`; returns once it listens, with the line that says so read."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: object) -> subprocess.Popen[str]:
        words = ["--out", tmp_path / "trace", "--world-size", 2, *options]
        process = forked.Popen(
            [sys.executable, "-m", "rankscope", "collect", *map(str, words)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stderr is not None
        assert "waiting for" in (line := process.stderr.readline()), line
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.mark.parametrize("way", ["bind", "shared"])
def test_ranks_started_one_by_one_make_a_whole_trace_in_the_collectors_folder(
    way: str, collect: Start, address: str, tmp_path: Path
):
    out = tmp_path / "trace"
    collector = collect(
        *(["--bind", address, "--keys", key_file()] if way == "bind" else ["--shared"])
    )
    variables = {
        "RANKSCOPE": "1",
        "RANKSCOPE_SPOOL": str(tmp_path / "spool"),
        "RANKSCOPE_COLLECTOR": address if way == "bind" else SHARED,
        **(
            {"RANKSCOPE_OUT": str(out)}
            if way == "shared"
            else {"RANKSCOPE_KEYS": str(relays_file(key_file()))}
        ),
        "WORLD_SIZE": "2",
    }
    ranks = [
        forked.Popen(
            [sys.executable, "-c", RANK],
            env={**os.environ, **variables, "RANK": str(rank)},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300)[1] for rank in ranks]
    code, stdout, err = ended(collector)
    assert (code, stdout) == (0, ""), err
    assert err == f"rankscope: trace in {out}; read it: rankscope show {out}\n"
    assert {path.name for path in out.iterdir()} == {"trace.json", "tree.json", "steps"}
    assert wait_until(lambda: not any((tmp_path / "spool").iterdir()))
    assert {path.name for path in tmp_path.iterdir()} == {"spool", "trace"}
    where = f"records go to the collector at {address}" if way == "bind" else f"trace in {out}"
    assert where in said[0]
    assert where not in said[1]


def test_it_writes_a_dataset_too(host: Host, collect: Start):
    parquet = pytest.importorskip(
        "pyarrow.parquet", reason="the extra rankscope[parquet] is missing"
    )
    collector = collect("--bind", host.address, "--keys", host.keys, "--parquet")
    host.relay()
    assert [rank.wait(120) for rank in [host.rank(0), host.rank(1)]] == [0, 0]
    ended(collector)
    calls = len(open_trace(host.out).columns()["calls.rank"])
    assert len(parquet.read_table(host.out / "parquet/calls")) == calls > 0
    assert not (host.out / "collector.log").exists()


def test_without_pyarrow_it_refuses_a_dataset(tmp_path: Path):
    words = ["collect", "--out", str(tmp_path / "trace"), "--world-size", "2", "--parquet"]
    script = (
        "import sys; sys.modules['pyarrow'] = None\n"
        f"from rankscope.cli.app import main; main({words!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--parquet: no Parquet dataset: pyarrow is missing" in done.stderr
    assert not any(tmp_path.iterdir())


def test_the_first_ctrl_c_builds_the_tree_from_what_is_there(host: Host, collect: Start):
    collector = collect("--bind", host.address, "--keys", host.keys)
    host.relay()
    rank = host.rank(0, hangs=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "written\n"
    replica = host.out / "spool/rank00000.0.cells"  # empty until the first records come
    assert wait_until(lambda: replica.exists() and replica.stat().st_size)
    collector.send_signal(signal.SIGINT)
    code, _, err = ended(collector)
    assert code == 1
    assert "stopping" in err
    assert (host.out / "trace.json").exists()


def test_a_stop_before_any_rank_came_is_code_1_without_a_tree(collect: Start, tmp_path: Path):
    collector = collect("--shared")
    collector.send_signal(signal.SIGTERM)
    code, _, err = ended(collector)
    assert code == 1
    assert "nothing was traced" in err
    assert not (tmp_path / "trace/trace.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bind", "tcp://127.0.0.1:7777"], "rankscope keys new FILE"),
        (["--bind", "127.0.0.1:7777"], "expected ipc:///path or tcp://HOST:PORT"),
        (["--keys", "/dev/null"], "--keys are those of TCP"),
        (["--bind", "tcp://127.0.0.1:7777", "--keys", "/dev/null"], "it is not a file"),
        (["--bind", "tcp://127.0.0.1:7777", "--keys", "nowhere"], "cannot be read"),
        (
            ["--bind", "tcp://127.0.0.1:7777", "--keys", str(relays_file(key_file()))],
            "has the keys of the relays",
        ),
        (["--bind", "tcp://127.0.0.1:7777", "--shared"], "leave out --bind"),
        (["--ranks", "5-6"], "none of these is in a world of 2"),
        (["--ranks", "first"], "ranks: "),
        (["--out", "/proc/nothing"], "folder you may write with --out"),
        (["--out", __file__], "is a file"),
        (["--out", str(Path(__file__).parent)], "is not empty"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_exit_2(words: list[str], said: str, tmp_path: Path):
    code, out, err = rankscope("collect", "--world-size", 2, *words, cwd=tmp_path)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
