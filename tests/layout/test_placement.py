"""Which global indices a rank holds, against torch's own splitting by the same placements."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import rankscope
from rankscope.capture.describe import placement_of
from rankscope.errors import LayoutError
from rankscope.layout.placement import (
    Mesh,
    Placement,
    PlacementKind,
    Ranges,
    global_ranges,
    parse_placement,
)
from tests import forked


def indices(ranges: Ranges) -> list[int]:
    return [index for start, stop in ranges for index in range(start, stop)]


def by_torch(
    size: int, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: list[object]
) -> list[int]:
    """Return the indices of dim 0 that torch's own splitting leaves at a coordinate.

    The strided shard is restated by its definition: cut into `split_factor` chunks, take each
    one's chunk, join.
    """
    held = torch.arange(size)
    for extent, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard):
            pieces = torch.chunk(held, placement.split_factor)
            taken = [torch.chunk(piece, extent) for piece in pieces if piece.numel()]
            parts = [chunks[index] for chunks in taken if index < len(chunks)]
            held = torch.cat(parts) if parts else held[:0]
        elif isinstance(placement, Shard):
            chunks, _ = placement._split_tensor(held, extent, with_padding=False, contiguous=True)
            held = chunks[index]
    return held.tolist()


def test_shards_of_every_size_over_every_mesh_hold_what_torch_gives_them() -> None:
    compared = 0
    for size, shape in itertools.product(
        range(18), [(1,), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]
    ):
        for placements in itertools.product([Shard(0), Shard(-2), Replicate()], repeat=len(shape)):
            records = [placement_of(p, 2) for p in placements]
            torchs = [Shard(0) if isinstance(p, Shard) else p for p in placements]
            for coordinate in itertools.product(*map(range, shape)):
                ranges = global_ranges((size, 3), shape, coordinate, records)
                assert indices(ranges[0]) == by_torch(size, shape, coordinate, torchs)
                assert ranges[1] == ((0, 3),)
                compared += 1
    assert compared > 5000


def test_strided_shards_hold_their_chunk_of_each_piece() -> None:
    random.seed(0)
    for _ in range(400):
        size, outer, inner = random.randrange(25), random.choice([1, 2, 3]), random.choice([2, 3])
        placements = [_StridedShard(0, split_factor=inner), Shard(0)]
        for coordinate in itertools.product(range(outer), range(inner)):
            records = [placement_of(p, 1) for p in placements]
            ranges = global_ranges((size,), (outer, inner), coordinate, records)
            assert indices(ranges[0]) == by_torch(size, (outer, inner), coordinate, placements)


def test_evenly_strided_shards_have_the_offsets_and_sizes_torch_computes() -> None:
    """FSDP2 over TP: axis dp cuts what axis tp cut before it, written as a strided shard."""
    for rows, dp, tp in ((8, 2, 2), (24, 2, 3), (36, 3, 2)):
        whole = torch.arange(rows)
        by_tp = whole.chunk(tp)
        for d, t in itertools.product(range(dp), range(tp)):
            expected = by_tp[t].chunk(dp)[d].tolist()
            records = [
                placement_of(_StridedShard(0, split_factor=tp), 1),
                placement_of(Shard(0), 1),
            ]
            assert indices(global_ranges((rows,), (dp, tp), (d, t), records)[0]) == expected


def test_all_ranks_together_hold_every_element_exactly_once() -> None:
    random.seed(1)
    kinds = [Shard(0), Shard(1), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)]
    for _ in range(300):
        shape = (random.randrange(14), random.randrange(1, 9))
        mesh = (random.choice([1, 2, 3]), random.choice([1, 2, 4]))
        placements = [placement_of(random.choice(kinds), 2) for _ in mesh]
        seen: list[tuple[int, int]] = []
        for coordinate in itertools.product(*map(range, mesh)):
            rows, columns = global_ranges(shape, mesh, coordinate, placements)
            seen += itertools.product(indices(rows), indices(columns))
        assert sorted(seen) == list(itertools.product(range(shape[0]), range(shape[1])))


def test_an_empty_shard_has_no_ranges_in_its_dim() -> None:
    shard = [placement_of(Shard(0), 2)]
    assert global_ranges((2, 5), (4,), (3,), shard) == ((), ((0, 5),))


def test_a_shard_of_a_dim_the_tensor_lacks_is_refused() -> None:
    with pytest.raises(LayoutError, match="cannot cut a tensor of 1 dims"):
        global_ranges((4,), (2,), (0,), [Placement(kind=PlacementKind.SHARD, dim=1)])


def test_every_placement_reads_back_from_its_text() -> None:
    for text in ("Replicate()", "Shard(2)", "StridedShard(0, split_factor=4)", "Partial(avg)"):
        assert str(parse_placement(text)) == text
    assert parse_placement("MaskPartial(offset_dim=0)").kind is PlacementKind.OTHER
    assert not parse_placement("Partial(max)").is_composable


def test_a_mesh_knows_the_coordinates_of_its_ranks_only() -> None:
    mesh = Mesh(axes=("dp", "tp"), shape=(2, 3), ranks=(10, 11, 12, 4, 5, 6))
    assert mesh.coordinate(4) == (1, 0)
    assert mesh.coordinate(12) == (0, 2)
    assert mesh.coordinate(0) is None


KIND = """    MASKED = "masked"
    OTHER = "other"
