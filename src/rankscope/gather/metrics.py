"""What a collector says of its run to Prometheus, on a port of the loopback.

A thread reads what has come into the trace folder, for at most a fourth of the time; a request is
answered with what it read last. No series is of a module, and none of a single rank: their number
is the same for any job.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rankscope.errors import RankscopeError
from rankscope.gather.log import log
from rankscope.live.jobsummary import fullest_spool
from rankscope.live.jobwatch import JobTotals, JobWatch, RankStatus
from rankscope.record.call import Mode
from rankscope.record.finding import Kind
from rankscope.record.rankplace import STATES
from rankscope.run.findingnotices import told_in
from rankscope.run.stallrecords import stalls_in

__all__ = ["served_metrics"]

_EVERY_S: Final = 1.0
_SHARE: Final = 4
_END_S: Final = 30.0


@contextlib.contextmanager
def served_metrics(out: Path, port: int, *, world_size: int) -> Iterator[None]:
    """Serve metrics on the loopback while the block runs; where that cannot be, it is logged."""
    registry = CollectorRegistry()
    metrics = _RunMetrics(out, world_size)
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:  # somebody was quicker
        log(f"no metrics: port {port} cannot be used: {error.strerror}")
        yield
        return
    log(f"metrics at http://127.0.0.1:{port}/metrics")
    metrics.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_END_S)
        metrics.stop()


class _RunMetrics:
    """Reads the streams of a run in a thread of its own, and says what it read."""

    def __init__(self, out: Path, world_size: int) -> None:
        self._out, self._world_size = out, world_size
        self._watch = JobWatch(out, skips=False, has_values=False)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="metrics", daemon=True)
        self._received_bytes = 0
        self._families: list[Metric] = self._made(JobTotals(), [], 0)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join(_END_S)
        self._watch.close()

    def collect(self) -> Iterator[Metric]:
        """Yield the families, for `prometheus_client`."""
        yield from self._families

    def _read(self) -> None:
        said = ""
        wait_s = 0.0
        while not self._is_stopped.wait(wait_s):
            began = time.monotonic()
            try:
                self._watch.look()
                totals = self._watch.totals()
                standing = sum(not stall.over_ns for stall in stalls_in(self._out))
                self._families = self._made(totals, self._watch.ranks(), standing)
            except (RankscopeError, OSError) as error:  # the folder was moved: what is known stays
                if str(error) != said:
                    said = str(error)
                    log(f"metrics: {said}")
            wait_s = max(_EVERY_S, (_SHARE - 1) * (time.monotonic() - began))

    def _made(
        self, totals: JobTotals, statuses: Sequence[RankStatus], standing: int
    ) -> list[Metric]:
        self._received_bytes = max(self._received_bytes, totals.received_bytes)
        states = [status.place.state for status in statuses]
        running = [status for status in statuses if status.place.state == STATES["running"]]
        return [
            _counter("steps_traced", "train steps traced", totals.steps_ended),
            _counter("records", "records that were read", totals.records),
            _counter("received_bytes", "bytes of records received", self._received_bytes),
            _counter("lost_records", "records without room in a spool", totals.lost_records),
            _gauge("unread_bytes", "bytes received and not counted yet", totals.unread_bytes),
            _gauge("world_size", "ranks of the job", self._world_size),
            _counts("ranks", "ranks by state", "state", STATES.values(), states),
            *_steps(running),
            *_spools(statuses),
            _gauge("stalls", "hosts whose ranks stand still", standing),
            *self._findings(),
        ]

    def _findings(self) -> Iterator[Metric]:
        """Yield what the live check found, by kind, once it has judged a step."""
        told, age_s = told_in(self._out)
        if age_s is None or self._watch.run["settings"].get("live-check") == "0":
            return
        kinds = [each.get("kind") for each in told]
        yield _counts("findings", "found so far by kind", "kind", [k.value for k in Kind], kinds)
        yield _gauge("judged_age_seconds", "since the live check judged or told something", age_s)


def _steps(running: Sequence[RankStatus]) -> Iterator[Metric]:
    """Yield where the ranks that run are, how far apart, and how fast."""
    steps = [s.step for s in running if s.step is not None and s.mode is Mode.TRAIN]
    if steps:
        yield _gauge("newest_step", "train step of the rank that is ahead", max(steps))
        yield _gauge("oldest_step", "train step of the rank that is behind", min(steps))
    ages = [status.age_s for status in running if status.age_s is not None]
    if ages:
        yield _gauge("newest_record_age_seconds", "age of the last record of any rank", min(ages))
        yield _gauge("oldest_record_age_seconds", "of the rank silent for longest", max(ages))
    taken = [status.step_s for status in running if status.step_s is not None]
    if taken:
        yield _gauge("step_seconds", "traced train step, median over ranks", median(taken))
    slow = [status.beside_all for status in running if status.beside_all is not None]
    if slow:
        yield _gauge("slowest_rank_ratio", "time outside collectives beside median", max(slow))


def _spools(statuses: Sequence[RankStatus]) -> Iterator[Metric]:
    """Yield what lies in the spools of this host."""
    spool = fullest_spool(statuses)
    if spool is not None:
        unsent, fill = spool["unsent_bytes"], spool["fill"]
        yield _gauge("unsent_bytes", "bytes in spools of this host, not received yet", unsent)
        yield _gauge("spool_fill_ratio", "part of the fullest spool of this host", fill)


def _counts(
    name: str, meaning: str, label: str, values: Iterable[str], found: Sequence[Any]
) -> Metric:
    family = GaugeMetricFamily(f"rankscope_{name}", meaning, labels=[label])
    for value in values:
        family.add_metric([value], found.count(value))
    return family


def _gauge(name: str, meaning: str, number: float) -> Metric:
    return GaugeMetricFamily(f"rankscope_{name}", meaning, value=number)


def _counter(name: str, meaning: str, number: float) -> Metric:
    return CounterMetricFamily(f"rankscope_{name}", meaning, value=number)
