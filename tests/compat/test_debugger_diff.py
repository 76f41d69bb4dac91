"""`rankscope diff` of two folders that a module debugger wrote: a port beside its reference, whose
modules have other names.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankscope
from tests.cli.test_commands import rankscope as command
from tests.compat import debugger_ranks_job as job
from tests.compat.debugger_files import needs_transformers, ours, restored, theirs
from tests.compat.debugger_models import MODELS, made
from tests.distributed.pool import RankPool

RULES = [
    r"--map=^transformer\.h\.(\d+)\.ffn\.fc1$=model.layers.\1.mlp.up",
    r"--map=^transformer\.h\.(\d+)\.ffn\.fc2$=model.layers.\1.mlp.down",
    r"--map=^transformer\.h\.(\d+)\.ffn=model.layers.\1.mlp",
    r"--map=^transformer\.h\.(\d+)\.ln=model.layers.\1.norm",
    r"--map=^transformer\.h=model.layers",
    r"--map=^transformer\.wte=model.embed",
    r"--map=^transformer=model",
    r"--map=^score=head",
]
SIZE = 32
PRINTED = "as they were printed"


class Mlp(nn.Module):
    """Hands out a tuple with a dict in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(SIZE, 2 * SIZE)
        self.down = nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        wide = self.up(x).relu()
        return self.down(wide), {"gate": wide > 0}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))[0]


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class Reference(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.model = Layers(count)
        self.head = nn.Linear(SIZE, 7)

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.model(tokens)) * scale}


