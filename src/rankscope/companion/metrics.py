"""Prometheus metrics of a run, on a port of the loopback.

A request is answered with what `status.json` and `findings.jsonl` say then. No series is of a
module, and none of a single rank: their number is the same for any job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rankscope.record.call import Mode
from rankscope.record.finding import Kind
from rankscope.record.ranks import STATES
from rankscope.run.jobstatus import RankStatus, fullest_spool, read_status, stalls_in
from rankscope.run.messages import log
from rankscope.words.joblines import told_in

_END_S: Final = 30.0


@contextlib.contextmanager
def served_metrics(out: Path, port: int, *, world_size: int) -> Iterator[None]:
    """Serve metrics on the loopback while the block runs; where that cannot be, it is logged."""
    registry = CollectorRegistry()
    registry.register(_RunMetrics(out, world_size))
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:  # somebody was quicker
        log(f"no metrics: port {port} cannot be used: {error.strerror}")
        yield
        return
    log(f"metrics at http://127.0.0.1:{port}/metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_END_S)


class _RunMetrics:
    def __init__(self, out: Path, world_size: int) -> None:
        self._out, self._world_size = out, world_size
        self._received_bytes = 0

    def collect(self) -> Iterator[Metric]:
        status = read_status(self._out)
        totals, statuses = status.totals, status.ranks
        self._received_bytes = max(self._received_bytes, totals.received_bytes)
        states = [rank.place.state for rank in statuses]
        running = [rank for rank in statuses if rank.place.state == STATES["running"]]
        standing = sum(not stall.over_ns for stall in stalls_in(self._out))
        yield _counter("steps_traced", "train steps traced", totals.steps_ended)
        yield _counter("records", "records that were read", totals.records)
        yield _counter("received_bytes", "bytes of records received", self._received_bytes)
        yield _counter("lost_records", "records without room in a spool", totals.lost_records)
        yield _gauge("unread_bytes", "bytes received and not counted yet", totals.unread_bytes)
        yield _gauge("world_size", "ranks of the job", self._world_size)
        yield _counts("ranks", "ranks by state", "state", STATES.values(), states)
        yield from _steps(running)
        spool = fullest_spool(statuses)
        if spool is not None:
            unsent, fill = spool["unsent_bytes"], spool["fill"]
            yield _gauge("unsent_bytes", "bytes in spools of this host, not received yet", unsent)
            yield _gauge("spool_fill_ratio", "part of the fullest spool of this host", fill)
        if status.age_s is not None:
            yield _gauge("status_age_seconds", "since the records were read last", status.age_s)
        yield _gauge("stalls", "hosts whose ranks stand still", standing)
        if status.run["settings"].get("live-check") != "0":
            yield from self._findings()

    def _findings(self) -> Iterator[Metric]:
        findings, age_s = told_in(self._out)
        if age_s is None:
            return
        kinds = [finding.get("kind") for finding in findings]
        yield _counts("findings", "found so far by kind", "kind", [k.value for k in Kind], kinds)
        yield _gauge("judged_age_seconds", "since the live check judged or told something", age_s)


def _steps(running: Sequence[RankStatus]) -> Iterator[Metric]:
    steps = [s.step for s in running if s.step is not None and s.mode is Mode.TRAIN]
    if steps:
        yield _gauge("newest_step", "train step of the rank that is ahead", max(steps))
        yield _gauge("oldest_step", "train step of the rank that is behind", min(steps))
    ages = [status.age_s for status in running if status.age_s is not None]
    if ages:
        yield _gauge("newest_record_age_seconds", "age of the last record of any rank", min(ages))
        yield _gauge("oldest_record_age_seconds", "of the rank silent for longest", max(ages))
    seconds = [status.step_s for status in running if status.step_s is not None]
    if seconds:
        yield _gauge("step_seconds", "traced train step, median over ranks", median(seconds))
    slow = [status.beside_all for status in running if status.beside_all is not None]
    if slow:
        yield _gauge("slowest_rank_ratio", "time outside collectives beside median", max(slow))


def _counts(
    name: str, meaning: str, label: str, values: Iterable[str], observations: Sequence[Any]
) -> Metric:
    family = GaugeMetricFamily(f"rankscope_{name}", meaning, labels=[label])
    for value in values:
        family.add_metric([value], observations.count(value))
    return family


def _gauge(name: str, meaning: str, number: float) -> Metric:
    return GaugeMetricFamily(f"rankscope_{name}", meaning, value=number)


def _counter(name: str, meaning: str, number: float) -> Metric:
    return CounterMetricFamily(f"rankscope_{name}", meaning, value=number)
