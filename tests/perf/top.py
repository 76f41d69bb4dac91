"""What a look of `rankscope top` costs with many ranks, after a short time and after a long one.

    python -m tests.perf.top [RANKS]

Every rank has the same records; the later ones are links to the first. The ratio says what a job
that ran ten times as long costs beside the short one: it should be 1 where both have more records
than the first look reads of a rank.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from rankscope.live.jobwatch import JobWatch
from rankscope.record.streams import StreamId
from rankscope.spool.replication import replica_path
from tests.live.test_streams import write_job
from tests.spool.streams import stream_bytes

_LOOKS = 10


def main(ranks: int) -> None:
    first, later, summed = [], [], []
    for steps in (400, 4000):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            write_job(out / "own", steps=steps)
            data = stream_bytes(out / "own")
            one = replica_path(out, StreamId(rank=0, incarnation=0))
            one.parent.mkdir()
            one.write_bytes(data)
            for rank in range(1, ranks):
                os.link(one, replica_path(out, StreamId(rank=rank, incarnation=0)))
            watch = JobWatch(out)
            began = time.process_time()
            watch.look()
            first.append(time.process_time() - began)
            began = time.process_time()
            for _ in range(_LOOKS):
                watch.look()
            later.append((time.process_time() - began) / _LOOKS)
            began = time.process_time()
            watch.ranks()
            summed.append(time.process_time() - began)
            print(f"{ranks} ranks with {len(data) / 1e6:.1f} MB of records each")
    for name, (short, long) in (("first look", first), ("look", later), ("ranks()", summed)):
        after = f"{long / short:5.2f} x after ten times as long"
        print(f"{name:<11} {after}; {long * 1e3:.0f} ms of a core")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 256)
