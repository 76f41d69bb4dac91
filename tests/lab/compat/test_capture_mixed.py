"""Models of transformers and migrated ones as parts of each other, in every arrangement."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.capturing import Layer, Output, hidden, make, ours, theirs, through_layers
from tests.compat.peer import needs_transformers
from tests.lab.compat.migrated import Arrangements
from tests.lab.compat.test_capture_differential import TEXT, assert_same

pytestmark = needs_transformers

ASKED: list[dict[str, Any]] = [
    {"output_hidden_states": True, "output_attentions": True},
    {},
    {"output_hidden_states": True},
    {"output_attentions": True},
    {"output_hidden_states": [0, -1]},
    {"output_hidden_states": True, "output_attentions": True, "return_dict": False},
]
SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip


def ids(vocabulary: int = 40, length: int = 6) -> torch.Tensor:
    return torch.randint(4, vocabulary, (1, length), generator=torch.Generator().manual_seed(3))


def pixels(size: int) -> torch.Tensor:
    return torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(4))


def _translation(name: str, prefix: str) -> tuple[Any, ...]:
    import transformers

    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=48, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
        max_position_embeddings=32,
    )  # fmt: skip
    inputs = {"input_ids": ids(), "decoder_input_ids": ids(length=3)}
    parts = ("", "model", "model.encoder", "model.decoder")
    return name, f"{prefix}ForConditionalGeneration", config, parts, inputs


def m2m_100() -> tuple[Any, ...]:
    return _translation("m2m_100", "M2M100")


def plbart() -> tuple[Any, ...]:
    return _translation("plbart", "PLBart")


def llama4() -> tuple[Any, ...]:
    from transformers import Llama4Config

    vision = {
        **SMALL, "image_size": 16, "patch_size": 4, "projector_input_dim": 16,
        "projector_output_dim": 16, "vision_output_dim": 16, "intermediate_size": 64,
    }  # fmt: skip
    text = {
        **SMALL, "vocab_size": 48, "intermediate_size_mlp": 24, "num_key_value_heads": 1,
        "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0,
    }  # fmt: skip
    config = Llama4Config(vision_config=vision, text_config=text, image_token_index=47)
    inputs = {
        "input_ids": torch.cat([torch.full((1, 4), 47), ids()], 1),
        "pixel_values": pixels(16),
    }
    parts = ("", "vision_model", "language_model", "language_model.model")
    return "llama4", "Llama4ForConditionalGeneration", config, parts, inputs


def llava() -> tuple[Any, ...]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    vision = CLIPVisionConfig(**SMALL, image_size=16, patch_size=8, projection_dim=8)
    text = LlamaConfig(**{**TEXT, "num_hidden_layers": 2})
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=47, vision_feature_layer=-2
    )
    inputs = {
        "input_ids": torch.cat([torch.full((1, 4), 47), ids()], 1),
        "pixel_values": pixels(16),
    }
    parts = ("", "model.vision_tower", "model.language_model")
    return "llava", "LlavaForConditionalGeneration", config, parts, inputs


def git() -> tuple[Any, ...]:
    from transformers import GitConfig

    config = GitConfig(
        vision_config={**SMALL, "image_size": 16, "patch_size": 8}, **SMALL, vocab_size=48
    )
    parts = ("", "git", "git.image_encoder")
    return "git", "GitForCausalLM", config, parts, {"input_ids": ids(), "pixel_values": pixels(16)}


def sam() -> tuple[Any, ...]:
    from transformers import SamConfig

    vision = {
        **SMALL, "output_channels": 8, "image_size": 32, "patch_size": 8, "mlp_dim": 24,
        "global_attn_indexes": [1], "window_size": 2, "num_pos_feats": 4,
    }  # fmt: skip
    prompt = {"hidden_size": 8, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
    mask = {
        "hidden_size": 8, "mlp_dim": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "attention_downsample_rate": 1, "iou_head_hidden_dim": 8,
    }  # fmt: skip
    config = SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask)
    inputs = {"pixel_values": pixels(32), "input_points": torch.tensor([[[[8.0, 8.0]]]])}
    return "sam", "SamModel", config, ("", "vision_encoder"), inputs


FAMILIES = [m2m_100, plbart, llama4, llava, git, sam]


def models(family: Any) -> tuple[nn.Module, Iterator[tuple[set[str], nn.Module]], dict[str, Any]]:
    """Return the untouched model, every mixture of untouched and migrated parts, and inputs."""
    name, class_name, config, parts, inputs = family()
    made = Arrangements(name, class_name, config, parts)
    choices = itertools.product([False, True], repeat=len(parts))
    arrangements = ({p for p, is_ours in zip(parts, choice) if is_ours} for choice in choices)
    mixtures = ((chosen, made.of(chosen)) for chosen in arrangements if chosen)
    return made.of(set()), mixtures, inputs


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_every_mixture_gives_what_the_untouched_model_gives_in_the_first_and_later_calls(
    family: Any,
) -> None:
    untouched, mixtures, inputs = models(family)
    asked = [*ASKED, ASKED[0]]
    with torch.no_grad():
        expected = [untouched(**inputs, **flags) for flags in asked]
        for chosen, model in mixtures:
            for flags, wanted in zip(asked, expected):
                found = model(**inputs, **flags)
                assert assert_same(found, wanted, f"{sorted(chosen)} {flags}") > 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_every_mixture_follows_the_flags_in_the_configs(family: Any) -> None:
    untouched, mixtures, inputs = models(family)
    expected = None
    for chosen, model in itertools.chain([(set[str](), untouched)], mixtures):
        for config in {
            id(m.config): m.config for m in model.modules() if hasattr(m, "config")
        }.values():
            config.output_hidden_states = config.output_attentions = True
        with torch.no_grad():
            found = model(**inputs)
        expected = expected or found
        assert assert_same(found, expected, str(sorted(chosen))) > 3


SIDES = {"ours": ours, "theirs": theirs}
NESTED = [levels for levels in itertools.product(SIDES, repeat=3) if "ours" in levels]
EVERYTHING = {
    "output_hidden_states": True,
    "output_attentions": True,
    "output_router_logits": True,
}


def around(self: nn.Module, inputs_embeds: torch.Tensor, **kwargs: Any) -> Output:
    """A layer, another model, a layer: what comes after that model must be recorded again."""
    before, inside, after = self.layers
    inner = inside(inputs_embeds=before(inputs_embeds), **kwargs)
    found = {f"inner_{key}": value for key, value in inner.items() if key != "past_key_values"}
    return Output(last_hidden_state=after(inner["last_hidden_state"]), **found)


def nested(
    levels: tuple[str, ...], forwards: tuple[Callable[..., Any], ...] = (around, around)
) -> nn.Module:
    """Return a captured model in a captured model in a captured one, each of the side given; the
    innermost is a Llama 4, whose declaration has a recorder in it.
    """
    from transformers import Llama4TextConfig

    sizes = {
        "hidden_size": 4, "intermediate_size": 8, "intermediate_size_mlp": 8, "head_dim": 2,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_local_experts": 2, "vocab_size": 8, "pad_token_id": 0,
    }  # fmt: skip
    chosen = {""} if levels[2] == "ours" else set()
    model = Arrangements("llama4", "Llama4TextModel", Llama4TextConfig(**sizes), ("",)).of(chosen)
    middle = make(SIDES[levels[1]](), forwards[1], layers=lambda: [Layer(), model, Layer()])
    outer = make(SIDES[levels[0]](), forwards[0], layers=lambda: [Layer(), middle, Layer()])
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in outer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return outer


def embeddings(seed: int = 1) -> torch.Tensor:
    return torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("levels", NESTED, ids="-".join)
def test_models_nested_twice_each_record_their_own(levels: tuple[str, ...]) -> None:
    untouched, model = nested(("theirs",) * 3), nested(levels)
    for flags in (EVERYTHING, {}, {"output_hidden_states": [0]}, EVERYTHING):
        expected, found = (m(inputs_embeds=embeddings(), **flags) for m in (untouched, model))
        assert_same(found, expected, str(flags))
    counts = [len(found[f"{inner}hidden_states"]) for inner in ("", "inner_", "inner_inner_")]
    assert counts == [3, 3, 3] and len(found["inner_inner_router_logits"]) == 2


@pytest.mark.parametrize("levels", [("theirs", "ours", "theirs"), ("ours", "theirs", "ours")])
def test_captures_on_several_threads_get_their_own_values(levels: tuple[str, ...]) -> None:
    untouched, model = nested(("theirs",) * 3), nested(levels)
    asked = [EVERYTHING, {}, {"output_hidden_states": True}, EVERYTHING]
    expected = [untouched(inputs_embeds=embeddings(n), **flags) for n, flags in enumerate(asked)]
    start = threading.Barrier(len(asked))

    def many(number: int) -> list[Any]:
        start.wait(60)
        return [model(inputs_embeds=embeddings(number), **asked[number]) for _ in range(5)]

    with ThreadPoolExecutor(len(asked)) as pool:
        for found, wanted in zip(pool.map(many, range(len(asked))), expected):
            assert [assert_same(one, wanted) > 0 for one in found] == [True] * 5


def failing(self: nn.Module, inputs_embeds: torch.Tensor, **kwargs: Any) -> Output:
    outputs = around(self, inputs_embeds, **kwargs)
    if inputs_embeds.shape[0] == 3:
        raise ValueError("three rows")
    return outputs


def catching(self: nn.Module, inputs_embeds: torch.Tensor, **kwargs: Any) -> Output:
    with contextlib.suppress(ValueError):
        self.layers[1](inputs_embeds=embeddings().expand(3, -1, -1), **kwargs)
    return around(self, inputs_embeds, **kwargs)


@pytest.mark.parametrize("levels", NESTED, ids="-".join)
def test_a_forward_that_fails_inside_leaves_the_models_around_their_own(
    levels: tuple[str, ...],
) -> None:
    forwards = (catching, failing)
    untouched, model = nested(("theirs",) * 3, forwards), nested(levels, forwards)
    for flags in (EVERYTHING, {}, EVERYTHING):
        expected, found = (m(inputs_embeds=embeddings(), **flags) for m in (untouched, model))
        assert_same(found, expected, str(flags))


def straight(self: nn.Module, inputs_embeds: torch.Tensor, **kwargs: Any) -> Output:
    return through_layers(self, inputs_embeds)


def two(outer: str, inner: str) -> nn.Module:
    return make(
        SIDES[outer](), around, layers=lambda: [Layer(), make(SIDES[inner](), straight), Layer()]
    )


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("levels", [("theirs", "ours"), ("ours", "theirs")], ids="-".join)
def test_compiled_mixtures_record_what_they_record_outside(
    levels: tuple[str, str], is_warm: bool
) -> None:
    """One graph too, after a capture outside it: transformers alone breaks the graph even there,
    because nothing says to compiled code that the model inside has ended.
    """
    torch.compiler.reset()
    asked = {"output_hidden_states": True}
    expected, model = (two(*sides) for sides in (("theirs", "theirs"), levels))
    model.load_state_dict(expected.state_dict())
    wanted = expected(inputs_embeds=hidden(), **asked)
    if is_warm:
        model(inputs_embeds=hidden(), **asked)
    compiled = torch.compile(model, backend="eager", fullgraph=is_warm)
    for call in (compiled, compiled, model):
        found = call(inputs_embeds=hidden(), **asked)
        assert_same(found, wanted)
        assert len(found["hidden_states"]) == 3 and len(found["inner_hidden_states"]) == 4
    assert "hidden_states" not in compiled(inputs_embeds=hidden())


def test_a_compiled_part_of_an_untouched_model_records_for_itself_alone() -> None:
    torch.compiler.reset()
    expected, model = two("theirs", "theirs"), two("theirs", "ours")
    model.load_state_dict(expected.state_dict())
    model.layers[1].compile(backend="eager", fullgraph=True)
    for asked in ({"output_hidden_states": True}, {}, {"output_hidden_states": True}):
        wanted = expected(inputs_embeds=hidden(), **asked)
        assert_same(model(inputs_embeds=hidden(), **asked), wanted, str(asked))
