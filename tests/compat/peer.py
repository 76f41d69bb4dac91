"""transformers 5.23.0, the release that rankscope.compat is held beside."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from rankscope import compat

RELEASE = "5.23.0"
INSTALLED = (
    importlib.metadata.version("transformers")
    if importlib.util.find_spec("transformers")
    else "nothing"
)
needs_transformers = pytest.mark.skipif(
    INSTALLED != RELEASE, reason=f"needs transformers=={RELEASE}, found {INSTALLED}"
)


@dataclass(frozen=True)
class Calls:
    """The six calls of one implementation."""

    name: str
    register_patch_mapping: Callable[..., None]
    unregister_patch_mapping: Callable[..., None]
    get_patch_mapping: Callable[[], dict[str, type[nn.Module]]]
    clear_patch_mapping: Callable[[], None]
    apply_patches: Callable[[], AbstractContextManager[None]]
    patch_output_recorders: Callable[[nn.Module], None]

    @classmethod
    def of(cls, module: Any) -> Calls:
        names = [name for name in cls.__dataclass_fields__ if name != "name"]
        return cls(module.__name__, **{name: getattr(module, name) for name in names})


def ours() -> Calls:
    return Calls.of(compat)


def theirs() -> Calls:
    from transformers import monkey_patching

    return Calls.of(monkey_patching)


@contextmanager
def untouched(*classes: type) -> Iterator[None]:
    """Put back what transformers changes in its classes and never restores."""
    said = {cls: copy.deepcopy(cls._can_record_outputs) for cls in classes}  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for cls, recorders in said.items():
            kept = cls._can_record_outputs  # type: ignore[attr-defined]
            kept.clear()
            kept.update(recorders)


def module_classes(package: str = "transformers") -> dict[tuple[str, str], type]:
    """(module, name) -> class, for every `nn.Module` class that stands in a loaded module."""
    return {
        (module.__name__, name): value
        for key, module in list(sys.modules.items())
        if key == package or key.startswith(f"{package}.")
        for name, value in list(vars(module).items())
        if isinstance(value, type) and issubclass(value, nn.Module)
    }


def tiny(kind: str) -> tuple[type[Any], Any]:
    """A model class of transformers, and a config of two small layers for it."""
    import transformers as hf

    common: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 60,
        "attn_implementation": "eager",
    }
    configs: dict[str, tuple[type[Any], Callable[[], Any]]] = {
        "llama": (hf.LlamaModel, lambda: hf.LlamaConfig(**common, num_key_value_heads=2)),
        "llama-lm": (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**common)),
        "bert": (hf.BertModel, lambda: hf.BertConfig(**common)),
        "mixtral": (
            hf.MixtralModel,
            lambda: hf.MixtralConfig(**common, num_key_value_heads=2, num_local_experts=4),
        ),
        "whisper": (
            hf.WhisperModel,
            lambda: hf.WhisperConfig(
                vocab_size=60,
                d_model=16,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=16,
                decoder_ffn_dim=16,
                num_mel_bins=4,
                max_source_positions=8,
                max_target_positions=8,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
                attn_implementation="eager",
            ),
        ),
    }
    cls, config = configs[kind]
    return cls, config()


def inputs(kind: str) -> dict[str, torch.Tensor]:
    tokens = torch.arange(3, 10)[None]
    if kind == "whisper":
        features = torch.linspace(-1, 1, 64).reshape(1, 4, 16)
        return {"input_features": features, "decoder_input_ids": tokens}
    return {"input_ids": tokens}


@contextmanager
def said_by(logger: str) -> Iterator[list[str]]:
    """Collect the messages of a logger that passes nothing on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(logger).removeHandler(handler)
