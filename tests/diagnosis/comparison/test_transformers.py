"""Models of transformers beside themselves: in one process, and parallelized in the ways that
people parallelize them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import rankscope
from rankscope.diagnosis.comparison.diff import diff
from tests.diagnosis.traced import traced
from tests.distributed.pool import RankPool

pytest.importorskip("transformers", reason="transformers is not installed: pip install .[test]")

SAMPLES, TOKENS, VOCABULARY, IMAGE = 4, 16, 128, 127
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
COLWISE = (
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "query", "key", "value",
    "intermediate.dense",
)  # fmt: skip
ROWWISE = ("o_proj", "down_proj", "output.dense")
WAYS = ("tp_plan", "dtensor", "fsdp2", "ddp")


def made(name: str, folder: Path | None = None, **how: Any) -> nn.Module:
    """Return a tiny model with random weights; from a folder, in the way that is asked for."""
    import transformers as hf

    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    decoder = {**SIZES, "num_key_value_heads": 2}
    if name == "llama":
        config, cls = hf.LlamaConfig(**decoder), hf.LlamaForCausalLM
    elif name == "bert":
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config, cls = hf.BertConfig(**SIZES, **quiet), hf.BertForMaskedLM
    elif name == "mixtral":
        more = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
        config, cls = hf.MixtralConfig(**decoder, **more), hf.MixtralForCausalLM
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
        seen = {"num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
        config, cls = (
            hf.LlavaConfig(
                vision_config=hf.CLIPVisionConfig(**sizes, **seen),
                text_config=hf.LlamaConfig(**decoder),
                image_token_index=IMAGE,
                vision_feature_layer=-1,
            ),
            hf.LlavaForConditionalGeneration,
        )
    if folder is None:
        return cls(config)
    return cls.from_pretrained(folder, **how)


def parallelized(model: nn.Module, way: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    world = dist.get_world_size()
    if way == "fsdp2":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        for module in model.modules():
            if type(module).__name__.endswith(("DecoderLayer", "BertLayer")):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if way == "dtensor":
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        linear = {p for p, m in model.named_modules() if isinstance(m, nn.Linear)}
        plan: dict[str, Any] = {p: ColwiseParallel() for p in linear if p.endswith(COLWISE)}
        plan |= {p: RowwiseParallel() for p in linear if p.endswith(ROWWISE)}
        parallelize_module(model, mesh, {p: s for p, s in plan.items() if "vision" not in p})
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    return model


def job(name: str, way: str, folder: str, out: str) -> None:
    """Train two steps on the whole batch, or on this data-parallel rank's part."""
    warnings.simplefilter("ignore")
    how: dict[str, Any] = {"attn_implementation": "eager"}
    if way == "tp_plan":
        how["tp_plan"] = "auto"
    model = parallelized(made(name, Path(folder), **how).train(), way)
    parts = dist.get_world_size() if way in ("fsdp2", "ddp") else 1
    size, number = SAMPLES // parts, dist.get_rank() if parts > 1 else 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with rankscope.trace(out=out, steps="all"):
        for step in range(2):
            given = {
                word: value[number * size : (number + 1) * size]
                for word, value in batch(name, step).items()
            }
            model(**given).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def batch(name: str, step: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(step)
    tokens = torch.randint(IMAGE, (SAMPLES, TOKENS), generator=source)
    if name != "llava":
        return {"input_ids": tokens, "labels": tokens.clone()}
    tokens[:, 1:5] = IMAGE
    images = torch.randn(SAMPLES, 3, 16, 16, generator=source)
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    return {"input_ids": tokens, "labels": labels, "pixel_values": images}


@pytest.fixture(scope="module")
def alone(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """By model: the folder of its weights, and the trace of one process."""
    found = {}
    for name in ("llama", "bert", "mixtral", "llava"):
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        made(name).save_pretrained(folder / "weights")
        out = folder / "trace"
        ranks.run(job, name, "", str(folder / "weights"), str(out), world_size=1)
        found[name] = (folder / "weights", out)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "bert", "mixtral", "llava"])
def test_a_model_of_transformers_is_itself_however_it_is_parallelized(
    ranks: RankPool, alone: dict[str, tuple[Path, Path]], tmp_path: Path, name: str, way: str
) -> None:
    if (name, way) == ("bert", "tp_plan"):
        pytest.skip("transformers has no plan for tensor parallelism of BERT")
    weights, ref = alone[name]
    found = traced(ranks, job, name, way, str(weights), folder=tmp_path / "t", world=2)
    report = diff(ref, found)
    assert report.origins == ()
    is_balanced = name == "mixtral" and way in ("fsdp2", "ddp")
    assert [(f.path, f.slot) for f in report.findings] == [("", "output.aux_loss")] * is_balanced
    assert report.verdict.value == "clean"
    assert report.compared >= 0.8 * report.recorded > 300


def rollout(weights: str, lengths: list[int], out: str) -> None:
    """Run the tokens of the first training step through a cache, in calls of these lengths."""
    model = made("llama", Path(weights), attn_implementation="eager").eval()
    tokens = batch("llama", 0)["input_ids"]
    cache, start = None, 0
    with rankscope.trace(out=out, steps="all"), torch.no_grad():
        for length in lengths:
            own = tokens[:, start : start + length]
            cache = model(input_ids=own, past_key_values=cache, use_cache=True).past_key_values
            start += length


@pytest.mark.parametrize("lengths", [[16], [1] * 16, [6, *[1] * 10]])
def test_a_rollout_of_llama_is_the_forward_of_its_training_step(
    ranks: RankPool, alone: dict[str, tuple[Path, Path]], tmp_path: Path, lengths: list[int]
) -> None:
    weights, ref = alone["llama"]
    out = tmp_path / "t" / "trace"
    ranks.run(rollout, str(weights), lengths, str(out), world_size=1)
    report = diff(ref, out)
    assert report.verdict.value == "clean" and report.findings == ()
    assert report.compared >= 0.8 * report.recorded > 80
