"""The files of transformers' debugger from a trace: memory, devices and hostile names."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rankscope.capture.kernel import build, load
from rankscope.compat.debugger import text
from rankscope.compat.debugger.text import Arena, glimpse_of, statistics_of, tensor_text
from tests.compat import debugger_modules as modules
from tests.compat.debugger_files import tree
from tests.compat.test_debugger_export import exported


def test_statistics_by_the_kernel_are_printed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    if build() is None:
        pytest.skip("needs a C compiler")
    choose, generator = random.Random(4), torch.Generator().manual_seed(4)
    tensors = [torch.randn(4, 6).t(), torch._neg_view(torch.arange(6.0) ** 2)]
    tensors += [torch.randn(6).half(), torch.randn(6).bfloat16()]
    for _ in range(2000):
        shape = [choose.choice((1, 2, 3, 17, 64, 333)) for _ in range(choose.randint(0, 3))]
        tensor = torch.randn(shape, generator=generator) * 10 ** choose.uniform(-6, 6)
        tensor += choose.choice((0.0, 1.0, 1e5))
        if choose.random() < 0.1:
            tensor.view(-1)[0] = choose.choice((math.nan, math.inf, -math.inf))
        tensors.append(tensor)
    monkeypatch.setattr(text, "_kernel", load)
    by_kernel = [statistics_of(glimpse_of(tensor)) for tensor in tensors]
    monkeypatch.setattr(text, "_kernel", lambda: None)
    for tensor, found in zip(tensors, by_kernel):
        assert found == statistics_of(glimpse_of(tensor.clone())), tensor


def test_items_are_kept_side_by_side_outside_the_heap() -> None:
    """In it a kB between large tensors that come and go kept their room from being used again: a
    forward of 4 x 512 tokens took 238 MB more than without the debugger.
    """
    arena = Arena()
    tensors = [torch.full((100, 100), float(number)) for number in range(5)]
    tensors.append(torch.ones(100, *[7] * 6))  # of more items than a chunk has room for
    kept = [glimpse_of(tensor, arena=arena) for tensor in tensors]
    texts = [tensor_text(seen) for seen in kept]
    with torch._tensor_str.printoptions(sci_mode=True, linewidth=120):
        assert texts == [str(tensor) for tensor in tensors]
    addresses = []
    for seen in kept:
        assert seen.items is not None
        addresses.append(torch.frombuffer(seen.items, dtype=seen.dtype).data_ptr())
    assert max(addresses[:5]) - min(addresses[:5]) < 1 << 12
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if line.endswith("[heap]"):
            assert not any(low <= address < high for address in addresses)


def test_a_tensor_of_another_device_names_it() -> None:
    assert tensor_text(glimpse_of(torch.ones(2), arena=Arena()), "cuda:0") == (
        "tensor([1.0000e+00, 1.0000e+00], device='cuda:0')"
    )
    assert statistics_of(glimpse_of(torch.ones(2).half()), "cuda:1")["max"] == (
        "tensor(1.0000e+00, device='cuda:1', dtype=torch.float16)"
    )


def test_long_and_hostile_names_are_files_of_their_own_in_the_folder(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("a/b", modules.Leaf())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keys = {"k" * 400: x, "k" * 401: x + 1, "\n": x + 2, "é" * 300: x + 3}
            return self._modules["a/b"](x, held=keys)

    files = exported(Named(), tmp_path, torch.ones(2, 4), options={"safetensors": True})
    held = tree(files)["children"][0]["inputs"]["kwargs"]["held"]
    assert [float(load_file(files / each["value"])["data"].min()) for each in held.values()] == [
        1.0, 2.0, 3.0, 4.0,
    ]  # fmt: skip
    assert len({each["value"] for each in held.values()}) == 4
    assert all(path.parent == files for path in files.rglob("*.safetensors"))
