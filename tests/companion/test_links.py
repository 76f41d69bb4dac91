"""What a relay says first: who it is and how much it holds, before any word about a stream."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankscope.companion.collector import Intake
from rankscope.companion.links import SocketLink
from rankscope.companion.shipping import Shipment
from rankscope.companion.waitingrule import JobState
from rankscope.record.ranks import EndReason, StreamId
from rankscope.run.folders import RunHeader, stream_folder
from rankscope.spool.writer import SpoolWriter
from tests.companion.jobs import short_ipc
from tests.spool.streams import rank_definition
from tests.waiting import wait_until

LIVES = [StreamId(rank=0, incarnation=life) for life in range(2)]


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The run folder of a rank with two lives, both over."""
    for stream in LIVES:
        writer = SpoolWriter(stream_folder(tmp_path, stream), limit_bytes=1 << 26)
        writer.define(rank_definition(0, pid=os.getpid()))
        writer.close(EndReason.EXIT)
    return tmp_path


def test_a_relay_introduces_itself_to_a_collector_that_comes_later_and_tells_what_it_holds(
    run_folder: Path, tmp_path: Path
) -> None:
    """No time passes for the relay here, so nothing is said a second time because it is due."""
    address = short_ipc(run_folder)
    header = RunHeader(run_id="test", out=tmp_path / "out", collector=address, world_size=1)
    link = SocketLink(header, "here")
    shipments = {LIVES[0]: Shipment(run_folder, LIVES[0])}
    link.exchange(shipments, 0.0, JobState.UNKNOWN)  # nobody listens
    intake = Intake(header.out, [address], world_size=1)

    def told() -> tuple[int, int]:
        """Streams that the collector knows of, and how many the relay said it holds."""
        link.exchange(shipments, 0.0, JobState.UNKNOWN)
        intake.work(0.01)
        return len(intake.streams()), sum(peer.held for peer in intake.peers())

    try:
        assert wait_until(lambda: told() == (1, 1)), told()
        shipments[LIVES[1]] = Shipment(run_folder, LIVES[1])
        seen = {told() for _ in range(100)}
        assert (2, 2) in seen
        assert (2, 1) not in seen
    finally:
        link.close()
        intake.close()
        for shipment in shipments.values():
            shipment.reader.close()
