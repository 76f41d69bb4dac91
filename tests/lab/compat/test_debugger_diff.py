"""`rankscope diff` of folders that a module debugger wrote: theirs beside ours, and odd ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.compat.debugger_files import needs_transformers, ours, restored, theirs
from tests.compat.test_debugger_diff import (
    PRINTED,
    RULES,
    Port,
    differ,
    pair,
    refused,
    scaled,
)
from tests.compat.test_debugger_diff import folders as folders
from tests.compat.test_debugger_diff import lines_of_any_length as lines_of_any_length
from tests.distributed.pool import RankPool
from tests.lab.compat import debugger_ranks_job as job
from tests.lab.compat.debugger_models import MODELS, made


@pytest.mark.parametrize("sides", [(True, True), (False, True), (True, False)])
def test_a_fault_is_seen_in_printed_values_too(tmp_path: Path, sides: tuple[bool, bool]) -> None:
    ref = pair(tmp_path / "a", scaled, use_repr=sides[0])[0]
    port = pair(tmp_path / "b", scaled, use_repr=sides[1])[1]
    code, report = differ(ref, port, *RULES)
    first, *more = report["findings"]
    assert (code, report["verdict"], more) == (1, "fault", [])
    assert (first["path"], first["slot"]) == ("transformer.h.1.ffn.fc2", "output")
    assert first["evidence"]["measured"] == "statistics"
    assert "relative error of at least" in first["message"]
    assert "by its statistics" in first["message"]
    assert "factor" not in first["evidence"]


def test_a_printed_nan_is_no_agreement_and_a_new_one_is_a_fault(tmp_path: Path) -> None:
    def poisoned(port: Port) -> None:
        port.score.bias.data[0] = torch.nan

    ref, port = pair(tmp_path, poisoned, use_repr=True)
    code, report = differ(ref, port, *RULES)
    assert code == 1
    first, *more = report["findings"]
    assert (first["kind"], first["path"], more) == ("nonfinite-origin", "score", [])
    code, report = differ(port, port)
    assert (code, report["findings"]) == (0, [])
    assert {"no sketches and no statistics tell how far it is off"} <= {
        each["reason"] for each in report["skipped"]
    }


def test_a_printed_value_of_another_shape_is_not_compared(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.shape, self.act = shape, nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x.reshape(self.shape))

    models = {name: Wide(shape) for name, shape in (("ref", (2, 6)), ("port", (3, 4)))}
    for name, model in models.items():
        with ours(model, tmp_path / name):
            model(torch.linspace(-1, 1, 12))
    _, report = differ(tmp_path / "ref", tmp_path / "port")
    assert report["findings"] == []
    assert {each["reason"]: each["count"] for each in report["skipped"]} == {
        "of another shape than the reference's, and known by statistics alone": 2
    }


@needs_transformers
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("name", [*MODELS])
def test_what_transformers_own_debugger_wrote_is_read_as_ours(
    tmp_path: Path, name: str, as_text: bool
) -> None:
    """Modules that are called twice (T5, ViT) name one file there, which holds the last call's."""
    model, call = made(name)
    for write, folder in ((theirs, "theirs"), (ours, "ours")):
        with write(model, tmp_path / folder, use_repr=as_text, do_prune_layers=False):
            call(model)
    restored()
    for ref, test in (("theirs", "ours"), ("ours", "theirs")):
        code, report = differ(tmp_path / ref, tmp_path / test)
        assert (code, report["verdict"], report["findings"]) == (0, "clean", [])
        assert report["unpaired"] == 0
        is_told = any(PRINTED in note for note in report["notes"])
        assert is_told is (as_text or name in ("t5", "vit"))
        if not as_text:
            assert not report["skipped"]


@needs_transformers
def test_a_wrong_constant_in_a_model_of_transformers_is_found_in_its_own_files(
    tmp_path: Path,
) -> None:
    model, call = made("llama")
    with theirs(model, tmp_path / "ref", use_repr=False):
        call(model)
    model.model.layers[3].post_attention_layernorm.variance_epsilon = 0.3  # type: ignore[union-attr]  # its class is not known here
    with theirs(model, tmp_path / "test", use_repr=False):
        call(model)
    restored()
    code, report = differ(tmp_path / "ref", tmp_path / "test")
    first, *more = report["findings"]
    assert (code, more) == (1, [])
    assert (first["path"], first["slot"]) == ("model.layers.3.post_attention_layernorm", "output")
    assert first["evidence"]["inputs"] == "equal"


def test_parts_of_a_sharded_model_are_never_held_to_whole_tensors(
    ranks: RankPool, tmp_path: Path
) -> None:
    flags = {"ranks": "all", "use_repr": False}
    ranks.run(job.debugged, "tp", str(tmp_path / "tp"), flags, world_size=2)
    ranks.run(job.debugged, "ddp", str(tmp_path / "one"), {"use_repr": False}, world_size=1)
    part = tmp_path / "tp/Net_debug_tree_rank1_FULL_TENSORS.json"
    code, report = differ(tmp_path / "one", part)
    assert (code, report["findings"], report["compared"]) == (0, [], 1)  # what went into `up`
    (skipped,) = report["skipped"]
    assert skipped["reason"] == (
        "not digested: it is one rank's part of a sharded tensor, or may be"
    )


def test_files_of_several_models_or_ranks_in_one_folder_have_to_be_told_apart(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    shutil.copytree(folders[0], tmp_path / "both")
    shutil.copytree(folders[1], tmp_path / "both", dirs_exist_ok=True)
    text = refused(folders[0], tmp_path / "both")
    assert "both: holds files of several models or ranks (Port, Reference)" in text
    assert "name one of its *_FULL_TENSORS.json" in text
    one = tmp_path / "both/Reference_debug_tree_FULL_TENSORS.json"
    assert differ(folders[0], one)[0] == 0
    for rank in (0, 1):
        name = f"Reference_debug_tree_rank{rank}_FULL_TENSORS.json"
        (tmp_path / "ranks").mkdir(exist_ok=True)
        shutil.copy(folders[0] / one.name, tmp_path / "ranks" / name)
    assert "(Reference of rank 0, Reference of rank 1)" in refused(folders[0], tmp_path / "ranks")


def test_a_tree_that_was_cut_and_a_tensor_that_is_not_there_are_named(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    shutil.copytree(folders[1], tmp_path / "cut")
    tree = tmp_path / "cut/Port_debug_tree_FULL_TENSORS.json"
    whole = tree.read_text()
    tensor = tmp_path / "cut/Port.score_outputs.safetensors"
    held = tensor.read_bytes()
    again = "copy the whole folder again, or let the debugger write it again"
    for text in (whole[: len(whole) // 2], "[]", '{"module_path": "Port", "inputs": 3}', "{}"):
        tree.write_text(text)
        found = refused(folders[0], tmp_path / "cut")
        assert tree.name in found and again in found
    tree.write_text(whole)
    tensor.write_bytes(held[:-8])
    found = refused(folders[0], tmp_path / "cut")
    assert tensor.name in found and again in found
    other = folders[1] / "Port.transformer.wte_outputs.safetensors"
    shutil.copy(other, tensor)
    found = refused(folders[0], tmp_path / "cut")
    assert "holds another tensor than float32[2, 6, 7]" in found
    tensor.unlink()
    found = refused(folders[0], tmp_path / "cut")
    assert f"{tensor.name}: is not there, and a tree names it" in found and again in found
