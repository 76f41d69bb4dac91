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
from rankscope.diagnosis.check import check
from rankscope.diagnosis.comparison.diff import diff
from rankscope.layout.placement import LayoutSource
from rankscope.record.phases import Phase
from rankscope.tree.reader import open_trace
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


# ---- the plan of transformers --------------------------------------------------------------------


class Around(nn.Module):
    """Holds a model as one of its parts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.policy = model

    def forward(self, **given: Tensor) -> Any:
        return self.policy(**given)


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "part":
        return Around(model)
    if how == "ddp":  # of one replica: the parameters of a model on a mesh are given to it by hand
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(model)
        own = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        return nn.parallel.DistributedDataParallel(model, process_group=own[dist.get_rank()])
    return model


def planned(weights: str, how: str, forgetful: str, out: str) -> None:
    """Trace the forward of a llama alone, as transformers shards it, `how` it is wrapped. Its
    row-parallel layers whose names end so forget their all-reduce."""
    warnings.simplefilter("ignore")
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import RowwiseParallel

    size = dist.get_world_size()
    tp = {"tp_size": 2, "fsdp_size": size // 2} if how == "fsdp" else {"tp_size": size}
    given = {"distributed_config": DistributedConfig(**tp)} if how != "alone" else {}
    model = made("llama", Path(weights), attn_implementation="eager", **given).eval()
    lost = [m for name, m in model.named_modules() if forgetful and name.endswith(forgetful)]
    reduced = RowwiseParallel.transform_output_post_forward

    def unreduced(self: Any, module: nn.Module, output: Any, mesh: Any) -> Any:
        if not any(module is each for each in lost):
            return reduced(self, module, output, mesh)
        return output.to_local() if hasattr(output, "to_local") else output

    RowwiseParallel.transform_output_post_forward = unreduced
    try:
        model = wrapped(model, how)
        with (
            rankscope.trace(out=out, steps="all", phases="forward"),
            torch.set_grad_enabled(how != "inference"),
        ):
            model(**batch("llama", 0))
    finally:
        RowwiseParallel.transform_output_post_forward = reduced


def marked(out: Path) -> dict[str, str]:
    """{layer:slot: placement} of what the plan says, of the second layer and of what has none."""
    found = {}
    for node in (node for step in open_trace(out).steps for node in step.passing()):
        for view in node.slots:
            if view.source is LayoutSource.MARKED and ".0." not in node.path:
                assert (node.phase, view.mesh_name) == (Phase.FORWARD, "marked:tp=2")
                name = ".".join(node.path.split(".")[-2:])
                found[f"{name}:{view.slot}"] = view.placements["tp"]
    return {name: str(placement) for name, placement in found.items()}


COLWISE_LAYERS = [f"self_attn.{x}_proj" for x in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
PLANNED = {
    **{f"{name}:input.0": "Replicate()" for name in COLWISE_LAYERS},
    **{f"{name}:output": "Shard(2)" for name in COLWISE_LAYERS},
    **{f"{name}:input.0": "Shard(2)" for name in ("self_attn.o_proj", "mlp.down_proj")},
    **{f"{name}:output": "Replicate()" for name in ("self_attn.o_proj", "mlp.down_proj")},
    **{
        f"{name}:{slot}": "Replicate()"
        for name in ("lm_head", "model.embed_tokens")
        for slot in ("input.0", "output")
    },
}


@pytest.mark.parametrize("how", ["inference", "gradients", "part", "ddp", "fsdp"])
def test_a_plan_says_how_activations_lie_however_the_model_is_wrapped(
    ranks: RankPool, alone: dict[str, tuple[Path, Path]], tmp_path: Path, how: str
) -> None:
    """Without parameters in the trace nothing else says or proves it."""
    weights, _ = alone["llama"]
    world = 4 if how == "fsdp" else 2
    out = traced(ranks, planned, str(weights), how, "", folder=tmp_path / "t", world=world)
    found = {name.removeprefix("policy."): said for name, said in marked(out).items()}
    assert found == PLANNED
    report = check(out)
    assert report.verdict.value == "clean" and report.findings == ()


def test_with_its_plan_more_of_a_model_is_judged_and_compared(
    ranks: RankPool, alone: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    weights, _ = alone["llama"]
    one = traced(ranks, planned, str(weights), "alone", "", folder=tmp_path / "one", world=1)
    two = traced(ranks, planned, str(weights), "gradients", "", folder=tmp_path / "two", world=2)
    report = check(two)
    assert (report.judged, report.recorded) == (47, 86)  # without the plan 21
    compared = diff(one, two)
    assert compared.verdict.value == "clean"
    assert (compared.compared, compared.recorded) == (86, 86)


@pytest.mark.parametrize("how", ["inference", "gradients"])
@pytest.mark.parametrize(
    ("forgetful", "named"),
    [
        ("1.self_attn.o_proj", "model.layers.1.self_attn.o_proj"),
        ("0.mlp.down_proj", "model.layers.0.mlp.down_proj"),
        # no layer does it right
        ("_proj", "model.layers.0.self_attn.o_proj"),
    ],
)
def test_a_forgotten_all_reduce_behind_a_row_parallel_layer_is_named(
    ranks: RankPool,
    alone: dict[str, tuple[Path, Path]],
    tmp_path: Path,
    forgetful: str,
    named: str,
    how: str,
) -> None:
    weights, _ = alone["llama"]
    out = traced(ranks, planned, str(weights), how, forgetful, folder=tmp_path / "t", world=2)
    (origin,) = check(out).origins
    assert (origin.kind.value, origin.path, origin.slot, origin.ranks) == (
        *("replica-mismatch", named, "output", (0, 1)),
    )
    assert origin.evidence["layout"] == "marked"
