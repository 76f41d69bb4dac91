"""Jobs on several hosts, two of them played on this machine, with the variable alone."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.launcher.ways import installed
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.xdist_group("lives"),
    installed,
]

EXAMPLES = Path(__file__).parents[2] / "examples"
BIN = Path(sys.executable).parent


def two_hosts(folder: Path, *, second: str = "") -> list[str]:
    """Run examples/ddp.py with one rank on each of two hosts; return what each said on stderr.

    Args:
        folder: the spools of the hosts go here, each its own; the head's trace is `head/trace`.
        second: what a shell in a mount namespace of its own does with the second host's command;
            without it the second host is like the first.
    """
    port = free_port()
    (folder / "head").mkdir()
    hosts = []
    for node in range(2):
        command = (
            [str(BIN / "torchrun"), "--nnodes", "2", "--node-rank", str(node)]
            + ["--master-addr", "127.0.0.1", "--master-port", port]
            + ["--nproc-per-node", "1", str(EXAMPLES / "ddp.py"), "--steps", "2"]
        )
        variables = {
            "RANKSCOPE": "1",
            "RANKSCOPE_OUT": str(folder / "head/trace"),
            "RANKSCOPE_SPOOL": str(folder / f"spool{node}"),
            "RANKSCOPE_DRAIN_SECONDS": "2",
        }
        if node and second:
            command = ["unshare", "--mount", "sh", "-c", second.format(shlex.join(command))]
        hosts.append(
            forked.Popen(
                command, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True
            )
        )
    said = [host.communicate(timeout=300)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    return said


def test_hosts_that_see_one_folder_meet_in_it_through_the_jobs_store(tmp_path: Path):
    said = two_hosts(tmp_path)
    document = json.loads((tmp_path / "head/trace/trace.json").read_text())
    assert [rank["rank"] for rank in document["completeness"]["ranks"]] == [0, 1]
    assert document["completeness"]["complete"] is True
    assert "tracing into" in said[0]
    assert "rankscope" not in said[1]
    tree, folder = {"trace.json", "tree.json", "steps"}, tmp_path / "head/trace"
    assert wait_until(lambda: {path.name for path in folder.iterdir()} == tree)


@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="needs the right to make a mount namespace",
)
def test_a_host_that_does_not_see_the_heads_folder_keeps_its_records_for_recover(tmp_path: Path):
    own = tmp_path / "own"
    (own / "trace/spool").mkdir(parents=True)  # a folder of that name is not the head's
    head = tmp_path / "head"
    said = two_hosts(
        tmp_path,
        second=f"mount --bind {shlex.quote(str(own))} {shlex.quote(str(head))} && exec {{}}",
    )
    assert "is not visible here" in said[1]
    (kept,) = (path for path in own.iterdir() if path.name.startswith("trace-"))
    done = forked.run(
        [str(BIN / "rankscope"), "recover", str(head / "trace"), str(kept)]
        + ["--out", str(tmp_path / "merged")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.endswith("2 of 2 ranks, complete\n"), done.stderr
