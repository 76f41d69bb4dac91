"""`rankscope tensor` on traces of one process: what is listed, handed out, and said."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import rankscope
from rankscope.errors import SelectionError
from rankscope.tree.views import Trace
from tests.cli.test_commands import rankscope as command


class Net(nn.Module):
    """A module that runs twice, two outputs, and one that safetensors does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.twice, self.pair = nn.Linear(4, 4), nn.Linear(4, 4), Pair()
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(self.fc(x)))
        return self.pair(x)["real"]


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"real": x.bfloat16(), "wide": torch.complex(x, x).to(torch.complex128)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, dict[str, list[torch.Tensor]]]:
    torch.manual_seed(0)
    model, seen = Net(), {"fc": [], "twice": [], "pair": [], "param": []}
    for name in ("fc", "twice"):
        getattr(model, name).register_forward_hook(
            lambda _m, _a, out, kept=seen[name]: kept.append(out.detach().clone())
        )
    model.pair.register_forward_hook(
        lambda _m, _a, out: seen["pair"].append(out["real"].detach().clone())
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = tmp_path_factory.mktemp("tensor") / "trace"
    with rankscope.trace(out=out, tensors="fc,fc:*,twice:output,pair:**,:buffer:*") as handle:
        for _ in range(2):
            for _ in range(2):
                model(torch.randn(3, 4)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen["param"].append(model.fc.weight.detach().clone())
    return handle.open(), seen


def numbers(trace: Trace, out: Path, *words: str) -> dict[str, torch.Tensor]:
    code, text, errors = command("tensor", trace.path, *words, "--out", out, "--force")
    assert code == 0, errors
    assert str(out) in text
    return load_file(out)


def test_without_a_name_everything_is_listed_with_its_size(made):
    trace, _ = made
    code, text, errors = command("tensor", trace.path)
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert (code, errors) == (0, "")
    assert rows["fc:output"][1:] == ["float32", "3x4", "0", "4", "192", "B"]
    assert rows["twice:output"][-3] == "8"
    assert rows["fc:param:weight (setup)"][-3] == "1" and rows["fc:param:weight"][-3] == "2"
    assert rows["pair:output.real"][1] == "bfloat16"
    assert rows["pair:output.wide"][1:] == [
        "complex128",
        "none",
        "(not",
        "all",
        "of",
        "0)",
        "0",
        "0",
        "B",
    ]
    assert "twice:param:weight" not in text
    assert "equal ones of a rank are stored once" in text.splitlines()[-1]
    code, text, _ = command("tensor", trace.path, "fc:output")
    assert code == 0 and [line.split()[0] for line in text.splitlines()[1:-1]] == ["fc:output"]


def test_names_give_the_values_of_their_call_under_the_names_as_asked(made, tmp_path):
    trace, seen = made
    found = numbers(trace, tmp_path / "a", "fc:output", "fc:param:weight")
    assert [*found] == ["fc:output", "fc:param:weight"]
    assert found["fc:output"].equal(seen["fc"][0])
    assert found["fc:param:weight"].equal(seen["param"][0])
    for words, place in ((["--micro-batch", "1"], 1), (["--step", "1"], 2)):
        assert numbers(trace, tmp_path / "a", "fc:output", *words)["fc:output"].equal(
            seen["fc"][place]
        )
    later = numbers(trace, tmp_path / "a", "fc:param:weight", "--step", "1")
    assert later["fc:param:weight"].equal(seen["param"][1]), "--force replaces it"
    second = numbers(trace, tmp_path / "a", "twice:output", "--ordinal", "1")
    assert second["twice:output"].equal(seen["twice"][1])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_globs_and_kinds_take_all_they_mean_and_say_what_they_leave_out(made, tmp_path):
    trace, seen = made
    code, _, errors = command("tensor", trace.path, "**:output", "--out", tmp_path / "a", "--force")
    assert code == 0
    found = load_file(tmp_path / "a")
    assert sorted(found) == ["fc:output", "pair:output.real", "twice:output"]
    assert found["pair:output.real"].equal(seen["pair"][0])
    assert "called more than once; the first call is taken" in errors
    assert "left out: pair:output.wide was asked for and not kept on rank 0: " in errors
    assert "safetensors knows no complex128" in errors
    assert "(root):output was not kept: --rs-tensors " in errors
    found = numbers(trace, tmp_path / "a", "pair:output.real", "fc")
    assert {"pair:output.real", "fc:input.0", "fc:output", "fc:grad:bias"} <= found.keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["twice:output"], "means 2 calls: twice has output in forward 2 times"),
        (["fc:outptu"], "the nearest are output"),
        (["fd:output"], "path 'fd' matches nothing"),
        (["fc:output", "--step", "9"], "no train step 9; it holds train 0-1"),
        (["fc:output", "--mode", "eval"], "no eval step; it holds train 0-1"),
        (["fc:output", "--micro-batch", "5"], "it is in: --phase forward --mode train --step 0"),
        (["fc:grad:weight", "--phase", "params"], "it is in: --phase grads"),
        (["fc:output", "--rank", "3"], "--rank 3: the trace holds ranks 0"),
        (["twice:param:weight"], "does not take it; trace again with --rs-tensors 'twice:param:we"),
        (["pair:output.wide"], "safetensors knows no complex128"),
        (["pair:*wide"], "nothing to hand out: pair:output.wide"),
        (["fc:output", "--rank", "0", "--global"], "--rank and --global"),
        (["fc:output", "--layout", "/none"], "layout file /none: cannot be read"),
    ],
)
def test_what_cannot_be_handed_out_is_one_line_that_says_why_and_what_to_do(made, words, said):
    code, text, errors = command("tensor", made[0].path, *words, "--print")
    assert (code, text) == (2, "")
    assert said in errors and len(errors.splitlines()) == 1


