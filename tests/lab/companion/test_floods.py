"""A false collector that never ends its message."""

from __future__ import annotations

from rankscope.run.folders import TRACE_NAME, segment_indexes, stream_folder, streams
from tests.companion.test_floods import MOST_BYTES, finish, flood, most_bytes


def test_a_false_collector_cannot_fill_the_memory_of_a_training_host(hosts):
    host = hosts(world_size=1)
    host.rank(0, batches=3).wait(timeout=60)
    flooding = flood("collector", host.address, 4000)
    host.processes.append(flooding)
    assert flooding.stdout is not None
    assert flooding.stdout.readline() == "listening\n"
    relay = host.relay(fresh=True)
    sent, cut = finish(flooding)
    assert most_bytes(relay) < MOST_BYTES, f"{sent} bytes sent, {cut} cuts, {most_bytes(relay)}"
    assert cut >= 2
    assert relay.poll() is None, "it waits for a true collector"
    (stream,) = streams(host.folder)
    assert segment_indexes(stream_folder(host.folder, stream))
    assert not (host.out / TRACE_NAME).exists()
