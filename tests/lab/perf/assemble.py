"""How fast records become a trace, and what a large one costs: prints figures, asserts nothing.

    python -m tests.lab.perf.assemble [--ranks 256] [--modules 2000] [--values 3] [--steps 1]

The streams are made without the spool writer (it would take longer than what is measured): cells
with valid crcs, one template of a rank's records with that rank's numbers in it. Besides
the large job there is a small one of many calls: one rank, 10,000 modules, 5 steps, no values.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np

from rankscope.record.ranks import StreamId
from rankscope.spool import recordformat
from rankscope.spool.recordformat import RecordKind, StepEvent
from rankscope.spool.replicas import cell_crcs
from rankscope.tree.assembly.rankstreams import StreamBytes, read_stream
from rankscope.tree.build import assemble, write_trace
from rankscope.tree.reader import open_trace


def definition(**fields: object) -> bytes:
    packed = msgpack.packb(fields)
    return recordformat.DEFINITION_LENGTH.pack(len(packed)) + packed


def cells_of(kind: RecordKind, payload: bytes) -> np.ndarray:
    count = -(-len(payload) // recordformat.PAYLOAD_BYTES)
    made = np.zeros((count, recordformat.CELL_BYTES), np.uint8)
    made[:, 4] = kind
    made[0, 5] = recordformat.FIRST
    left = np.arange(count - 1, -1, -1, dtype="<u2")
    made[:, 6:8] = left.view(np.uint8).reshape(-1, 2)
    padded = payload.ljust(count * recordformat.PAYLOAD_BYTES, b"\0")
    made[:, 8:] = np.frombuffer(padded, np.uint8).reshape(count, -1)
    return made


def rank_cells(
    rank: int, ranks: int, modules: int, values: int, *,
    steps: int = 1, first_step: int = 0, are_replicas: bool = True, is_running: bool = False,
) -> np.ndarray:  # fmt: skip
    """Traced forwards of a flat model of `modules` modules, `values` sharded values each; without
    `are_replicas` every rank has numbers of its own, which no writer can fold or compress away.
    `is_running`: what a rank that trains on has written of these steps, behind those before."""
    parts = [
        definition(
            id=1,
            kind="rank",
            format=1,
            run_id="perf",
            rank=rank,
            world_size=ranks,
            local_rank=rank % 8,
            local_world_size=8,
            incarnation=0,
            host=f"h{rank // 8}",
            pid=1,
            wall_ns=10**18,
            monotonic_ns=0,
        ),
        definition(id=2, kind="root", **{"class": "Model"}, parameters=10**9, has_parameters=True),
        definition(
            id=3,
            kind="mesh",
            axes=["dp", "tp"],
            shape=[ranks // min(ranks, 8), min(ranks, 8)],
            ranks=list(range(ranks)),
            device="cuda",
        ),
        definition(
            id=4,
            kind="meta",
            dtype="bfloat16",
            device="cuda:0",
            shape=[4, 64, 512],
            global_shape=[4, 64, 4096],
            source="dtensor",
            mesh=3,
            placements=["Replicate()", "Shard(2)"],
            note=None,
            requires_grad=True,
            ranges=[[[0, 4]], [[0, 64]], [[rank % 8 * 512, rank % 8 * 512 + 512]]],
        ),
        *(definition(id=5 + i, kind="slot", name=f"output.{i}") for i in range(values)),
        *(
            definition(
                id=5 + values + m,
                kind="module",
                root=2,
                path="" if m == 0 else f"layers.{m // 20}.part{m}",
                raw_path="" if m == 0 else f"layers.{m // 20}.part{m}",
                **{"class": "Linear"},
                wrappers=[],
                opaque=False,
            )
            for m in range(modules)
        ),
    ]
    made = [cells_of(RecordKind.DEFINITION, part) for part in parts]
    if is_running:
        made = [] if first_step else made
        made.append(step_event(StepEvent.BEGIN, first_step))
    calls = modules * steps
    first = first_step * modules if is_running else 0
    enters = np.zeros(calls, recordformat.ENTER_DTYPE)
    enters["sequence"] = np.arange(calls) + first
    enters["parent"] = np.arange(calls) // modules * modules + first
    enters["parent"][::modules] = recordformat.NO_SEQUENCE
    enters["time_ns"] = np.arange(calls) * 1000
    enters["module"] = np.arange(calls) % modules + 5 + values
    enters["step"] = np.arange(calls) // modules + first_step
    enters["phase"] = 1
    enters["root"] = 2
    exits = np.zeros(calls, recordformat.EXIT_DTYPE)
    exits["sequence"], exits["time_ns"] = enters["sequence"], enters["time_ns"] + 500
    rows = np.zeros(calls * values, recordformat.VALUE_DTYPE)
    rows["sequence"] = np.repeat(enters["sequence"], values)
    rows["time_ns"] = np.repeat(enters["time_ns"], values) + np.tile(np.arange(values), calls) * 10
    rows["slot"] = np.tile(np.arange(values) + 5, calls)
    rows["meta"], rows["phase"], rows["count"] = 4, 1, 4 * 64 * 512
    random = np.random.default_rng([rank % 8 if are_replicas else rank, first_step])
    rows["hash"] = random.integers(0, 1 << 63, len(rows))
    for name in ("min", "max", "mean", "std", "l2"):
        rows[name] = random.normal(size=len(rows))
    rows["sketch"] = random.normal(size=(len(rows), 8))
    made += [
        wide(RecordKind.ENTER, enters),
        wide(RecordKind.VALUE, rows),
        wide(RecordKind.EXIT, exits),
    ]
    ended = recordformat.END.pack(10**9, calls * (2 + values), 0, 0, 0)
    made.append(
        step_event(StepEvent.END, first_step + steps - 1)
        if is_running
        else cells_of(RecordKind.END, ended)
    )
    whole = np.concatenate(made)
    whole[:, :4] = cell_crcs(whole).astype("<u4").view(np.uint8).reshape(-1, 4)
    return whole.reshape(-1)


def step_event(event: StepEvent, step: int) -> np.ndarray:
    return cells_of(RecordKind.STEP, recordformat.STEP.pack(step, step, 0, event, 0))


def wide(kind: RecordKind, rows: np.ndarray) -> np.ndarray:
    count = -(-rows.dtype.itemsize // recordformat.PAYLOAD_BYTES)
    made = np.zeros((len(rows), count, recordformat.CELL_BYTES), np.uint8)
    made[:, :, 4] = kind
    made[:, 0, 5] = recordformat.FIRST
    made[:, :, 6] = np.arange(count - 1, -1, -1)
    body = np.zeros((len(rows), count * recordformat.PAYLOAD_BYTES), np.uint8)
    body[:, : rows.dtype.itemsize] = rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)
    made[:, :, 8:] = body.reshape(len(rows), count, recordformat.PAYLOAD_BYTES)
    return made.reshape(-1, recordformat.CELL_BYTES)


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def many_small_calls(folder: Path) -> None:
    """Print what a node costs that holds no values."""
    data = rank_cells(0, 1, 10_000, 0, steps=5)
    folder.mkdir()
    begin = time.process_time()
    document = assemble([StreamBytes(stream=StreamId(rank=0, incarnation=0), data=data)])
    assembled_s = time.process_time() - begin
    write_trace(document, folder)
    taken_s = time.process_time() - begin
    print(
        f"50,000 nodes         {taken_s:6.2f} s  {taken_s / 50_000 * 1e6:.1f} us a node, "
        f"{assembled_s / 50_000 * 1e6:.1f} of them to assemble"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--modules", type=int, default=2000)
    parser.add_argument("--values", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1)
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rankscope-perf-"))
    try:
        for rank in range(chosen.ranks):
            made = rank_cells(rank, chosen.ranks, chosen.modules, chosen.values, steps=chosen.steps)
            made.tofile(folder / f"{rank}.cells")

        def sources() -> Iterator[StreamBytes]:
            """Yield the streams, mapped anew: nobody else holds the maps."""
            for rank in range(chosen.ranks):
                data = np.memmap(folder / f"{rank}.cells", np.uint8, "r")
                yield StreamBytes(stream=StreamId(rank=rank, incarnation=0), data=data)

        what = f"{chosen.ranks} ranks x {chosen.modules} modules x {chosen.values} values"
        print(f"{what}; peak so far {peak_gib():.2f} GiB")
        begin = time.process_time()
        decoded: dict = {}
        streams = (read_stream(source, decoded) for source in sources())
        count = sum(len(s.enters) + len(s.exits) + len(s.values) for s in streams)
        columns_s = time.process_time() - begin
        print("CPU seconds of one core:")
        print(f"records to columns   {columns_s:6.2f} s  {count / columns_s / 1e6:.2f} M records/s")
        begin = time.process_time()
        document = assemble(sources())
        assembled_s = time.process_time() - begin
        print(f"assembled            {assembled_s:6.2f} s  {count / 1e6:.2f} M records")
        written = time.process_time()
        (folder / "out").mkdir()
        write_trace(document, folder / "out")
        print(f"written              {time.process_time() - written:6.2f} s")
        print(
            f"records to trace     {time.process_time() - begin:6.2f} s, peak {peak_gib():.2f} GiB"
        )
        begin = time.process_time()
        nodes = sum(1 for _ in open_trace(folder / "out").walk())
        print(f"opened and walked    {time.process_time() - begin:6.2f} s, {nodes} nodes")
        sizes = {
            str(p.relative_to(folder / "out")): p.stat().st_size
            for p in sorted((folder / "out").rglob("*"))
            if p.is_file()
        }
        many_small_calls(folder / "small")
        print(", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items()))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