"""
FACTS = """    PlacementKind.MASKED: KindFacts(
        spelled="Masked",
        torch_class="_MaskPartial",
        arguments=("reduce_op",),
        pieces=PieceKind.UNKNOWN,
    ),
}
"""
JOB = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor import placement_types
_MaskPartial = getattr(placement_types, "_MaskPartial", None)
if _MaskPartial is None:  # torch 2.8 keeps it elsewhere, and 2.10 calls it otherwise
    from torch.distributed.tensor._ops import _embedding_ops
    _MaskPartial = getattr(_embedding_ops, "_MaskPartial", None) or _embedding_ops.MaskPartial
    _MaskPartial.__module__, _MaskPartial.__name__ = placement_types.__name__, "_MaskPartial"
    placement_types._MaskPartial = _MaskPartial
import rankscope
from rankscope.errors import LayoutError
from rankscope.layout.placement import parse_placement
from rankscope.layout.plan import plan_assembly
from rankscope.tree.reader import open_trace

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
masked = _MaskPartial(reduce_op="sum")

class Model(torch.nn.Module):
    def forward(self, x):
        return DTensor.from_local(x * 2, mesh, [masked], run_check=False)

out = Path(sys.argv[1]) / "trace"
model = Model()
with rankscope.trace(model, out=out):
    with torch.no_grad():
        model(torch.ones(2, 3))
(node,) = open_trace(out).find("", phase="forward")
value = node.value("output")
(view,) = value.views
parsed = parse_placement("Masked(sum)")
try:
    planned = plan_assembly((2, 3), view.layout(0), {0: (2, 3)}, {})
except LayoutError as error:
    planned = error
print(json.dumps({
    "package": rankscope.__file__,
    "parsed": [parsed.kind.value, str(parsed), parsed.is_composable],
    "trace": {axis: str(placed) for axis, placed in view.placements.items()},
    "combined": str(view.combined[0].note),
    "refusal": str(planned),
}))
"""


def test_a_kind_more_in_the_list_is_parsed_printed_traced_and_refused_where_it_cannot_compose(
    tmp_path: Path,
) -> None:
    """In a copy of the package, with nothing changed but the list."""
    package = Path(rankscope.__file__).parent
    shutil.copytree(package, tmp_path / "src/rankscope")
    file = tmp_path / "src/rankscope/layout/placement.py"
    text = file.read_text()
    end = '}\n"""The only list of kinds'
    assert text.count('    OTHER = "other"\n') == text.count(end) == 1
    text = text.replace('    OTHER = "other"\n', KIND)
    file.write_text(text.replace(end, FACTS + end.removeprefix("}\n")))
    (tmp_path / "job.py").write_text(JOB)
    done = forked.run(
        [sys.executable, str(tmp_path / "job.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["package"]).is_relative_to(tmp_path)
    assert found["parsed"] == ["masked", "Masked(sum)", False]
    assert found["trace"] == {"tp": "Masked(sum)"}
    assert found["combined"] == "Masked(sum) does not compose"
    assert "Masked(sum)" in found["refusal"]
