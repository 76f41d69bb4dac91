"""Modules of torch alone, each for something that a debugger may get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn


class Pair(NamedTuple):
    first: torch.Tensor
    second: object


class Plain:
    """Has the repr of `object`, with an address."""


class Take(nn.Module):
    """A leaf that takes anything and gives it back."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (args, kwargs) if kwargs else args[0] if len(args) == 1 else args


class Nesting(nn.Module):
    """Arguments of many kinds and dtypes, nested, some of them not in row-major order."""

    def __init__(self) -> None:
        super().__init__()
        self.take = Take()
        self.scale = nn.Parameter(torch.ones(3))

    def run(self) -> None:
        x = torch.arange(24.0).reshape(4, 6) / 7 - 1
        tensors = [
            x, x.half(), x.bfloat16(), x.double(), x.long(), x > 0, x.to(torch.uint8),
            torch.complex(x, -x), x.t(), x[:, ::2], x[:, :1].expand(4, 5), x[1, 1],
            x.expand(50, 4, 6), torch.zeros(3), torch.full((2,), float("nan")).double(),
        ]  # fmt: skip
        with torch.no_grad():
            self(tensors, {"a": [x, None], 3: "text", "deep": {"er": (1.5, Pair(x, "b"))}})

    def forward(self, tensors: list[torch.Tensor], held: dict[object, object]) -> torch.Tensor:
        for tensor in tensors:
            self.take(tensor)
        self.take(tensors, held, Plain(), torch.float16, tensors[0].shape, flag=True, none=None)
        return tensors[0][0, :3] * self.scale


class Leaf(nn.Module):
    """One layer, and what it was told beside."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, **beside: Any) -> torch.Tensor:
        return self.fc(x)


class Twice(nn.Module):
    """Calls one module twice, with different tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.fc(x))


class TwoLists(nn.Module):
    """An encoder and a decoder side by side under one parent."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.enc = nn.ModuleList(Leaf() for _ in range(layers))
        self.dec = nn.ModuleList(Leaf() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.enc, *self.dec):
            x = layer(x)
        return x


class Told(nn.Module):
    """Passes keyword arguments on to a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Leaf()

    def forward(self, x: torch.Tensor, **beside: Any) -> torch.Tensor:
        return self.inner(x, **beside)


class Raising(nn.Module):
    """Its second layer raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = Stumbling()

    def forward(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        return self.second(self.first(x), fails=fails)


class Stumbling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, fails: bool) -> torch.Tensor:
        x = self.fc(x)
        if fails:
            raise ValueError("stumbled")
        return x


@dataclass
class Batch:
    """A plain dataclass with a tensor in it."""

    x: torch.Tensor
    name: str


class NoParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(x)
