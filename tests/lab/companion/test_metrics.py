"""What a collector tells Prometheus of hangs, of ends, and where it cannot."""

from __future__ import annotations

import socket
from collections.abc import Callable
from importlib.metadata import entry_points

import pytest

from tests.companion.jobs import Host
from tests.companion.test_metrics import launch as launch
from tests.companion.test_metrics import number, scraped
from tests.launcher.launches import Launch, rankscope
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        not entry_points(group="torchrun.logs_specs").select(name="rankscope"),
        reason="needs the start-up file: an environment made by launcher/test",
    ),
]


def test_a_hang_is_a_finding_of_its_kind(launch: Callable[..., Launch]) -> None:
    port = free_port()
    # noticed after 1 s, when nobody has stood in a collective for the 3 s that make a hang
    job = launch(["ok", "skips"], "--rs-metrics", port, "--rs-stall-seconds", 1)
    assert wait_until(lambda: number(port, "stalls") == 1), job.logs
    assert wait_until(lambda: number(port, "findings", "hang") == 1), job.logs
    assert number(port, "oldest_record_age_seconds") > 2
    (job.meeting / "go").touch()
    assert wait_until(lambda: number(port, "stalls") == 0), job.logs
    (job.meeting / "leave").touch()
    assert job.wait() == 0, job.logs


def test_where_the_port_is_taken_the_job_runs_without(launch: Callable[..., Launch]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = launch(["ok"], "--rs-metrics", port)
        assert wait_until((job.meeting / "ended.0").exists), job.err
        (job.meeting / "leave").touch()
        assert job.wait() == 0, job.logs
    assert f"no metrics: port {port} cannot be used: Address already in use" in job.err
    assert (job.out / "trace.json").exists()
    assert rankscope("collect", "--world-size", 1, "--metrics", 0).returncode == 2


@pytest.mark.parametrize("is_shared", [False, True], ids=["socket", "shared"])
def test_ranks_that_end_and_are_killed_are_counted_by_state(
    hosts: Callable[..., Host], is_shared: bool
) -> None:
    port = free_port()
    host = hosts(address="shared") if is_shared else hosts()
    host.collector(metrics=int(port))
    host.relay()
    host.rank(0, batches=5)
    killed = host.rank(1, batches=5, hangs=True)
    assert killed.stdout is not None and killed.stdout.readline() == "written\n"
    assert wait_until(lambda: number(port, "ranks", "ended") == 1, 60)
    assert wait_until(lambda: number(port, "ranks", "running") == 1, 60)
    killed.kill()
    assert wait_until(lambda: number(port, "ranks", "lost") == 1, 60), scraped(port)
    assert number(port, "steps_traced_total") == 5
    # of each rank its definition, five steps of 100 calls with values, 14 samples, two marks; ends
    assert number(port, "records_total") > 2 * 5 * 200
