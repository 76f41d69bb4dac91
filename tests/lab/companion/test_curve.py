"""A job whose keys do not fit."""

from __future__ import annotations

from pathlib import Path

from rankscope.companion.curve import new_keys
from rankscope.run.connection import write_keys
from rankscope.run.folders import mark_job_over
from rankscope.run.processes import ExitOutcome
from tests.companion.jobs import Host
from tests.ports import free_port


def test_a_job_whose_keys_do_not_fit_keeps_its_records_and_its_relay_says_why(
    tmp_path: Path,
) -> None:
    write_keys(tmp_path / "other", new_keys())
    host = Host(
        tmp_path / "host",
        tmp_path / "trace",
        address=f"tcp://127.0.0.1:{free_port()}",
        world_size=1,
        settings={"keys": str(tmp_path / "other.relay")},
    )
    try:
        collector, relay = host.collector(), host.relay()
        assert host.rank(0).wait(120) == 0
        mark_job_over(host.folder)
        assert relay.wait(120) == ExitOutcome.STRANGE
        assert "has other keys, or none" in host.log("relay")
        assert f"the records of this host stay in {host.folder}" in host.log("relay")
        assert collector.poll() is None
        assert list(host.folder.rglob("*.cells"))
    finally:
        host.stop()
