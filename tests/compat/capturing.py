"""Small models for either implementation of output capture, and the two implementations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rankscope import compat


@dataclass(frozen=True)
class Side:
    """The calls of one implementation, and the least class a model must have for them."""

    name: str
    base: Callable[[], type[nn.Module]]
    capture_outputs: Any
    merge_with_config_defaults: Any
    OutputRecorder: Any


def ours() -> Side:
    return Side(
        "rankscope",
        lambda: nn.Module,
        compat.capture_outputs,
        compat.merge_with_config_defaults,
        compat.OutputRecorder,
    )


def theirs() -> Side:
    from transformers.utils.generic import merge_with_config_defaults
    from transformers.utils.output_capturing import OutputRecorder, capture_outputs

    return Side(
        "transformers",
        _pretrained_model,
        capture_outputs,
        merge_with_config_defaults,
        OutputRecorder,
    )


def _pretrained_model() -> type[nn.Module]:
    from transformers import PretrainedConfig, PreTrainedModel

    class Pretrained(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self) -> None:
            super().__init__(PretrainedConfig())

    return Pretrained


class Config:
    """What any model may have as `config`."""


class Output(dict):
    """The least that both implementations take for an output: values by key and by attribute."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden)


def through_layers(self: nn.Module, hidden: torch.Tensor, **kwargs: Any) -> Output:
    for layer in self.layers:
        hidden = layer(hidden)
    return Output(last_hidden_state=hidden)


def make(
    side: Side,
    forward: Callable[..., Any] = through_layers,
    *,
    records: Any = None,
    layers: Callable[[], list[nn.Module]] = lambda: [Layer(), Layer(), Layer()],
    name: str = "Model",
    **config: Any,
) -> nn.Module:
    """Return a model whose forward is decorated already or captured here, with these layers."""
    base = side.base()

    def build(self: nn.Module) -> None:
        super(cls, self).__init__()
        self.layers = nn.ModuleList(layers())
        if base is nn.Module and config:
            self.config = Config()
        for key, value in config.items():
            setattr(self.config, key, value)

    decorated = forward if hasattr(forward, "__wrapped__") else side.capture_outputs(forward)
    spec = {"hidden_states": Layer} if records is None else records
    body = {"__init__": build, "forward": decorated, "_can_record_outputs": spec}
    cls = type(name, (base,), body)
    torch.manual_seed(0)
    return cls().eval()


def hidden(rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
