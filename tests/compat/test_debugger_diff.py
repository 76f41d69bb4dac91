"""`rankscope diff` of two folders that a module debugger wrote: a port beside its reference, whose
modules have other names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rankscope
from tests.cli.test_commands import rankscope as command
from tests.compat.debugger_files import ours
from tests.lab.compat import debugger_ranks_job as job

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
