"""A collector started by hand: lost and fewer ranks, and what it cannot finish."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from rankscope.run.folders import mark_job_over
from tests.cli.test_collect import Start, ended
from tests.cli.test_collect import address as address
from tests.cli.test_collect import collect as collect
from tests.cli.test_collect import host as host
from tests.cli.test_commands import rankscope
from tests.companion.jobs import Host
from tests.keyed import key_file


def test_a_dataset_that_cannot_be_finished_is_said_and_costs_the_tree_nothing(
    host: Host, collect: Start
):
    pytest.importorskip("pyarrow", reason="the extra rankscope[parquet] is missing")
    collector = collect("--bind", host.address, "--keys", host.keys, "--parquet")
    (host.out / "parquet").touch()  # where the folder should be
    host.relay()
    assert [rank.wait(120) for rank in [host.rank(0), host.rank(1)]] == [0, 0]
    _, _, err = ended(collector)
    log = host.out / "collector.log"
    assert (host.out / "trace.json").exists(), err
    assert f"rankscope: the dataset is not whole: see {log}\n" in err
    assert f"rankscope export {host.out} --out NEW --format parquet" in log.read_text()


def test_a_run_that_lost_a_rank_is_code_1_and_names_the_command_that_says_more(
    host: Host, collect: Start
):
    collector = collect("--bind", host.address, "--keys", host.keys)
    host.relay()
    killed = host.rank(1, hangs=True)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "written\n"
    killed.kill()
    assert host.rank(0).wait(120) == 0
    mark_job_over(host.folder)
    code, _, err = ended(collector)
    assert code == 1
    assert f"incomplete: rankscope verify {host.out}" in err


def test_fewer_traced_ranks_than_the_world_has_are_not_waited_for(host: Host, collect: Start):
    collector = collect("--bind", host.address, "--keys", host.keys, "--ranks", "1,7")
    host.relay()
    assert host.rank(1).wait(120) == 0
    ended(collector)
    assert (host.out / "trace.json").exists()


def test_a_stop_before_any_record_came_says_so(collect: Start, tmp_path: Path):
    """The stream of a rank is known before its first records have come."""
    collector = collect("--shared")
    (tmp_path / "trace/spool/rank00000.0.cells").touch()
    collector.send_signal(signal.SIGTERM)
    code, _, err = ended(collector)
    assert code == 1
    assert "nothing was traced: no rank sent a record to" in err
    assert "no tree" not in err and "recover" not in err


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_second_collector_on_one_folder_is_refused(
    collect: Start, address: str, tmp_path: Path, is_shared: bool
):
    collect(*([] if is_shared else ["--bind", address, "--keys", key_file()]))
    again = [] if is_shared else ["--bind", "tcp://127.0.0.1:*", "--keys", key_file()]
    code, out, err = rankscope("collect", "--out", tmp_path / "trace", "--world-size", 2, *again)
    assert (code, out) == (2, "")
    assert (tmp_path / "trace/run.json").exists()
    assert "another collector is at work there" in err
    assert len(err.splitlines()) == 1
