"""Digests and full tensors on a device whose work is late: in order, without waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rankscope.capture import accelerator
from rankscope.capture.accelerator import Accelerator
from rankscope.capture.device.devicedigester import DeviceDigester
from rankscope.capture.digest import Digester
from rankscope.capture.keeping import DeviceStaging
from rankscope.capture.measuring import ValueNumbers
from tests.distributed.pool import RankPool
from tests.lab.lateaccelerator import call_idle
from tests.lab.lateaccelerator.streams import current_stream, run_to, work

CLAIMS: list[Callable[[], None]] = []


def in_rank(claim: Callable[[], None]) -> Callable[[], None]:
    """Add to what is claimed here; it runs in a rank that has the device."""
    CLAIMS.append(claim)
    return claim


def device() -> torch.device:
    return torch.device("late", 0)


def to_late(host: torch.Tensor) -> torch.Tensor:
    return host.to("late", non_blocking=True)


def let_run() -> None:
    """Run what the current stream holds, as a GPU does at some time, and no other stream."""
    run_to(current_stream(), current_stream().enqueued)


def let_fail() -> None:
    with pytest.raises(RuntimeError, match="in error"):
        torch.late.synchronize()


def agree(found: ValueNumbers, expected: ValueNumbers) -> None:
    assert found[:1] + found[2:6] == expected[:1] + expected[2:6]
    for name in ("min", "max", "mean", "std", "l2"):
        assert getattr(found, name) == pytest.approx(
            getattr(expected, name), rel=1e-6, nan_ok=True, abs=1e-7 * expected.l2
        )
    assert np.allclose(found.sketch, expected.sketch, rtol=0, atol=2e-6 * expected.l2)


def host_digest(tensor: torch.Tensor) -> ValueNumbers:
    return Digester().read(tensor, None, samples=True)


@in_rank
def a_digest_comes_back_without_waiting() -> None:
    hosts = [
        torch.randn(4, 3, 5),
        torch.randn(6, 4).bfloat16(),
        torch.randn(6, 4).t(),
        torch.arange(7),
        torch.tensor([float("nan"), 1.0, -float("inf"), 0.0]),
        torch.tensor(True),
        torch.randn(3, 2, dtype=torch.complex64).conj(),
        torch.randn(8).to(torch.float8_e4m3fn),
        torch.empty(0, 3),
    ]
    values = [to_late(host) for host in hosts]
    digester = DeviceDigester(device())
    for value in values:
        digester.read(value, None, samples=True)
    assert digester.collect() == []
    digester.flush()
    assert digester.collect() == [], "nothing has run yet"
    let_run()
    arrived = digester.collect()
    assert not work.synchronizations
    for (_, found), host in zip(arrived, hosts, strict=True):
        agree(found, host_digest(host))


@in_rank
def a_digest_is_of_the_value_at_the_call() -> None:
    host = torch.randn(5, 3)
    value, digester = to_late(host), DeviceDigester(device())
    digester.read(value, None, samples=True)
    value.zero_()
    del value
    _ = [torch.ones(5, 3, device="late") for _ in range(3)]  # in the memory that is free now
    digester.flush()
    let_run()
    ((_, found),) = digester.collect()
    agree(found, host_digest(host))


@in_rank
def every_stream_digests_in_its_own_order() -> None:
    """The second stream uses a form that the first one made, and nobody has run the first."""
    hosts = [torch.randn(4, 6), torch.randn(4, 6)]
    first, second = torch.late.Stream(), torch.late.Stream()
    digester = DeviceDigester(device())
    for stream, host in zip((first, second), hosts, strict=True):
        with torch.late.stream(stream):
            digester.read(to_late(host), None, samples=True)
    digester.flush()
    run_to(second, second.enqueued)
    assert digester.collect() == [], "they are handed out in the order in which they were read"
    run_to(first, first.enqueued)
    arrived = digester.collect()
    for (_, found), host in zip(arrived, hosts, strict=True):
        agree(found, host_digest(host))
    assert not work.synchronizations


@in_rank
def rows_behind_one_another_survive_a_full_buffer() -> None:
    hosts = [torch.randn(64, 3) + n for n in range(80)]
    digester = DeviceDigester(device())
    for host in hosts:
        digester.read(to_late(host), None, samples=True)
    let_run()
    assert 0 < len(digester.collect()) < len(hosts), "the first buffer was sent when it was full"
    digester.flush()
    let_run()
    assert len(digester.collect()) > 0
    assert not work.synchronizations


@in_rank
def the_end_of_a_trace_waits_for_what_is_left() -> None:
    host, digester = torch.randn(3, 3), DeviceDigester(device())
    digester.read(to_late(host), None, samples=True)
    ((_, found),) = digester.collect(wait=True)
    agree(found, host_digest(host))
    assert [wait.what for wait in work.synchronizations] == ["Event.query, again and again"]


@in_rank
def a_device_in_error_gives_back_what_came_before_and_raises_nothing() -> None:
    host = torch.randn(3, 3)
    digester, staging = DeviceDigester(device()), DeviceStaging(device(), 1 << 16)
    for _ in range(2):
        digester.read(to_late(host), None, samples=True)
        digester.flush()
    let_run()
    value = to_late(host)
    digester.read(value, None, samples=True)
    staging.stage(value)
    _ = value[torch.full((1,), 99, device="late")]
    assert [ticket for ticket, _ in digester.collect()] == [1, 2]
    let_fail()
    assert digester.collect(wait=True) == [] and list(staging.arrived(wait=True)) == []
    assert "index" in digester.failure and "index" in staging.failure
    assert digester.read(value, None, samples=True) is None and staging.stage(value) is None
    digester.flush()
    assert digester.collect() == [] and staging.held_bytes == 0
    staging.close()


@in_rank
def a_device_that_stands_still_is_given_up() -> None:
    host, digester = torch.randn(3, 3), DeviceDigester(device())
    digester.read(to_late(host), None, samples=True)
    digester.flush()
    most, accelerator._MOST_WAIT_S = accelerator._MOST_WAIT_S, 0.01
    asked, torch.late.Event.query = torch.late.Event.query, lambda event: False
    try:
        assert digester.collect(wait=True) == []
    finally:
        accelerator._MOST_WAIT_S, torch.late.Event.query = most, asked
    assert "stood still" in digester.failure


@in_rank
def a_graph_takes_nothing_of_ours_and_is_not_broken() -> None:
    host = torch.randn(3, 3)
    value, digester = to_late(host), DeviceDigester(device())
    staging, graph = DeviceStaging(device(), 1 << 16), torch.late.Graph()
    digester.read(value, None, samples=True)
    digester.flush()
    staging.stage(value)
    digester.read(value, None, samples=True)
    with graph.capture():
        assert digester.read(value, None, samples=True) is None
        assert staging.stage(value) is None
        digester.flush()
        assert digester.collect() == []
        assert list(staging.arrived()) == []
    assert graph.size == 0
    found = digester.collect(wait=True)
    assert [ticket for ticket, _ in found] == [1, 2]
    assert [ticket for ticket, _ in staging.arrived(wait=True)] == [1]
    staging.close()


@in_rank
def a_full_tensor_comes_back_without_waiting() -> None:
    hosts = [torch.randn(5, 3), torch.arange(7), torch.randn(4, 2).t(), torch.empty(0)]
    staging = DeviceStaging(device(), 1 << 16)
    tickets = []
    for host in hosts:
        value = to_late(host)
        tickets.append(staging.stage(value))
        if value.numel():
            value.zero_()
    assert list(staging.arrived()) == []
    let_run()
    assert list(staging.arrived()) == [], "the copy is on a stream of its own"
    run_to(staging._side, staging._side.enqueued)
    arrived = {ticket: data.tobytes() for ticket, data in staging.arrived()}
    assert [arrived[ticket] for ticket in tickets] == [
        h.contiguous().numpy().tobytes() for h in hosts
    ]
    assert not work.synchronizations and staging.held_bytes == 0
    staging.close()


@in_rank
def what_is_on_its_way_is_not_written_over() -> None:
    staging = DeviceStaging(device(), 100_000)
    first, second = torch.full((10_000,), 1.0), torch.full((10_000,), 2.0)
    assert staging.stage(to_late(first)) and staging.stage(to_late(second))
    assert staging.stage(to_late(first)) is None, "no room, and nobody waits for it"
    _ = [torch.zeros(10_000, device="late") for _ in range(8)]
    let_run()  # this stream is ahead of the one that copies
    arrived = [np.frombuffer(data.tobytes(), np.float32) for _, data in staging.arrived(wait=True)]
    assert [float(data.min()) for data in arrived] == [1.0, 2.0]
    assert [float(data.max()) for data in arrived] == [1.0, 2.0]
    assert staging.stage(to_late(second)) is not None, "there is room again"
    staging.close()


@in_rank
def a_device_without_streams_or_events_copies_in_the_open() -> None:
    module: Any = torch.late  # type: ignore[attr-defined]
    kind, left = type(module), {}
    host = torch.randn(4, 4)
    try:
        for names in (("Stream", "stream", "current_stream"), ("Event",)):
            for name in names:
                left[name] = vars(kind)[name]
                delattr(kind, name)
            work.synchronizations.clear()
            digester, staging = DeviceDigester(device()), DeviceStaging(device(), 1 << 12)
            assert Accelerator(device()).current_stream() is None
            digester.read(to_late(host), None, samples=True)
            assert staging.stage(to_late(host))
            digester.flush()
            assert bool(work.synchronizations) is ("Event" in names)
            ((_, found),) = digester.collect(wait=True)
            agree(found, host_digest(host))
            ((_, data),) = staging.arrived(wait=True)
            assert data.tobytes() == host.numpy().tobytes()
            staging.close()
    finally:
        for name, value in left.items():
            setattr(kind, name, value)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_on_a_late_device(late_ranks: RankPool, claim: Callable[[], None]) -> None:
    late_ranks.run(call_idle, claim, world_size=1, timeout_s=120)
