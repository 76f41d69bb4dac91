"""What a collector tells Prometheus of real jobs."""

from __future__ import annotations

import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from rankscope.record.finding import Kind
from tests.cli.topjobs import starting
from tests.launcher.launches import Launch, kill
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