class PortFfn(nn.Module):
    """The same sums in another order, so that every value is off by roundings."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = PortLinear(SIZE, 2 * SIZE), PortLinear(2 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        wide = self.fc1(x).clamp(min=0)
        return self.fc2(wide), {"gate": wide > 0}


class PortLinear(nn.Linear):
    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.in_features // 2
        first = x[..., :half] @ self.weight[:, :half].T
        return (x[..., half:] @ self.weight[:, half:].T + first) * self.factor + self.bias


class PortBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(SIZE)
        self.ffn = PortFfn()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ffn(self.ln(x))[0] + x


class PortTransformer(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, SIZE)
        self.h = nn.ModuleList(PortBlock() for _ in range(count))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return x


class Port(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.transformer = PortTransformer(count)
        self.score = PortLinear(SIZE, 7)

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.score(self.transformer(tokens)) * scale}


Break = Callable[[Port], None]


def right(port: Port) -> None:
    pass


def scaled(port: Port) -> None:
    port.transformer.h[1].ffn.fc2.factor = 0.5


def moved(port: Port) -> None:
    """Rows of a weight in another order, as a conversion script mixes up heads."""
    weight = port.transformer.h[2].ffn.fc1.weight
    weight.data = weight.data.roll(1, 0)


def pair(
    folder: Path, change: Break = right, dtype: torch.dtype = torch.float32, **flags: Any
) -> tuple[Path, Path]:
    """Write the files of a reference and of its port, with the same weights and tokens."""
    torch.manual_seed(3)
    flags = {"do_prune_layers": False, "use_repr": False, **flags}
    reference, port = Reference().eval(), Port().eval()
    own, others = reference.state_dict(), [*port.state_dict()]
    port.load_state_dict(dict(zip(others, own.values(), strict=True)))
    change(port)
    tokens, scale = torch.randint(50, (2, 6)), torch.tensor(2.0)
    for name, model in (("ref", reference), ("port", port.to(dtype))):
        with ours(model, folder / name, **flags):
            model(tokens, scale=scale)
    return folder / "ref", folder / "port"


def differ(*words: object) -> tuple[int, dict[str, Any]]:
    code, text, errors = command("diff", *words, "--json")
    assert not errors or code == 2, errors
    return code, json.loads(text)["result"]


@pytest.fixture(autouse=True)
def lines_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")


def told(*words: object) -> tuple[int, list[str]]:
    code, text, errors = command("diff", *words)
    return code, (text or errors).splitlines()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_port_is_clean_by_the_bytes_of_every_value(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    code, report = differ(*pair(tmp_path, dtype=dtype), *RULES)
    assert (code, report["verdict"], report["findings"]) == (0, "clean", [])
    assert report["compared"] == report["recorded"] > 30
    lines = {line["what"]: line["same"] for line in report["preflight"]}
    assert lines["start"] is lines["versions"] is None
    assert lines["dtypes"] is (dtype is torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_module_that_leaves_the_reference_is_named_with_how_much(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folders = pair(tmp_path, scaled, dtype)
    code, report = differ(*folders, *RULES)
    first, *more = report["findings"]
    assert (code, report["verdict"], more) == (1, "fault", [])
    assert (first["path"], first["slot"]) == ("transformer.h.1.ffn.fc2", "output")
    assert first["evidence"]["ref_path"] == "model.layers.1.mlp.down"
    assert first["evidence"]["measured"] == "full tensors"
    code, lines = told(*folders, *RULES)
    assert code == 1
    assert lines[0].startswith(f"fault: {first['kind']}, 1 origin (")
    assert "  first: transformer.h.1.ffn.fc2:output: the value " in lines[2]


def test_parts_of_a_weight_in_another_order_are_told_where_they_are_used(tmp_path: Path) -> None:
    code, report = differ(*pair(tmp_path, moved), *RULES)
    first, *more = report["findings"]
    assert (code, more) == (1, [])
    assert (first["path"], first["slot"]) == ("transformer.h.2.ffn.fc1", "output")
    assert first["evidence"]["inputs"] != "equal" if "inputs" in first["evidence"] else True


def test_without_the_rules_nothing_is_guessed_and_a_rule_is_asked_for(tmp_path: Path) -> None:
    code, report = differ(*pair(tmp_path))
    assert (code, report["verdict"]) == (1, "incomplete")
    code, lines = told(*pair(tmp_path))
    assert "have no partner in TEST" in lines[0] and "--map" in lines[0]


def test_printed_values_are_compared_by_their_statistics_and_called_nothing_else(
    tmp_path: Path,
) -> None:
    folders = pair(tmp_path, use_repr=True)
    code, report = differ(*folders, *RULES)
    assert (code, report["verdict"], report["findings"]) == (0, "clean", [])
    (note,) = (note for note in report["notes"] if PRINTED in note)
    assert note.startswith(
        f"no element of {report['compared']} values was compared: only mean, std"
    )
    assert note.endswith(", to 4 digits")
    assert {each["reason"] for each in report["skipped"]} == {"not digested: it was printed"}
    code, lines = told(*folders, *RULES)
    assert code == 0
    assert not any(re.search("[1-9] more agree|: [1-9]\\d* of", line) for line in lines)
    code, report = differ(*folders, *RULES, "--exact")
    assert (code, report["verdict"], report["compared"]) == (1, "incomplete", 0)


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


def test_each_forward_is_compared_with_that_of_its_number_and_one_file_with_one_other(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    inputs = [torch.randn(2, 4) for _ in range(3)]
    for name, order in (("a", (0, 1, 2)), ("b", (0, 1, 2)), ("c", (2,))):
        with ours(model, tmp_path / name, use_repr=False):
            for number in order:
                model(inputs[number])
    code, report = differ(tmp_path / "a", tmp_path / "b")
    assert (code, report["compared"]) == (0, 3 * 5)
    last = tmp_path / "a/Sequential_debug_tree_2_FULL_TENSORS.json"
    code, report = differ(last, tmp_path / "c")
    assert (code, report["compared"]) == (0, 5)
    code, report = differ(tmp_path / "a", tmp_path / "c")
    assert (code, report["findings"][0]["slot"]) == (1, "input.0")


def test_a_forward_that_raised_leaves_no_clean_verdict(tmp_path: Path) -> None:
    model = job.net()
    for name, fails in (("a", False), ("b", True)):
        with ours(model, tmp_path / name, use_repr=False):
            try:
                model(job.batch(0), fails=fails)
            except ValueError:
                assert fails
    code, lines = told(tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert lines[0].startswith("incomplete: TEST broke off (rank 0 raised)")


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


# ---- bad input ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return pair(tmp_path_factory.mktemp("pair"))


def refused(*words: object) -> str:
    code, lines = told(*words)
    assert code == 2
    return "\n".join(lines)


def test_a_trace_and_files_of_a_debugger_are_refused_with_how_to_make_them_alike(
    tmp_path: Path, folders: tuple[Path, Path]
) -> None:
    model = nn.Linear(2, 2)
    with rankscope.trace(model, out=tmp_path / "trace"):
        model(torch.ones(1, 2))
    for words in ((folders[0], tmp_path / "trace"), (tmp_path / "trace", folders[0])):
        text = refused(*words)
        assert f"{tmp_path / 'trace'} holds no *_FULL_TENSORS.json" in text
        assert f"rankscope export {tmp_path / 'trace'} --out FOLDER --format hf makes" in text
    (tmp_path / "empty").mkdir()
    assert "empty holds no *_FULL_TENSORS.json" in refused(folders[0], tmp_path / "empty")
    assert f"{tmp_path / 'nowhere'}: no such folder" in refused(folders[0], tmp_path / "nowhere")
    assert "is empty: nothing has been traced" in refused(tmp_path / "empty", tmp_path / "empty")


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
