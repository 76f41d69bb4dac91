"""Capture from a tiny model of every class of transformers, by one of the two implementations.

`python -m tests.lab.compat.capture_sweep ours|theirs [families]` prints a line of JSON for each
capture: its name, and a digest of every value in what the model returned. The test starts one
process for each implementation: a model file takes the one that is there when it is imported.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from rankscope import compat

SMALL = {
    "hidden_size": 16, "d_model": 16, "embed_dim": 16, "dim": 16, "n_embd": 16,
    "intermediate_size": 24, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "ffn_dim": 24,
    "mlp_dim": 24, "d_ff": 24, "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers":
    2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads":
    2, "num_heads": 2, "n_head": 2, "n_heads": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "vocab_size": 64, "image_size": 32, "patch_size": 8, "num_experts": 2, "num_local_experts": 2,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "max_position_embeddings": 64, "projection_dim": 16, "embedding_size": 16,
}  # fmt: skip
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
ASKED: list[dict[str, Any]] = [
    {"output_hidden_states": True, "output_attentions": True},
    {"output_hidden_states": [0, 2]},
    {"output_attentions": True, "return_dict": False},
    {},
]
MOST = 30_000_000
"""Parameters: a class whose config does not get small by these names is left out."""


def _shrink(config: Any) -> Any:
    for part in vars(config).values():
        if hasattr(part, "_attn_implementation"):
            _shrink(part)
    for name, value in SMALL.items():
        if type(getattr(config, name, None)) is int:
            setattr(config, name, value)
    for name in SPECIAL:
        if type(getattr(config, name, None)) is int:
            setattr(config, name, 1)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    config._attn_implementation = "eager"
    return config


def _inputs(names: list[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what a forward may want, the likeliest first."""
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    known = {
        "pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32),
        "input_ids": ids,
        "inputs_embeds": torch.linspace(-1, 1, 80).reshape(1, 5, 16),
        "input_values": torch.linspace(-1, 1, 4000).reshape(1, 4000),
    }
    extra = {"decoder_input_ids": ids[:, :3]} if "decoder_input_ids" in names else {}
    if "pixel_values" in names and "input_ids" in names:
        yield {"pixel_values": known["pixel_values"], "input_ids": ids}
    for name, value in known.items():
        if name in names:
            yield {name: value, **extra}


def _digest(value: Any, digest: Any) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, one in value.items():
            digest.update(str(key).encode())
            _digest(one, digest)
    elif isinstance(value, (tuple, list)):
        for one in value:
            _digest(one, digest)


def _captures(cls: Any) -> Iterator[tuple[str, str]]:
    config = _shrink(cls.config_class())
    with torch.device("meta"):
        if sum(parameter.numel() for parameter in cls(config).parameters()) > MOST:
            return
    torch.manual_seed(0)
    model = cls(config).eval()
    names = list(inspect.signature(cls.forward).parameters)
    for inputs in _inputs(names):
        try:
            model(**inputs)
        except Exception:
            continue
        for flags in ASKED:
            digest = hashlib.sha256()
            try:
                torch.manual_seed(1)
                _digest(model(**inputs, **flags), digest)
                yield f"{cls.__name__} {flags}", digest.hexdigest()
            except Exception as error:
                yield f"{cls.__name__} {flags}", type(error).__name__
        return


def _classes(families: list[str]) -> Iterator[Any]:
    from transformers import PreTrainedModel, models

    for family in families or sorted(m.name for m in pkgutil.iter_modules(models.__path__)):
        try:
            home = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        except ImportError:
            continue
        for cls in list(vars(home).values()):
            is_model = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
            if is_model and cls.__module__ == home.__name__ and cls.config_class is not None:
                yield cls


@torch.no_grad()
def main(side: str, families: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    from transformers.utils import generic, logging, output_capturing

    logging.set_verbosity_error()
    if side == "ours":
        output_capturing.capture_outputs = compat.capture_outputs
        output_capturing.OutputRecorder = compat.OutputRecorder  # type: ignore[misc]
        generic.merge_with_config_defaults = compat.merge_with_config_defaults
    for cls in _classes(families):
        try:
            for name, found in _captures(cls):
                print(json.dumps([name, found]), flush=True)
        except Exception:
            continue


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
