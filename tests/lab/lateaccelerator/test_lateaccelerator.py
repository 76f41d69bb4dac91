"""The accelerator of the tests: as late as a GPU may be, and it notices everybody who waits."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import RankPool
from tests.lab.lateaccelerator import call_idle
from tests.lab.lateaccelerator.streams import MOST_QUERIES, current_stream, work

CLAIMS: list[Callable[[], None]] = []


def on_late(claim: Callable[[], None]) -> Callable[[], None]:
    """Add to what is claimed of the accelerator; it runs in a rank."""
    CLAIMS.append(claim)
    return claim


def test_a_process_without_it_has_no_such_device() -> None:
    """Registering it is for the life of a process, so this one must not have it."""
    assert not hasattr(torch, "late")


@on_late
def entries_run_when_somebody_waits_and_not_before() -> None:
    x = torch.arange(6.0).to("late", non_blocking=True)
    y = (x * 2 + 1).sum()
    assert current_stream().executed < current_stream().enqueued
    assert not work.synchronizations
    assert y.item() == 36.0
    (found,) = work.synchronizations
    assert (found.what, found.is_of_rankscope) == ("item", False)
    assert found.origin.startswith(__file__)
    assert found.origin.endswith("entries_run_when_somebody_waits_and_not_before")


@on_late
def an_event_is_asked_without_running_anything() -> None:
    x = torch.ones(3, device="late") * 2
    event = torch.late.Event()
    event.record()
    assert not event.query() and not work.synchronizations
    event.synchronize()
    assert event.query() and x.tolist() == [2.0] * 3
    event.record()
    _ = x + 1
    assert event.query(), "only the work before it counts"


@on_late
def asking_for_ever_is_waiting() -> None:
    _ = torch.ones(3, device="late")
    event = torch.late.Event()
    event.record()
    assert not any(event.query() for _ in range(MOST_QUERIES))
    assert not work.synchronizations
    assert event.query()
    assert len(work.synchronizations) == 1


@on_late
def a_stream_that_does_not_wait_for_another_reads_too_early() -> None:
    side, other = torch.late.Stream(), torch.late.Stream()
    x = torch.full((4,), 7.0, device="late")
    ready = torch.late.Event()
    ready.record()
    with torch.late.stream(side):
        early = x * 1
    other.wait_event(ready)
    with torch.late.stream(other):
        in_order = x * 1
    side.synchronize()
    other.synchronize()
    with torch.late.stream(side):
        assert early.tolist() != [7.0] * 4
    with torch.late.stream(other):
        assert in_order.tolist() == [7.0] * 4


@on_late
def pinned_memory_is_poison_until_the_copy_is_done() -> None:
    host = torch.zeros(3).pin_memory()
    assert host.is_pinned() and not torch.zeros(3).is_pinned()
    x = torch.arange(3.0).to("late", non_blocking=True)
    host.copy_(x, non_blocking=True)
    done = torch.late.Event()
    done.record()
    assert host.isnan().all() and not work.synchronizations
    done.synchronize()
    assert host.tolist() == [0.0, 1.0, 2.0]
    late_again = x.to("cpu", non_blocking=True)
    assert late_again.is_pinned() and late_again.isnan().all()
    whole = torch.empty(2, dtype=torch.int64, pin_memory=True)
    whole.copy_(torch.ones(2, dtype=torch.int64, device="late"), non_blocking=True)
    assert whole.tolist() == [-1, -1]


@on_late
def pinned_memory_is_read_late_and_other_memory_at_once() -> None:
    pinned, plain = torch.ones(2).pin_memory(), torch.ones(2)
    x, y = (t.to("late", non_blocking=True) for t in (pinned, plain))
    pinned.zero_()
    plain.zero_()
    assert (x.tolist(), y.tolist()) == ([0.0, 0.0], [1.0, 1.0])


@on_late
def everybody_who_waits_is_counted() -> None:
    x = torch.arange(4.0).to("late", non_blocking=True)
    mask, event, plain = x > 1, torch.late.Event(), torch.empty(4)
    event.record()
    waits: dict[str, Callable[[], object]] = {
        "item": lambda: x[0].item(),
        "bool": lambda: bool(x[0]),
        "float": lambda: float(x[0]),
        "format": lambda: f"{x[0]}",
        "tolist": lambda: x.tolist(),
        "cpu": lambda: x.cpu(),
        "to": lambda: x.to("cpu"),
        "copy": lambda: plain.copy_(x),
        "copy to memory that is not pinned": lambda: plain.copy_(x, non_blocking=True),
        "copy to the device": lambda: x.copy_(plain),
        "tensor": lambda: torch.tensor([1.0], device="late"),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[mask],
        "masked_select": lambda: x.masked_select(mask),
        "unique": lambda: x.unique(),
        "equal": lambda: torch.equal(x, x),
        "allclose": lambda: torch.allclose(x, x),
        "event": event.synchronize,
        "stream": torch.late.current_stream().synchronize,
        "device": torch.late.synchronize,
    }
    for name, wait in waits.items():
        before = len(work.synchronizations)
        wait()
        assert len(work.synchronizations) > before, name
        torch.late.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchronizing operation"):
            wait()
        torch.late.set_sync_debug_mode("default")
    before = len(work.synchronizations)
    _ = x + 1, x[1:], x.sum(), x.view(2, 2) @ x.view(2, 2), torch.zeros(3, device="late"), x[0] * 2
    _ = (
        torch.where(mask, x, 0.0),
        x.clone(),
        x.to("late", torch.float64),
        torch.late.Event().query(),
    )
    assert len(work.synchronizations) == before, "none of these waits"


@on_late
def the_host_cannot_read_its_memory() -> None:
    x = torch.ones(3, device="late")
    with pytest.raises(TypeError, match="copy the tensor to host memory first"):
        x.numpy()
    write = ctypes.CDLL(None, use_errno=True).write  # the kernel reads, and nobody dies of it
    reader, writer = os.pipe()
    written = [
        write(writer, ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(4))
        for tensor in (torch.ones(3), x)
    ]
    os.close(reader)
    os.close(writer)
    assert written == [4, -1] and ctypes.get_errno() == errno.EFAULT


@on_late
def memory_is_used_again_behind_its_stream() -> None:
    first = torch.full((5, 1000), 1.0, device="late")  # a size that nobody else has
    kept, address = first + 1, first.data_ptr()
    del first
    again = torch.full((5, 1000), 9.0, device="late")
    assert again.data_ptr() == address
    assert kept.max().item() == 2.0, "what was enqueued before came before"


@on_late
def what_another_stream_reads_has_to_be_kept_or_recorded() -> None:
    for is_recorded in (False, True):
        torch.late.synchronize()
        side = torch.late.Stream()
        x = torch.full((3, 1000), 5.0, device="late")  # a size that nobody else has
        side.wait_event(torch.late.current_stream().record_event())
        with torch.late.stream(side):
            y = x * 1
        if is_recorded:
            x.record_stream(side)
        address = x.data_ptr()
        del x
        other = torch.full((3, 1000), 6.0, device="late")
        assert (other.data_ptr() == address) is not is_recorded
        torch.late.current_stream().synchronize()
        with torch.late.stream(side):
            assert y[0, 0].item() == (5.0 if is_recorded else 6.0)


@on_late
def the_work_of_the_device_sees_no_mode_of_the_program() -> None:
    x = torch.ones(4, 4).to("late", non_blocking=True)
    y = x @ x
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta"):
        assert y.tolist() == [[4.0] * 4] * 4
    with torch.inference_mode():
        host = torch.empty(4, 4, device="cpu", pin_memory=True)
        host.copy_(y, non_blocking=True)
    torch.late.synchronize()
    assert host.tolist() == [[4.0] * 4] * 4


@on_late
def a_graph_takes_what_is_enqueued_and_refuses_who_asks() -> None:
    x, graph = torch.zeros(2, device="late"), torch.late.Graph()
    before = torch.late.Event()
    before.record()
    with graph.capture():
        assert torch.late.is_current_stream_capturing()
        x.add_(1)
        for refused in (before.query, before.synchronize, lambda: torch.empty(1, pin_memory=True)):
            with pytest.raises(RuntimeError, match="is being captured"):
                refused()
    assert graph.size == 1
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [3.0, 3.0]


@on_late
def a_failure_stays() -> None:
    x = torch.ones(3, device="late")
    far = torch.full((2,), 99, device="late")
    _ = x[far]
    event = torch.late.Event()
    event.record()
    assert not event.query()
    for wait in (x[0].item, torch.late.synchronize, event.query, x.cpu):
        with pytest.raises(RuntimeError, match="the device is in error"):
            wait()


@on_late
def random_numbers_come_in_the_order_of_the_calls() -> None:
    torch.late.manual_seed(3)
    first, state = torch.zeros(5, device="late").normal_(), torch.late.get_rng_state()
    host = torch.get_rng_state()
    second = torch.zeros(5, device="late").normal_()
    drops = []
    for _ in range(2):
        torch.late.set_rng_state(state)
        drops.append(torch.nn.functional.dropout(torch.ones(64, device="late")))
    torch.late.manual_seed(3)
    anew = [torch.zeros(5, device="late").normal_() for _ in range(2)]
    assert not work.synchronizations
    assert [first.tolist(), second.tolist()] == [each.tolist() for each in anew]
    assert first.tolist() != second.tolist() and 0 < drops[0].count_nonzero().item() < 64
    assert drops[0].tolist() == drops[1].tolist()
    assert torch.equal(torch.get_rng_state(), host), "the host's are its own"


@on_late
def training_gives_the_gradients_of_the_cpu() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(9, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 9), torch.nn.GELU()
    )
    words = torch.arange(8).view(2, 4)

    def gradients(words: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        return [p.grad for p in model.parameters()]

    expected = [g.clone() for g in gradients(words)]
    model.to("late")
    words = words.to("late")
    work.synchronizations.clear()
    found = gradients(words)
    assert not work.synchronizations
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours.cpu(), theirs, atol=1e-6)


@on_late
def a_collective_waits_in_a_queue_of_its_own() -> None:
    store = dist.PrefixStore("late", dist.distributed_c10d._get_default_store())
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("late", store=store, rank=rank, world_size=2)
    x = torch.full((3,), rank + 1.0, device="late")
    pending = dist.all_reduce(x, async_op=True)
    doubled_early = x * 2
    pending.wait()
    doubled = x * 2
    parts = torch.empty(6, device="late")
    dist.all_gather_into_tensor(parts, x)
    assert not work.synchronizations
    assert doubled.tolist() == [6.0] * 3 and parts.tolist() == [3.0] * 6
    assert doubled_early.tolist() in ([6.0] * 3, [2.0 * (rank + 1)] * 3)
    host = torch.ones(1)
    dist.all_reduce(host)
    assert host.item() == 2.0


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_the_accelerator_is_as_late_as_a_gpu_may_be(
    late_ranks: RankPool, claim: Callable[[], None]
) -> None:
    world = 2 if "collective" in claim.__name__ else 1
    late_ranks.run(call_idle, claim, world_size=world, timeout_s=120)
