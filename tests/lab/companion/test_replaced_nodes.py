"""Full tensors of a replaced node, never mixed with those of the dead one: the same rank in the
same life, chunks of the same names, on hosts that know nothing of each other.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankscope.record.ranks import StreamId
from rankscope.run.folders import mark_job_over
from rankscope.spool import recordformat
from rankscope.spool.recordformat import RecordKind
from rankscope.spool.replicas import read_end, replica_path
from rankscope.tracing import open_trace
from rankscope.tree.build import recover
from rankscope.tree.views import Trace
from tests.chunks.chunked import ChunkWriter, pack
from tests.ports import free_port
from tests.tree.ranks_on_paper import PaperRank
from tests.waiting import wait_until

STREAM = StreamId(rank=0, incarnation=0)
KEPT = {"dead": 3, "new": 5}


def tensor_of(host: str, number: int) -> np.ndarray:
    return np.full(4, len(host) * 100 + number, np.float32)


def work(folder: Path, host: str) -> None:
    """Be rank 0 in its first life on a host: some calls, their outputs kept. The dead one leaves
    its chunk as a kill would."""
    began = 1_700_000_000_000_000_000 + list(KEPT).index(host)
    rank = PaperRank(folder, 0, 1, run_id="test", host=host, identity={"wall_ns": began})
    writer = ChunkWriter(folder, STREAM, limit_bytes=1 << 30)
    for number in range(KEPT[host]):
        tensor = tensor_of(host, number)
        reference = number + 1
        with rank.call(f"layer{number}", parent=None) as sequence:
            meta = rank.known("meta", dtype="float32", device="cpu", shape=[4])
            entry = writer.write(reference, "float32", (4,), (tensor.view(np.uint8),))
            assert entry is not None
            writer.commit(entry)
            rank.writer.write(RecordKind.TENSOR, pack(entry, meta))
            slot = rank.known("slot", name="output")
            head = recordformat.VALUE_HEAD.pack(
                sequence, rank.now(), slot, meta, 0, 1, 0, 4, number + 1, reference
            )
            rank.writer.write(RecordKind.VALUE, head)
    if host == "dead":
        rank.writer._lock.release()
        writer._file.close()
        writer.forget_in_child = lambda: None
    else:
        writer.finish()
        rank.end()


def assert_each_life_has_its_own(trace: Trace) -> None:
    lives = {rank["host"]: rank["incarnation"] for rank in trace.completeness["ranks"]}
    assert lives == {"dead": 0, "new": 1}
    assert trace.completeness["ranks"][1]["notes"] == []
    for host, life in lives.items():
        (step,) = [step for step in trace.steps if step.incarnation == life]
        found = [node.value("output").local(0).tolist() for node in step.nodes]
        assert found == [tensor_of(host, number).tolist() for number in range(KEPT[host])]
    assert trace.tensor_files.problems() == []


@pytest.mark.parametrize("order", [("dead", "new"), ("new", "dead")])
def test_recover_puts_the_chunks_of_each_process_beside_its_own_records(tmp_path, order):
    for host in KEPT:
        work(tmp_path / host, host)
    before = {path: path.read_bytes() for path in (tmp_path / "new").rglob("*.safetensors")}
    recover([tmp_path / host for host in order], tmp_path / "out")
    assert_each_life_has_its_own(open_trace(tmp_path / "out"))
    assert before and all(path.read_bytes() == content for path, content in before.items())


def test_a_collector_takes_the_chunks_of_both_and_neither_host_keeps_any(hosts, tmp_path):
    address = f"tcp://127.0.0.1:{free_port()}"
    head, dead, new = (
        hosts(name, address=address, world_size=1) for name in ("head", "dead", "new")
    )
    collector = head.collector(drain_seconds=6.0)
    relays = []
    for life, (host, name) in enumerate(((dead, "dead"), (new, "new"))):
        work(host.folder, name)
        relays.append(host.relay())
        stream = StreamId(rank=0, incarnation=life)
        assert wait_until(lambda: read_end(replica_path(head.out, stream))), head.log("collector")  # noqa: B023
    for host in (dead, new):
        mark_job_over(host.folder)
    assert [process.wait(120) for process in (collector, *relays)] == [0, 0, 0]
    assert_each_life_has_its_own(open_trace(head.out))
    assert not any(new.folder.rglob("*.safetensors"))
    assert not any(dead.folder.rglob("*.safetensors"))
