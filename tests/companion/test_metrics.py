"""What a collector tells Prometheus of real jobs."""

from __future__ import annotations

import json
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from rankscope.record.finding import Kind
from tests.cli.topjobs import starting
from tests.companion.jobs import Host
from tests.launcher.launches import Launch, kill, rankscope
from tests.ports import free_port
from tests.waiting import wait_until

parser = pytest.importorskip("prometheus_client.parser", reason="needs the extra metrics")
HOME = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        not entry_points(group="torchrun.logs_specs").select(name="rankscope"),
        reason="needs the start-up file: an environment made by launcher/test",
    ),
]
Series = dict[tuple[str, str], float]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    with starting(tmp_path) as start:
        yield start


def scraped(port: str) -> Series:
    """Return {(name, label's value): number}; {} where nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    except (OSError, urllib.error.URLError):
        return {}
    found: Series = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            assert set(sample.labels) <= {"state", "kind"}, "no series of a rank or a module"
            found[sample.name, "".join(sample.labels.values())] = sample.value
    return found


def number(port: str, name: str, label: str = "") -> float:
    return scraped(port).get((f"rankscope_{name}", label), -1.0)


def test_a_job_that_runs_is_counted_also_behind_a_killed_collector(
    launch: Callable[..., Launch],
) -> None:
    port = free_port()
    job = launch(["ok", "slow", "ok"], "--rs-metrics", port)
    assert wait_until(lambda: number(port, "steps_traced_total") >= 5), job.logs
    assert wait_until(lambda: ("rankscope_judged_age_seconds", "") in scraped(port)), job.logs
    found = scraped(port)
    named = {name.removeprefix("rankscope_"): value for (name, _), value in found.items()}
    assert named["world_size"] == 3 and found["rankscope_ranks", "running"] == 3
    assert named["newest_step"] - named["oldest_step"] in (0, 1) and named["newest_step"] >= 5
    assert named["records_total"] > 500 and named["received_bytes_total"] > 50_000
    assert named["lost_records_total"] == 0 and named["stalls"] == 0
    assert 0 <= named["newest_record_age_seconds"] <= named["oldest_record_age_seconds"] < 60
    assert named["step_seconds"] > 0.3 and named["slowest_rank_ratio"] > 1.2
    assert 0 <= named["spool_fill_ratio"] < 0.5 and named["unsent_bytes"] >= 0
    assert [found["rankscope_findings", kind.value] for kind in Kind] == [0.0] * len(Kind)
    page = (HOME / "docs/commands/run.md").read_text()
    assert [name for name, _ in found if name not in page] == []
    used = json.loads((HOME / "examples/grafana.json").read_text())
    exprs = [target["expr"] for panel in used["panels"] for target in panel["targets"]]
    asked = {name for expr in exprs for name in re.findall(r"rankscope_\w+", expr)}
    assert asked <= {name for name, _ in found} and len(asked) > 10

    listening = Path("/proc/net/tcp").read_text().split("\n")[1:]
    own = [line.split()[1] for line in listening if f":{int(port):04X} " in line[:22]]
    assert set(own) == {f"0100007F:{int(port):04X}"}, "the loopback alone"

    before = number(port, "records_total")
    kill(job.companion(), signal.SIGKILL)
    assert wait_until(lambda: number(port, "records_total") >= before), job.logs
    (job.meeting / "leave").touch()
    assert job.wait() == 0, job.logs
    assert scraped(port) == {}
    assert "no metrics" not in job.err


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
