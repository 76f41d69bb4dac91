"""Beside transformers 5.23.0: the same mapping gives the same classes, models and numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests import forked
from tests.compat.peer import (
    Calls,
    inputs,
    module_classes,
    needs_transformers,
    ours,
    theirs,
    tiny,
    untouched,
)

pytestmark = [needs_transformers, pytest.mark.parity]


def louder(original: type[nn.Module]) -> type[nn.Module]:
    """A class in place of `original` whose numbers differ."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = original.forward(self, *args, **kwargs)
        if isinstance(given, dict):
            given["last_hidden_state"] = given["last_hidden_state"] * 1.25
            return given
        return (given[0] * 1.25, *given[1:]) if isinstance(given, tuple) else given * 1.25

    return type(f"Louder{original.__name__}", (original,), {"forward": forward})


def mappings() -> dict[str, tuple[str, dict[str, type[nn.Module]]]]:
    from transformers import BertModel
    from transformers.models.bert import modeling_bert as bert
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.whisper import modeling_whisper as whisper

    return {
        "llama, exact": ("llama", {"LlamaMLP": louder(llama.LlamaMLP)}),
        "llama, a recorded class": (
            "llama",
            {"LlamaDecoderLayer": louder(llama.LlamaDecoderLayer)},
        ),
        "llama, exact before pattern": (
            "llama-lm",
            {
                "Llama.*Norm$": louder(llama.LlamaRMSNorm),
                "LlamaRMSNorm": type("Same", (llama.LlamaRMSNorm,), {}),
                "^Llama(MLP|Attention)$": louder(llama.LlamaMLP),
                "LlamaAttention": louder(llama.LlamaAttention),
            },
        ),
        "bert, patterns in order": (
            "bert",
            {"Self": louder(bert.BertSelfAttention), "BertSelfOutput": bert.BertSelfOutput},
        ),
        "bert, an exported class": ("bert", {"^BertModel$": louder(BertModel)}),
        "bert, no expression": ("bert", {"BertLayer[": bert.BertLayer}),
        "mixtral, experts": ("mixtral", {"MixtralExperts": louder(mixtral.MixtralExperts)}),
        "mixtral, a layer and its attention": (
            "mixtral",
            {
                "^MixtralDecoderLayer$": louder(mixtral.MixtralDecoderLayer),
                "^MixtralAttention$": louder(mixtral.MixtralAttention),
                "^Mixtral.*Router": louder(mixtral.MixtralTopKRouter),
            },
        ),
        "whisper, two towers": (
            "whisper",
            {
                "WhisperDecoderLayer": louder(whisper.WhisperDecoderLayer),
                "^WhisperAttention$": louder(whisper.WhisperAttention),
            },
        ),
    }


CASES = [
    "llama, exact",
    "llama, a recorded class",
    "llama, exact before pattern",
    "bert, patterns in order",
    "bert, an exported class",
    "mixtral, experts",
    "mixtral, a layer and its attention",
    "whisper, two towers",
]


@pytest.fixture(scope="module")
def all_is_loaded() -> None:
    """Let transformers load what its patterns match in lazy packages, which a block does, and
    what those modules make it find.
    """
    for _ in range(2):
        for _, mapping in mappings().values():
            theirs().register_patch_mapping(mapping, overwrite=True)
        with theirs().apply_patches():
            pass
        theirs().clear_patch_mapping()


@pytest.fixture
def classes_put_back(all_is_loaded: None) -> Iterator[None]:
    kinds = ["llama", "bert", "mixtral", "whisper"]
    recorded = {
        base
        for kind in kinds
        for base in tiny(kind)[0].__mro__
        if vars(base).get("_can_record_outputs")
    }
    with untouched(*recorded):
        yield


def patched(calls: Calls, mapping: dict[str, type[nn.Module]], kind: str) -> tuple[Any, Any, Any]:
    """Return the classes during and after a block, and the model made in it."""
    cls, config = tiny(kind)
    torch.manual_seed(0)
    calls.register_patch_mapping(mapping)
    try:
        with calls.apply_patches():
            during = module_classes()
            model = vars(sys.modules[cls.__module__])[cls.__name__](config).eval()
        calls.patch_output_recorders(model)
    finally:
        calls.clear_patch_mapping()
    return during, module_classes(), model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("classes_put_back")
