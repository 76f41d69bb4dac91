"""Replicas that settle while others read them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rankscope.spool.recordformat import RecordKind
from rankscope.spool.replicas import (
    free,
    read_replica,
    write_settled,
)
from rankscope.tree.assembly.sources import find_streams
from tests import forked
from tests.spool.streams import record_begins, settled
from tests.spool.test_reader import record_ends
from tests.spool.test_settledprefix import makes_holes as makes_holes
from tests.spool.test_settledprefix import replica as replica
from tests.spool.test_settledprefix import whole as whole


@pytest.mark.usefixtures("makes_holes")
def test_nothing_is_freed_while_somebody_has_the_replica_mapped(replica: Path, whole: bytes):
    end = record_ends(whole)[-10]
    (found,) = find_streams([replica.parents[1]])
    write_settled(replica, settled(whole, end))
    assert not free(replica, end)
    assert bytes(found.data) == whole
    del found
    assert free(replica, end)
    data, prefix = read_replica(replica)
    assert data.tobytes() == prefix.payload + whole[end:]
    assert free(replica, end), "of a settled replica nothing is mapped"


SETTLE_AGAIN_AND_AGAIN = """
import sys
from pathlib import Path
from rankscope.spool.recordformat import RecordKind
from rankscope.spool.replicas import free, write_settled
from tests.spool.streams import record_begins, settled
replica = Path(sys.argv[1])
whole = replica.read_bytes()
begins = record_begins(whole, RecordKind.ENTER)
freed = 0
for before, at in zip(begins[10::4], begins[14::4]):
    write_settled(replica, settled(whole, at, before))
    freed += free(replica, at)
print(freed)
"""


@pytest.mark.usefixtures("makes_holes")
def test_a_reader_beside_a_process_that_settles_again_and_again_sees_a_stream_without_a_hole(
    replica: Path, whole: bytes
):
    begins = record_begins(whole, RecordKind.ENTER)
    possible = {whole}
    for before, at in zip(begins[10::4], begins[14::4]):
        possible.add(settled(whole, at, before).payload + whole[at:])
    command = [sys.executable, "-c", SETTLE_AGAIN_AND_AGAIN, str(replica)]
    with forked.Popen(command, stdout=-1, text=True) as settling:
        seen = set()
        while settling.poll() is None:
            (found,) = find_streams([replica.parents[1]])
            data = bytes(found.data)
            assert data in possible
            assert len(data) + found.hidden_bytes == len(whole)
            seen.add(data)
        assert settling.stdout is not None
        assert int(settling.stdout.read()) > 0, "some bytes were freed beside the reader"
        assert settling.returncode == 0
    assert len(seen) > 2
    (found,) = find_streams([replica.parents[1]])
    assert found.hidden_bytes > 0
