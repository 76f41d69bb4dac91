"""Tiny random models of transformers, each with a call of it, for comparison with its debugger.

Their debugger prints every element: the sizes are what the tests cost. Logits have more than the
1000 elements from which torch prints an extract.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Call = Callable[[nn.Module], object]


def tokens(vocabulary: int = 90, length: int = 8) -> torch.Tensor:
    return torch.randint(3, vocabulary, (2, length), generator=torch.Generator().manual_seed(1))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def llama() -> tuple[nn.Module, Call]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, vocab_size=99)  # fmt: skip
    return LlamaForCausalLM(config), lambda model: model(
        input_ids=tokens(), attention_mask=torch.ones(2, 8, dtype=torch.int64)
    )


def bert() -> tuple[nn.Module, Call]:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=3,
                        num_attention_heads=4, vocab_size=99)  # fmt: skip
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    return BertModel(config), lambda model: model.forward(tokens(), attention_mask=mask)


def mixtral() -> tuple[nn.Module, Call]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=4,
                           num_attention_heads=4, num_key_value_heads=2, vocab_size=99,
                           num_local_experts=4)  # fmt: skip
    return MixtralForCausalLM(config), lambda model: model(
        input_ids=tokens(), output_router_logits=True
    )


def t5() -> tuple[nn.Module, Call]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=16, d_kv=4, d_ff=24, num_layers=3, num_heads=4, vocab_size=99)
    return T5ForConditionalGeneration(config), lambda model: model(
        input_ids=tokens(), decoder_input_ids=tokens(length=5)
    )


def vit() -> tuple[nn.Module, Call]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=3,
                       num_attention_heads=4, image_size=16, patch_size=4)  # fmt: skip
    return ViTForImageClassification(config), lambda model: model(pixel_values=noise(2, 3, 16, 16))


def whisper() -> tuple[nn.Module, Call]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(d_model=16, encoder_layers=3, decoder_layers=3,
                           encoder_attention_heads=4, decoder_attention_heads=4,
                           encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=99,
                           num_mel_bins=8, max_source_positions=20, max_target_positions=16,
                           pad_token_id=0, bos_token_id=1, eos_token_id=2,
                           decoder_start_token_id=1, suppress_tokens=None)  # fmt: skip
    return WhisperForConditionalGeneration(config), lambda model: model(
        input_features=noise(2, 8, 40), decoder_input_ids=tokens(length=5)
    )


def llava() -> tuple[nn.Module, Call]:
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    seeing = CLIPVisionConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=3,
                              num_attention_heads=4, image_size=16, patch_size=8)  # fmt: skip
    saying = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=3,
                         num_attention_heads=4, vocab_size=99)  # fmt: skip
    config = LlavaConfig(vision_config=seeing, text_config=saying, image_token_id=98)
    told = torch.cat([torch.full((2, 4), 98), tokens()], 1)
    return LlavaForConditionalGeneration(config), lambda model: model.forward(
        input_ids=told, pixel_values=noise(2, 3, 16, 16)
    )


MODELS: dict[str, Callable[[], tuple[nn.Module, Call]]] = {
    "llama": llama, "bert": bert, "mixtral": mixtral, "t5": t5, "vit": vit, "whisper": whisper,
    "llava": llava,
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Call]:
    """Return a model with the weights that its name always has, without dropout."""
    torch.manual_seed(7)
    model, call = MODELS[name]()
    return model.eval(), call