def test_options_without_their_partner_are_refused(made, tmp_path):
    for words, said in (
        (["--print"], "need a name"), (["fc:output", "--global"], "add --print or --out"),
        (["fc:output", "--out", tmp_path], "exists: give a new name with --out, or remove it"),
    ):  # fmt: skip
        code, _, errors = command("tensor", made[0].path, *words)
        assert code == 2 and said in errors


def test_a_trace_without_tensors_says_how_to_keep_some(tmp_path):
    out = tmp_path / "trace"
    with rankscope.trace(out=out):
        nn.Linear(2, 2)(torch.ones(2, 2))
    for words in ((), (":output",), ("**",)):
        code, text, errors = command("tensor", out, *words)
        assert (code, text) == (2, "")
        assert "no full tensors were kept" in errors and "--rs-tensors" in errors
        assert len(errors.splitlines()) == 1
    code, _, errors = command("tensor", out, ":output", "--print")
    assert code == 2 and "no full tensors were asked for; trace again with --rs-tensors" in errors


def test_inside_a_trace_the_name_of_a_tensor_is_enough(made, monkeypatch):
    """A name with a slot or a glob is no folder: it is not taken for the trace."""
    monkeypatch.chdir(made[0].path)
    code, text, _ = command("tensor", "fc:output", "--print", "--step", "1")
    assert code == 0 and text.startswith("fc:output  float32[3, 4]")
    assert "fc:param:weight" in command("tensor", "fc:*")[1]
    assert "no such folder" in command("tensor", "fc")[2]


def test_in_python_tensors_are_mapped_and_writing_to_one_changes_nothing_else(made):
    trace, seen = made
    value = trace.value("fc", "output")
    first = value.local(0)
    first.mul_(2)
    assert value.local(0).equal(seen["fc"][0]) and value.full().equal(seen["fc"][0])
    assert trace.value("pair", "output.real").full().dtype is torch.bfloat16
    with pytest.raises(SelectionError, match="was not recorded on rank 1; ranks 0 have it"):
        value.local(1)


ODD = "a/b:c\x00\x1b[31mü\n"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A module whose name holds what terminals, file names and globs stumble over."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(ODD, nn.Linear(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._modules[ODD](x)  # type: ignore[no-any-return]

    with rankscope.trace(out=tmp_path_factory.mktemp("odd") / "t", tensors="**") as handle:
        Odd()(torch.ones(1, 2)).sum().backward()
    return handle.open()


def test_out_makes_its_folder_and_replaces_files_alone_where_it_is_forced_to(
    odd: Trace, tmp_path: Path
) -> None:
    deep = tmp_path / "some/where/out.safetensors"
    name = f"{ODD}:output"
    assert numbers(odd, deep, name)
    link = tmp_path / "link"
    link.symlink_to(deep)
    deep.write_text("old")
    assert numbers(odd, link, name) and link.is_symlink()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for out, said in [
        (tmp_path, "or remove it"), (pipe, "or remove it"), ("/dev/null", "or remove it"),
        (deep / "below", "cannot be written"), (tmp_path / ("x" * 300), "too long"),
    ]:  # fmt: skip
        code, text, errors = command("tensor", odd.path, name, "--out", out, "--force")
        assert (code, text) == (2, "") and said in errors, errors
    code, _, errors = command("tensor", odd.path, name, "--out", deep)
    assert code == 2 and f"{deep} exists: give a new name with --out, or replace it" in errors
    assert stat.S_ISFIFO(pipe.stat().st_mode) and Path("/dev/null").is_char_device()
    assert {path.name for path in tmp_path.iterdir()} == {"some", "link", "pipe"}
    assert [path.name for path in deep.parent.iterdir()] == [deep.name]