def test_the_same_classes_are_replaced_in_the_same_modules_and_outputs_are_equal(
    case: str,
) -> None:
    kind, mapping = mappings()[case]
    before = module_classes()
    plain = type(tiny(kind)[0](tiny(kind)[1]))
    ours_during, ours_after, our_model = patched(ours(), mapping, kind)
    theirs_during, theirs_after, their_model = patched(theirs(), mapping, kind)
    assert ours_during == theirs_during != before
    assert ours_after == theirs_after == before
    assert [type(m) for m in our_model.modules()] == [type(m) for m in their_model.modules()]
    assert our_model._can_record_outputs == their_model._can_record_outputs
    asked = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        our_outputs = our_model(**inputs(kind), **asked)
        their_outputs = their_model(**inputs(kind), **asked)
    assert list(our_outputs) == list(their_outputs)
    pairs = list(zip(flat(our_outputs), flat(their_outputs), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs) and len(pairs) > 3
    torch.manual_seed(0)
    unpatched = plain(tiny(kind)[1]).eval()
    with torch.no_grad():
        differs = unpatched(**inputs(kind))
    assert not torch.equal(flat(differs)[0], flat(our_outputs)[0])


def flat(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    return (
        [one for part in outputs for one in flat(part)]
        if isinstance(outputs, (list, tuple))
        else []
    )


LATE = """
import sys
from rankscope.compat import apply_patches, clear_patch_mapping, register_patch_mapping
from torch import nn

class Mine(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()

finders = list(sys.meta_path)
register_patch_mapping({"^BertModel$": Mine, "^BertLayer$": Mine})
import transformers
home = "transformers.models.bert"
assert f"{home}.modeling_bert" not in sys.modules
with apply_patches():
    assert f"{home}.modeling_bert" not in sys.modules
    assert transformers.BertModel is transformers.models.bert.BertModel is Mine
    assert sys.modules[f"{home}.modeling_bert"].BertModel is Mine
original = sys.modules[f"{home}.modeling_bert"].BertModel
assert original.__module__ == f"{home}.modeling_bert"
assert transformers.BertModel is transformers.models.bert.BertModel is original
config = transformers.BertConfig(
    hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9
)
loaded = transformers.AutoModel.from_config(config)
assert type(loaded) is original and [type(m) for m in loaded.encoder.layer] == [Mine, Mine]
clear_patch_mapping()
loaded = transformers.AutoModel.from_config(config)
assert not any(type(m) is Mine for m in loaded.modules())
added = [type(one).__module__ for one in sys.meta_path if one not in finders]
assert not any(name.startswith("rankscope") for name in added), added
"""


def test_a_mapping_registered_before_transformers_is_imported_holds_for_what_is_loaded_later() -> (
    None
):
    forked.run([sys.executable, "-c", LATE], check=True, timeout=300)


@pytest.mark.usefixtures("classes_put_back")
def test_a_key_that_is_no_expression_replaces_nothing_in_both() -> None:
    kind, mapping = mappings()["bert, no expression"]
    before = module_classes()
    with pytest.warns(UserWarning, match="not a regular expression"):
        assert patched(ours(), mapping, kind)[0] == before
    assert patched(theirs(), mapping, kind)[0] == before


@pytest.mark.parametrize("kind", ["llama", "bert", "mixtral"])
def test_models_loaded_by_transformers_itself_follow_the_mapping(kind: str, tmp_path: Any) -> None:
    import transformers
    from transformers import modeling_utils

    kept = modeling_utils.apply_patches, modeling_utils.patch_output_recorders
    layer = {"llama": "LlamaDecoderLayer", "bert": "BertLayer", "mixtral": "MixtralDecoderLayer"}
    cls, config = tiny(kind)
    plain = cls(config).eval()
    plain.save_pretrained(tmp_path)
    name = layer[kind]
    original = next(type(m) for m in plain.modules() if type(m).__name__ == name)
    replacement = louder(original)
    ours().register_patch_mapping({f"^{name}$": replacement})
    built = transformers.AutoModel.from_config(config).eval()
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    for model in (built, loaded):
        assert sum(type(m) is replacement for m in model.modules()) == 2
        assert len(model(**inputs(kind), output_hidden_states=True).hidden_states) == 3
    ours().clear_patch_mapping()
    assert (modeling_utils.apply_patches, modeling_utils.patch_output_recorders) == kept
    fresh = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert not any(type(m) is replacement for m in fresh.modules())
    with torch.no_grad():
        ours_of_plain = plain(**inputs(kind), output_hidden_states=True)
        again = fresh(**inputs(kind), output_hidden_states=True)
    torch.testing.assert_close(flat(ours_of_plain), flat(again))  # weights lie elsewhere in memory
    assert len(again.hidden_states) == 3
