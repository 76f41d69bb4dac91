"""Full tensors kept by a rank: as they were, once, within their budget, and never in silence."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch

from rankscope.agent.values.tensorstore import free_disk_share
from rankscope.settings import settings_from
from rankscope.spool.chunks.chunkfiles import finish_chunks
from rankscope.spool.chunks.tensorfiles import standing_references
from rankscope.spool.chunks.writing import HEADER_BYTES
from tests.agent.keepers import STORED, STREAM, Rank, plainly, same, some


@pytest.mark.parametrize("as_if_on_device", [False, True], ids=["host", "device"])
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, as_if_on_device):
    rank = Rank(tmp_path, spool_bytes=8 << 20, memory=64 << 20)
    wanted = {}
    for dtype in STORED:
        base = some(dtype, 6, 8, 10)
        views = [
            base, base.T if base.dim() == 2 else base.transpose(0, 2), base[1:, ::2], base[2, 3, 4],
            base[:0], base[:1].expand(7, 8, 10), base.reshape(-1)[3:],
        ]  # fmt: skip
        for view in views:
            reference = rank.keep(view, as_if_on_device=as_if_on_device)
            assert reference
            wanted[reference] = view.clone()
    rank.keeper.collect()
    stored = rank.close()
    key_of = standing_references(np.array([*wanted], np.uint64), rank.recorded()[0])
    assert (key_of > 0).all()
    for key, tensor in zip(key_of.tolist(), wanted.values()):
        assert same(stored[key], tensor)
    assert rank.told == []


@pytest.mark.parametrize("as_if_on_device", [False, True], ids=["host", "device"])
def test_what_changes_or_is_freed_right_after_is_kept_as_it_was(tmp_path, as_if_on_device):
    rank = Rank(tmp_path, memory=64 << 20)
    wanted = {}
    for number in range(50):
        tensor = torch.full((1000 + number,), float(number))
        view = tensor[::2] if number % 3 == 0 else tensor
        reference = rank.keep(view, as_if_on_device=as_if_on_device)
        wanted[reference] = view.clone()
        if number % 2:
            tensor.fill_(float("nan"))
        else:
            tensor.untyped_storage().resize_(0)
        del tensor, view
        torch.full((1000 + number,), -1.0)  # where the freed one was, most likely
    stored = rank.close()
    assert all(same(stored[reference], tensor) for reference, tensor in wanted.items())


@pytest.mark.parametrize("as_if_on_device", [False, True], ids=["host", "device"])
def test_equal_bytes_are_stored_once_and_referred_to_twice(tmp_path, as_if_on_device):
    rank = Rank(tmp_path, spool_bytes=8 << 20)
    tensor = torch.randn(64, 64)
    first = rank.keep(tensor, as_if_on_device=as_if_on_device)
    others = [
        rank.keep(t, as_if_on_device=as_if_on_device)
        for t in (tensor, tensor.clone(), tensor.T.contiguous().T, tensor.detach().requires_grad_())
    ]
    different = [
        rank.keep(t, as_if_on_device=as_if_on_device)
        for t in (
            tensor.T, tensor.view(torch.int32), tensor.reshape(32, 128), tensor + 1, -tensor,
        )
    ]  # fmt: skip
    stored = rank.close()
    references = np.array([first, *others, *different], np.uint64)
    keys = standing_references(references, rank.recorded()[0]).tolist()
    assert keys[:5] == [first] * 5
    assert len({*keys}) == 6 == len(stored)
    assert same(stored[first], tensor)


@pytest.mark.parametrize(
    ("globs", "taken", "left"),
    [
        ("layers.0.**:output", [("layers.0.attn", "output")], [("layers.0.attn", "input.0")]),
        ("layers.*", [("layers.0", "input.0"), ("layers.1.fc", "grad:weight")], [("head", "x")]),
        ("**", [("", "output"), ("a.b", "param:weight")], []),
        ("a:param:*", [("a", "param:weight")], [("a", "output"), ("a:param", "x")]),
        (":output", [("", "output")], [("a", "output"), ("", "input.0")]),
        ("a:output,b:input.*", [("a", "output"), ("b", "input.1")], [("a", "input.1")]),
    ],
)
def test_globs_are_split_at_their_first_colon(tmp_path, globs, taken, left):
    settings = settings_from({"tensors": globs}, {})
    assert settings.tensors is not None
    rank = Rank(tmp_path, settings.tensors)
    for _ in range(2):
        assert all(rank.keeper.wants(path, slot) for path, slot in taken)
        assert not any(rank.keeper.wants(path, slot) for path, slot in left)


def test_no_name_out_of_a_model_becomes_a_key_or_a_file_name(tmp_path):
    rank = Rank(tmp_path)
    for number, name in enumerate(("a/b", "../../x", "\0", "__metadata__", "a:b", '"'), 1):
        assert rank.keeper.wants(name, f"param:{name}")
        assert rank.keep(torch.full((3,), float(number))) == number
    assert sorted(rank.close()) == [1, 2, 3, 4, 5, 6]
    names = [p.relative_to(tmp_path / "tensors").as_posix() for p in rank.folder.rglob("*")]
    assert names == ["rank00000/000001.safetensors"]


def test_by_default_nothing_is_kept_and_the_settings_say_how_much_may_be():
    settings = settings_from({}, {})
    assert settings.tensors is None and settings.tensor_budget is None
    assert settings.tensor_memory == 256 << 20
    chosen = settings_from({"tensor_budget": "3G"}, {"RANKSCOPE_TENSORS": "a, b:output"})
    assert chosen.tensors == ("a", "b:output") and chosen.tensor_budget == 3 << 30
    again = settings_from({k.replace("-", "_"): v for k, v in chosen.as_text().items()}, {})
    assert again == chosen


def test_the_default_budget_is_a_share_of_half_the_free_disk(tmp_path):
    found = os.statvfs(tmp_path)
    free = found.f_bavail * found.f_frsize
    for writers in (0, 1, 8):
        share = free_disk_share(tmp_path / "not" / "there", writers)
        assert share * max(writers, 1) == pytest.approx(free / 2, rel=0.2)


# ------------------------------------------------------------------ not kept


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_stored_is_left_out_with_its_reason_and_counted(tmp_path):
    rank = Rank(tmp_path)
    for _ in range(2):
        assert rank.keep(torch.ones(8, dtype=torch.complex128)) == 0
        assert rank.keep(torch.ones(3, 3).to_sparse()) == 0
        assert rank.keep(torch.ones(3, device="meta")) == 0
        assert rank.keep(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)) == 0
        assert rank.keep(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])) == 0
    assert len(rank.told) == 5  # once each
    assert rank.keep(torch.ones(2)) == 1
    assert sorted(rank.close()) == [1]
    said = "\n".join(rank.told[5:])
    assert "2 tensors (0.0 MB) were not kept: complex128: safetensors knows no complex128" in said
    for word in ("sparse", "meta", "quantized"):
        assert word in said


@pytest.mark.parametrize("as_if_on_device", [False, True], ids=["host", "device"])
def test_a_used_up_budget_is_said_once_and_what_fits_is_still_kept(tmp_path, as_if_on_device):
    rank = Rank(tmp_path, budget=HEADER_BYTES + 8 + 10_000)
    references = [
        rank.keep(torch.full((1000,), float(n)), as_if_on_device=as_if_on_device) for n in range(5)
    ]
    references.append(rank.keep(torch.ones(20), as_if_on_device=as_if_on_device))
    stored = rank.close()
    keys = standing_references(np.array(references, np.uint64), rank.recorded()[0])
    assert [key > 0 for key in keys.tolist()] == [True, True, False, False, False, True]
    assert sorted(stored) == sorted(key for key in keys.tolist() if key)
    assert sum("--rs-tensor-budget" in line for line in rank.told) == 2  # first time, and the sum
    assert rank.told[-1].startswith("3 tensors (0.0 MB)")
    assert sum(path.stat().st_size for path in rank.folder.iterdir()) <= HEADER_BYTES + 8 + 10_000


def test_trouble_with_the_disk_is_said_once_and_everything_before_stays(tmp_path):
    rank = Rank(tmp_path, chunk_tensors=3)
    assert [rank.keep(torch.full((3,), float(n))) for n in range(3)] == [1, 2, 3]
    (rank.folder / "000002.safetensors").write_text("somebody else's")
    assert [rank.keep(torch.full((3,), float(n))) for n in range(3, 8)] == [0] * 5
    assert rank.keep(torch.full((3,), 1.0)) == 0  # even what is stored: nothing is looked up
    (rank.folder / "000002.safetensors").unlink()
    assert sorted(rank.close()) == [1, 2, 3]
    assert len(rank.told) == 2 and "File exists" in rank.told[0]


def test_without_room_for_its_record_a_tensor_is_not_kept(tmp_path):
    rank = Rank(tmp_path, spool_bytes=64 << 10)
    references = [rank.keep(torch.full((3,), float(n))) for n in range(2000)]
    kept = [n for n, reference in enumerate(references) if reference]
    assert 100 < len(kept) < 2000
    assert any("--rs-spool-bytes" in line for line in rank.told)
    stored = rank.close()
    assert sorted(stored) == sorted(references[n] for n in kept)
    assert all(stored[references[n]][0] == n for n in kept)
    assert len(rank.recorded()[0]) == len(kept)


# ------------------------------------------------------------------ life


def test_a_killed_ranks_tensors_are_all_found_through_its_records(tmp_path):
    rank = Rank(tmp_path, chunk_tensors=7)
    wanted = {rank.keep(t): t for t in (torch.full((n,), float(n)) for n in range(1, 20))}
    tensors, definitions = rank.recorded()
    # what a kill leaves; a copy, because the original is still locked by its rank
    left = tmp_path / "left"
    shutil.copytree(rank.folder, left)
    reports = finish_chunks(left, STREAM, tensors, definitions)
    assert [not r.note for r in reports] == [True, True, False]
    stored = dict(plainly(left))
    assert stored.keys() == wanted.keys()
    assert all(same(tensor, wanted[reference]) for reference, tensor in stored.items())


def test_closing_keeps_no_tensor_alive_and_closing_again_does_nothing(tmp_path):
    rank = Rank(tmp_path)
    rank.keep(torch.ones(3), as_if_on_device=True)
    rank.keep(torch.ones(4))
    rank.close()
    rank.keeper.close()
    assert rank.keep(torch.ones(5)) == 0
    assert not rank.keeper._staging and not rank.keeper._staged
    assert sorted(dict(plainly(rank.folder))) == [1, 2]
