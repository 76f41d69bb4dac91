"""Captured outputs of transformers' own models, bit by bit beside transformers' own capture."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.peer import needs_transformers
from tests.lab.compat.migrated import pair

pytestmark = [needs_transformers, pytest.mark.parity]

TEXT = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4,
}  # fmt: skip


def _ids(length: int = 7) -> torch.Tensor:
    return torch.randint(0, 48, (2, length), generator=torch.Generator().manual_seed(3))


def _pixels(size: int, channels: int = 3) -> torch.Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(4))


def llama() -> tuple[Any, ...]:
    from transformers import LlamaConfig

    config = LlamaConfig(**TEXT, num_key_value_heads=2)
    return "llama", "LlamaForCausalLM", config, {"input_ids": _ids()}, ()


def bert() -> tuple[Any, ...]:
    from transformers import BertConfig

    config = BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(5))
    inputs = {"input_ids": _ids(), "encoder_hidden_states": states}
    return "bert", "BertForMaskedLM", config, inputs, ()


def mixtral() -> tuple[Any, ...]:
    from transformers import MixtralConfig

    config = MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=3)
    return "mixtral", "MixtralForCausalLM", config, {"input_ids": _ids()}, ("router_logits",)


def t5() -> tuple[Any, ...]:
    from transformers import T5Config

    config = T5Config(
        vocab_size=48, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, dropout_rate=0.1,
        decoder_start_token_id=0,
    )  # fmt: skip
    inputs = {"input_ids": _ids(), "decoder_input_ids": _ids(4)}
    return "t5", "T5ForConditionalGeneration", config, inputs, ()


def vit() -> tuple[Any, ...]:
    from transformers import ViTConfig

    config = ViTConfig(**{**TEXT, "vocab_size": 1}, image_size=16, patch_size=8)
    return "vit", "ViTForImageClassification", config, {"pixel_values": _pixels(16)}, ()


def whisper() -> tuple[Any, ...]:
    from transformers import WhisperConfig

    config = WhisperConfig(
        vocab_size=48, num_mel_bins=8, encoder_layers=3, decoder_layers=3, d_model=32,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_source_positions=10, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    sound = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(6))
    inputs = {"input_features": sound, "decoder_input_ids": _ids(4)}
    return "whisper", "WhisperForConditionalGeneration", config, inputs, ()


def llava() -> tuple[Any, ...]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        image_size=16, patch_size=8, projection_dim=16,
    )  # fmt: skip
    text = LlamaConfig(**TEXT, num_key_value_heads=2)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=47, vision_feature_layer=-2
    )
    ids = torch.cat([torch.full((2, 4), 47), _ids().clamp(max=46)], dim=1)
    inputs = {"input_ids": ids, "pixel_values": _pixels(16)}
    return "llava", "LlavaForConditionalGeneration", config, inputs, ()


MODELS = [llama, bert, mixtral, t5, vit, whisper, llava]
ASKED: list[dict[str, Any]] = [
    {},
    {"output_hidden_states": True},
    {"output_attentions": True},
    {"output_hidden_states": True, "output_attentions": True},
    {"output_hidden_states": False, "output_attentions": True},
    {"output_hidden_states": [0, -1]},
    {"output_hidden_states": 2, "output_attentions": True},
    {"output_hidden_states": -2},
    {"output_hidden_states": [99]},
    {"output_hidden_states": True, "output_attentions": True, "return_dict": False},
]


def twins(make: Any) -> tuple[nn.Module, nn.Module, dict[str, Any], dict[str, Any]]:
    model, class_name, config, inputs, outputs = make()
    for part in (config, *(getattr(config, n, None) for n in ("text_config", "vision_config"))):
        if part is not None:
            part._attn_implementation = "eager"
    theirs, ours = pair(model, class_name, config)
    return theirs, ours, inputs, {f"output_{name}": True for name in outputs}


def assert_grads_same(ours: nn.Module, theirs: nn.Module) -> None:
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert any(grad is not None and grad.abs().sum() > 0 for grad in expected.values())
    for name, parameter in ours.named_parameters():
        grad = expected[name]
        assert (parameter.grad is None) == (grad is None), name
        assert grad is None or torch.equal(parameter.grad, grad), name


def assert_same(ours: Any, theirs: Any, where: str = "output") -> int:
    """Hold every tensor beside its twin, bit by bit; return how many there were."""
    assert type(ours).__name__ == type(theirs).__name__, where
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), where
        assert ours.requires_grad == theirs.requires_grad, where
        return 1
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        return sum(assert_same(ours[key], theirs[key], f"{where}.{key}") for key in theirs)
    if isinstance(theirs, (tuple, list)):
        assert len(ours) == len(theirs), where
        return sum(assert_same(a, b, f"{where}.{n}") for n, (a, b) in enumerate(zip(ours, theirs)))
    assert theirs is None or not isinstance(theirs, (int, float, str)) or ours == theirs, where
    return 0


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_every_flag_gives_what_transformers_gives(make: Any) -> None:
    theirs, ours, inputs, others = twins(make)
    for asked in ASKED:
        flags = {**asked, **(others if asked.get("output_attentions") else {})}
        expected = theirs(**inputs, **copy.copy(flags))
        assert assert_same(ours(**inputs, **flags), expected, str(flags)) > 0


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_flags_in_the_config_give_what_transformers_gives(make: Any) -> None:
    theirs, ours, inputs, _ = twins(make)
    for model in (theirs, ours):
        for config in {
            id(m.config): m.config for m in model.modules() if hasattr(m, "config")
        }.values():
            config.output_hidden_states = True
            config.output_attentions = True
    expected = theirs(**inputs)
    names = " ".join(expected)
    assert "hidden_states" in names and "attentions" in names
    assert assert_same(ours(**inputs), expected) > 6


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_gradients_through_captured_values_are_the_same(make: Any) -> None:
    theirs, ours, inputs, _ = twins(make)
    for model in (theirs, ours):
        model.train()
        torch.manual_seed(11)
        outputs = model(**inputs, output_hidden_states=True, output_attentions=True)
        captured = [
            value
            for key, values in outputs.items()
            if "hidden_states" in key or "attentions" in key
            for value in (values if isinstance(values, tuple) else ())
        ]
        assert len(captured) > 5
        sum(value.float().square().sum() for value in captured).backward()
    assert_grads_same(ours, theirs)


@pytest.mark.parametrize("make", [llama, t5, whisper], ids=lambda make: make.__name__)
def test_activation_checkpointing_gives_what_transformers_gives(make: Any) -> None:
    theirs, ours, inputs, _ = twins(make)
    results = []
    for model in (theirs, ours):
        model.train()
        model.gradient_checkpointing_enable()
        torch.manual_seed(11)
        outputs = model(
            **inputs, output_hidden_states=True, output_attentions=True, use_cache=False
        )
        outputs.logits.square().sum().backward()
        results.append(outputs)
    assert assert_same(results[1], results[0]) > 6
    assert_grads_same(ours, theirs)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_migrated_model_keeps_no_hook_and_no_attribute(make: Any) -> None:
    _, ours, inputs, _ = twins(make)
    before = {name: set(vars(module)) for name, module in ours.named_modules()}
    ours(**inputs, output_hidden_states=True, output_attentions=True)
    for name, module in ours.named_modules():
        assert not module._forward_hooks and not module._forward_hooks_with_kwargs, name
        assert set(vars(module)) == before[name], name


def test_attentions_that_sdpa_does_not_compute_are_empty_as_there_and_said() -> None:
    """Said by the model that was asked, once; there, not at all."""
    model, class_name, config, inputs, _ = llama()
    config._attn_implementation = "sdpa"
    theirs, ours = pair(model, class_name, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert theirs(**inputs, output_attentions=True).attentions == ()
    with pytest.warns(UserWarning, match="'sdpa' computes no weights") as said:
        assert ours(**inputs, output_attentions=True).attentions == ()
    assert len(said) == 1
    ours.set_attn_implementation("eager")
    assert len(ours(**inputs, output_attentions=True).attentions) == 3


@pytest.mark.soak
def test_a_tiny_model_of_every_class_gives_what_transformers_gives() -> None:
    """Prints how many captures were held beside each other, and fails with those that differ."""
    found: list[dict[str, str]] = []
    for side in ("theirs", "ours"):
        command = [sys.executable, "-m", "tests.lab.compat.capture_sweep", side]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.append(dict(json.loads(line) for line in lines.splitlines() if line[:2] == '["'))
    theirs, ours = found
    raised = {name for name, value in theirs.items() if len(value) < 64}
    differ = [name for name in theirs if name not in raised and ours.get(name) != theirs[name]]
    models = {name.split()[0] for name in theirs}
    print(f"{len(theirs)} captures of {len(models)} models, {len(raised)} raise there: {raised}")
    assert len(models) > 100 and not differ
