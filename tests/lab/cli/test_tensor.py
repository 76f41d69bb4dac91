"""`rankscope tensor`: odd names, and bytes that rotted or are gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

import rankscope
from rankscope.tree.views import Trace
from tests.cli.test_commands import rankscope as command
from tests.cli.test_tensor import ODD, numbers
from tests.cli.test_tensor import made as made
from tests.cli.test_tensor import odd as odd


def test_printing_shows_small_tensors_whole_and_the_edges_of_large_ones(tmp_path):
    out = tmp_path / "trace"
    with rankscope.trace(out=out, tensors="**"):
        nn.Linear(300, 300)(torch.ones(2, 300))
    code, text, errors = command("tensor", out, ":param:weight", "--phase", "setup", "--print")
    assert (code, errors) == (0, "")
    assert text.startswith(":param:weight  float32[300, 300]  of rank 0\ntensor([[")
    assert "..." in text and len(text) < 2000
    code, text, _ = command("tensor", out, "(root):output", "--global", "--print")
    assert code == 0 and "(root):output  float32[2, 300]  global, from ranks 0" in text


def test_bytes_that_rotted_are_told_and_not_handed_out(tmp_path):
    out = tmp_path / "trace"
    with rankscope.trace(out=out, tensors=":output"):
        nn.Linear(2, 2)(torch.ones(2, 2))
    assert command("verify", out)[0] == 0
    (chunk,) = (out / "tensors" / "rank00000").iterdir()
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 1
    chunk.write_bytes(data)
    code, text, _ = command("verify", out)
    assert code == 1
    assert "000001.safetensors: 1 tensor is not what the rank wrote" in text.splitlines()[-1]
    for words in (["--print"], ["--global", "--print"], ["--out", tmp_path / "new"]):
        code, _, errors = command("tensor", out, ":output", *words)
        assert code == 2 and "are not those that were written" in errors
    assert not (tmp_path / "new").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_a_name_of_any_characters_can_be_asked_for_and_reaches_the_terminal_escaped(
    odd: Trace, tmp_path: Path
) -> None:
    found = numbers(odd, tmp_path / "out", f"{ODD}:output", f"{ODD}:input.0")
    assert {*found} == {f"{ODD}:output", f"{ODD}:input.0"}
    assert {*numbers(odd, tmp_path / "out", "*b?c*:output")} == {f"{ODD}:output"}
    assert len(numbers(odd, tmp_path / "out", ODD)) > 1
    weight = [f"{ODD}:param:weight", "--phase", "setup"]
    assert {*numbers(odd, tmp_path / "out", *weight)} == {f"{ODD}:param:weight"}
    shown = "a/b:c\\x00\\x1b[31mü\\n:output"
    for words in ([], [ODD], [f"{ODD}:output", "--print"], [f"{ODD}:nothing", "--print"]):
        _, text, errors = command("tensor", odd.path, *words)
        assert "\x1b" not in text + errors and "\x00" not in text + errors
        if "nothing" not in "".join(words):
            assert shown in text
        else:
            assert len(errors.splitlines()) == 1


def test_chunks_that_are_gone_or_damaged_are_left_out_of_a_glob_and_named_where_asked_for(
    made, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made[0].path, copy)
    (chunk,) = copy.glob("tensors/*/*.safetensors")
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, _, errors = command("tensor", copy, "**", "--step", 1, "--out", tmp_path / "out")
    assert code == 2 and "are not those that were written: the file is damaged" in errors
    chunk.write_bytes(content[:9] + b"\xff" + content[10:])
    for name in ("fc:input.0", "**"):
        words = [name, "--ordinal", 0, "--micro-batch", 1]
        code, text, errors = command("tensor", copy, *words, "--out", tmp_path / "out")
        assert (code, text) == (2, "") and "the chunk is damaged" in errors
        assert len(errors.splitlines()) == 1
    shutil.rmtree(copy / "tensors")
    code, text, errors = command("tensor", copy, "fc:output", "--ordinal", 0, "--print")
    assert (code, text) == (2, "") and "copy it from where the trace was made" in errors
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}
