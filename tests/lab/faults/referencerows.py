"""What `diff` is held to: programs, the run of one process that is right, and what must be said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.lab.faults import truth
from tests.lab.faults.answers import all_ranks
from tests.lab.faults.expected import Expected
from tests.lab.faults.programs import (
    compared,
    data,
    experts,
    legal,
    mesh,
    pipeline,
    ports,
    sequence,
    tensor,
)
from tests.lab.faults.rows import Row
from tests.lab.faults.setup import Setup
from tests.lab.real.programs import byhand

Answer = Callable[[Setup], Expected]
FLOAT32 = ("float32",)
UNKNOWN = '"rank_resolution": "none"'
"""Digests cannot tell whose piece is wrong, and the evidence says so."""


def first(
    kinds: str, phase: str, *places: str, told: tuple[str, ...] = (), step: int | None = 0
) -> Answer:
    """Return what is expected of all ranks: kinds with "|" between them, and places, each as
    "path:slot" with `{layer}` for the layer of the fault."""

    def answer(setup: Setup) -> Expected:
        filled = (place.format(layer=setup.layer, next=setup.layer + 1) for place in places)
        return Expected(
            kinds=tuple(kinds.split("|")),
            phases=tuple(phase.split("|")),
            places=tuple((path, slot) for path, _, slot in (f.partition(":") for f in filled)),
            ranks=all_ranks(setup),
            step=step,
            evidence=tuple(each.format(ranks=setup.ranks) for each in told),
        )

    return answer


def on_last(answer: Answer) -> Answer:
    """Return the same of the last rank alone."""
    return lambda setup: replace(answer(setup), ranks=(setup.ranks - 1,))


def on_culprit(answer: Answer) -> Answer:
    """Return the same of the rank that the fault sits on."""
    return lambda setup: replace(answer(setup), ranks=(setup.culprit,))


def all_gradients(setup: Setup) -> Expected:
    """One finding for all of them."""
    return first("scale-error", "grads", ":", told=("number of ranks, {ranks}",))(setup)


def port(name: str, about: str, program: object, expected: Answer, **more: object) -> Row:
    """Return the row of one process with one mistake."""
    told = {
        "ranks": (1,),
        "reference": ports.right,
        "oracle": ports.like_original,
        **more,
    }
    return Row(name=name, about=about, program=program, expected=expected, **told)


def split(name: str, about: str, program: object, expected: Answer, **more: object) -> Row:
    """Return the row of a program on several ranks."""
    told = {
        "ranks": (2,),
        "reference": compared.alone,
        "oracle": truth.like_one_process,
        **more,
    }
    return Row(name=name, about=about, program=program, expected=expected, **told)


def silent(name: str, about: str, program: object, **more: object) -> Row:
    """Return the row of a program that is right."""
    told = {
        "ranks": (2,),
        "reference": compared.alone,
        "oracle": truth.like_one_process,
        **more,
    }
    return Row(name=name, about=about, program=program, **told)


ATTENTION = "layers.{layer}.attention"
FEED_FORWARD = "layers.{layer}.feed_forward"
BEFORE_O_PROJ = first("divergence", "forward", f"{ATTENTION}.o_proj:input.0")
BEHIND_WEIGHTS = first(
    "divergence", "forward", *(f"{ATTENTION}{end}" for end in (".o_proj:input.0", ".o_proj:output"))
)
"""Statistics of pieces tell the former in float32."""
WRONG_POSITIONS = first("divergence", "forward|grads", "layers.0:input.0", ":")

ROWS: tuple[Row, ...] = (
    # ---- one process ---------------------------------------------------------------------------
    port(
        "wrong-eps",
        "a port whose one norm has eps 1e-3, not 1e-6",
        ports.attribute("attention_norm", "eps", 1e-3),
        first("divergence|scale-error", "forward", "layers.{layer}.attention_norm:output"),
        dtypes=FLOAT32,
    ),
    port(
        "wrong-eps-renamed",
        "a port under other names, one norm with eps 1e-3; `--map`",
        ports.renamed,
        first("divergence|scale-error", "forward", "transformer.h.{layer}.ln_2:output"),
        dtypes=FLOAT32,
        paths=ports.RENAMED,
    ),
    port(
        "transposed-weight",
        "a square weight is transposed",
        ports.changed(ports.transposed),
        first("permutation", "setup", f"{ATTENTION}.o_proj:param:weight"),
    ),
    port(
        "fused-order",
        "keys and values change places in a fused weight",
        ports.changed(ports.swapped_halves),
        first("permutation", "setup", f"{ATTENTION}.qkv_proj:param:weight"),
    ),
    port(
        "left-random",
        "one weight is not loaded",
        ports.changed(ports.left_random),
        first("divergence", "setup", f"{FEED_FORWARD}.up_proj:param:weight"),
    ),
    port(
        "head-split",
        "a fused projection is split head by head, not into thirds",
        ports.attribute("attention", "is_grouped", False),
        BEFORE_O_PROJ,
    ),
    port(
        "head-repeat",
        "shared keys are repeated as a whole, not one by one",
        ports.attribute("attention", "is_repeated_whole", True),
        BEFORE_O_PROJ,
    ),
    port(
        "paired-rotation",
        "positions rotate neighbours, not halves",
        ports.attribute("attention", "is_paired", True),
        BEFORE_O_PROJ,
    ),
    port(
        "rotation-offset",
        "in one layer positions begin at 1, for keys of a cache of none",
        ports.attribute("attention", "key_offset", 1),
        BEFORE_O_PROJ,
    ),
    port(
        "unscaled-scores",
        "no division by the root of the heads' width",
        ports.attribute("attention", "scale", 1.0),
        BEFORE_O_PROJ,
    ),
    port(
        "no-mask",
        "attention sees later tokens",
        ports.attribute("attention", "is_causal", False),
        BEFORE_O_PROJ,
    ),
    port(
        "approximate-gelu",
        "GELU by tanh",
        ports.attribute("feed_forward.act", "approximate", "tanh"),
        first("divergence|scale-error", "forward", f"{FEED_FORWARD}.act:output"),
        dtypes=FLOAT32,
    ),
    port(
        "swapped-gate",
        "gate and up change places behind their products",
        ports.attribute("feed_forward", "is_swapped", True),
        first("divergence", "forward", f"{FEED_FORWARD}.act:input.0"),
    ),
    port(
        "one-more",
        "a norm multiplies by one more than its weight",
        ports.changed(ports.one_more),
        first("scale-error", "forward", "layers.{layer}.attention_norm:output"),
    ),
    port(
        "norm-of-other",
        "a norm is given the sum with the branch counted twice",
        ports.attribute("", "is_norm_skipped", True),
        first("divergence", "forward", "layers.{layer}.feed_forward_norm:input.0"),
    ),
    port(
        "unscaled-embedding",
        "embeddings are not multiplied by the root of the width",
        ports.changed(ports.unscaled),
        first("scale-error", "forward", "layers.0:input.0"),
    ),
    port(
        "dropout-left-in",
        "dropout that the reference has not",
        ports.changed(ports.dropping),
        first("divergence", "forward", "layers.{layer}.dropout:output"),
    ),
    port(
        "layer-order",
        "the first layer is run last",
        ports.changed(ports.last_first),
        first("divergence", "forward", "layers.0:input.0", "layers.1:input.0"),
    ),
    port(
        "tie-lost",
        "the head is a copy of the embedding, and should be the same",
        ports.changed(ports.untied),
        first("divergence", "grads", "embed:grad:weight"),
    ),
    port(
        "detached-residual",
        "a residual is detached",
        ports.attribute("", "is_detached", True),
        first("divergence", "backward", "layers.{layer}.attention_norm:grad_input.0"),
    ),
    port(
        "shifted-twice",
        "targets are shifted once more in the loss",
        ports.losing(ports.shifted_twice),
        first("divergence", "backward", ":grad_output"),
    ),
    port(
        "padding-counted",
        "the mean loss counts padding",
        ports.losing(ports.counting_padding),
        first("scale-error", "backward", ":grad_output"),
    ),
    port(
        "means-of-halves",
        "accumulation averages means of unequally many tokens",
        ports.accumulated,
        first("scale-error", "backward", ":grad_output"),
    ),
    port(
        "undivided-halves",
        "accumulation does not divide by the micro-batches",
        ports.undivided,
        first("scale-error", "backward|grads", ":grad_output", ":", told=("micro-batches, 2",)),
    ),
    port(
        "clipping-forgotten",
        "gradients are not clipped",
        ports.clipped,
        first("scale-error", "grads", ":"),
        reference=ports.clipped,
        oracle=ports.like_clipped,
    ),
    port(
        "norms-decay",
        "weights of norms decay",
        ports.stepped(ports.decaying),
        first("divergence|scale-error", "params", "*norm:param:weight"),
        dtypes=FLOAT32,
    ),
    port(
        "other-rate",
        "the learning rate is twice as large",
        ports.stepped(ports.twice_the_rate),
        first("scale-error", "params", ":"),
        dtypes=FLOAT32,
    ),
    # ---- tensor parallelism --------------------------------------------------------------------
    split(
        "averaged-reduction",
        "a row-parallel layer averages over ranks",
        compared.averaged_reduction,
        first(
            "scale-error",
            "forward",
            f"{ATTENTION}.o_proj:output",
            told=("number of ranks, {ranks}",),
        ),
        ranks=(2, 4),
    ),
    split(
        "missing-reduction",
        "a row-parallel layer does not sum over ranks",
        tensor.by_hand,
        first("replica-mismatch", "forward", f"{ATTENTION}.o_proj:output"),
        ranks=(2, 4),
    ),
    split(
        "averaged-backward",
        "a column-parallel layer averages its input's gradient over ranks",
        compared.averaged_backward,
        first("scale-error", "backward", f"{FEED_FORWARD}.up_proj:grad_input.0"),
    ),
    split(
        "unreduced-backward",
        "a column-parallel layer does not sum its input's gradient over ranks",
        compared.unreduced_backward,
        first("replica-mismatch", "backward", f"{FEED_FORWARD}.up_proj:grad_input.0"),
    ),
    split(
        "summed-twice",
        "a row-parallel layer sums its gradients over ranks, which are complete",
        compared.summed_twice,
        first(
            "scale-error",
            "backward|grads",
            f"{FEED_FORWARD}.down_proj:grad_input.0",
            told=("number of ranks, {ranks}",),
        ),
    ),
    split(
        "late-vocabulary",
        "the rows of a split embedding begin one too late",
        compared.split_vocabulary,
        first("divergence", "forward", "embed:output"),
    ),
    split(
        "fused-cut",
        "a fused projection is cut as if it were one",
        compared.fused,
        BEHIND_WEIGHTS,
        reference=ports.right,
        oracle=compared.fused_right,
    ),
    split(
        "gathered-logits",
        "a loss over a split vocabulary is handed all logits",
        byhand.gathered_logits,
        first("divergence|scale-error", "forward", "criterion:output"),
        dtypes=FLOAT32,
        reference=byhand.alone_with_loss,
        oracle=byhand.gathered_right,
    ),
    split(
        "gradient-twice",
        "one tensor-parallel rank counts one norm's gradient twice",
        tensor.double_counting,
        on_culprit(first("scale-error", "grads", "layers.{layer}.feed_forward_norm:grad:weight")),
        oracle=tensor.gradients_agree,
    ),
    split(
        "sequence-norm-partial",
        "one norm's gradient is not summed under sequence parallelism by hand",
        sequence.split_between_layers,
        first("gradient-not-reduced", "grads", "layers.{layer}.feed_forward_norm:grad:weight"),
        oracle=sequence.shared_agree,
    ),
    # ---- data parallelism ----------------------------------------------------------------------
    split(
        "ddp-summed",
        "DDP adds gradients and does not average",
        compared.ddp_summed,
        all_gradients,
        ranks=(2, 4),
    ),
    split(
        "fsdp2-summed",
        "FSDP2 adds gradients and does not average",
        compared.fsdp2_summed,
        all_gradients,
    ),
    split(
        "ddp-bypassed",
        "the loop calls the module inside the DDP wrapper",
        data.ddp,
        first("gradient-not-reduced", "grads", "*:grad:*"),
    ),
    split(
        "own-tokens",
        "every rank takes the mean over its own tokens",
        compared.own_tokens,
        first("scale-error", "backward", ":grad_output"),
        reference=ports.right,
        oracle=ports.like_original,
    ),
    split(
        "same-rows-everywhere",
        "every data-parallel rank reads the rows of rank 0",
        data.ddp_on_shared_rows,
        first("duplicate-data", "forward", ":input.0"),
        oracle=data.rows_differ,
    ),
    split(
        "shard-order-at-load",
        "one data row loads the slices of a weight in the other order",
        mesh.loading,
        lambda setup: replace(BEHIND_WEIGHTS(setup), ranks=(2, 3)),
        ranks=(4,),
        oracle=mesh.loaded_alike,
    ),
    # ---- context parallelism -------------------------------------------------------------------
    split(
        "loss-times-ranks",
        "the loss is multiplied by the context-parallel degree",
        compared.split_sequence("loss"),
        first("scale-error", "backward", ":grad_output", told=("number of ranks, {ranks}",)),
        ranks=(2, 4),
    ),
    split(
        "context-summed",
        "gradients of context-parallel ranks are added, not averaged",
        compared.split_sequence("summed"),
        all_gradients,
    ),
    split(
        "positions-from-zero",
        "positions begin at 0 on every context-parallel rank",
        compared.split_sequence("zero"),
        WRONG_POSITIONS,
    ),
    split(
        "zigzag-positions",
        "a zig-zag split of the sequence, with positions of neighbours",
        compared.split_sequence("neighbours", is_zigzag=True),
        WRONG_POSITIONS,
    ),
    split(
        "context-gradient-kept",
        "one context-parallel rank keeps its own gradient of one weight",
        sequence.split_sequence,
        on_culprit(first("replica-mismatch", "grads", f"{ATTENTION}.o_proj:grad:weight")),
        ranks=(4,),
    ),
    # ---- experts -------------------------------------------------------------------------------
    split(
        "experts-times-ranks",
        "gradients of experts are not divided by the ranks that tokens come from",
        compared.named_experts,
        first(
            "scale-error", "grads", "layers.*.experts.*:grad:*", told=("number of ranks, {ranks}",)
        ),
        reference=compared.experts_alone,
        oracle=compared.experts_right,
    ),
    split(
        "balance-times-ranks",
        "the loss that balances experts is counted once a rank",
        compared.balanced,
        first("divergence", "backward", "layers.*.router:grad_output"),
        reference=compared.balance_alone,
        oracle=compared.balance_right,
    ),
    split(
        "router-seed",
        "a router made from a seed that depends on the rank",
        experts.seeded_routers,
        first("divergence|replica-mismatch", "setup", f"{FEED_FORWARD}.router:param:weight"),
        reference=experts.seeded_routers,
        oracle=experts.routers_agree,
    ),
    # ---- pipelines -----------------------------------------------------------------------------
    split(
        "unscaled-stages",
        "a pipeline adds the gradients of micro-batches and does not average",
        compared.unscaled_stages,
        first("scale-error", "backward|grads", ":grad_output", ":", told=("micro-batches, 4",)),
        oracle=pipeline.stages_right,
    ),
    split(
        "wrong-layer",
        "the last stage is filled with the layer before",
        compared.wrong_layer,
        on_last(first("divergence", "setup", "layers.*:param:weight")),
        oracle=pipeline.stages_right,
    ),
    split(
        "stale-pipeline-buffer",
        "a hand-written stage reads the buffer of the micro-batch before",
        pipeline.by_hand,
        on_last(first("divergence", "forward", "layers.*:input.0")),
        oracle=pipeline.buffers_fresh,
    ),
    # ---- right programs ------------------------------------------------------------------------
    silent("ddp", "replicas on different rows", data.ddp, ranks=(2, 4)),
    silent(
        "ddp-autocast",
        "replicas under bf16 autocast",
        data.ddp_autocast,
        oracle=data.about_one_process,
        dtypes=FLOAT32,
    ),
    silent("fsdp2-uneven", "shards of different sizes", data.fsdp2, ranks=(2, 4)),
    silent(
        "fsdp2-checkpoint-accumulation",
        "shards, checkpointing, and two micro-batches a step",
        data.fsdp2_accumulating,
    ),
    silent("fsdp2-tp", "2x2 FSDP2 times DTensor tensor parallelism", mesh.fsdp2_tp, ranks=(4,)),
    silent(
        "hsdp",
        "FSDP2 shards along one axis of a 2x2 mesh, replicas along the other",
        legal.hybrid_shards,
        ranks=(4,),
    ),
    silent("tp-dtensor", "DTensor tensor parallelism", tensor.with_dtensor, ranks=(2, 4)),
    silent("tp-by-hand", "tensor parallelism by hand", tensor.by_hand, ranks=(2, 4)),
    silent(
        "pipeline",
        "pipeline stages with different modules",
        pipeline.scheduled,
        oracle=pipeline.stages_right,
        ranks=(2, 4),
    ),
    silent(
        "context-parallel",
        "the sequence split, keys and values gathered",
        sequence.split_sequence,
        ranks=(2, 4),
    ),
    silent(
        "sequence-parallel",
        "tensor parallelism by hand, the sequence split between layers",
        sequence.split_between_layers,
        oracle=sequence.shared_agree,
        ranks=(2, 4),
    ),
    silent(
        "expert-parallel",
        "experts split over ranks, tokens travel to them; each rank counts its own from 0",
        experts.split_experts,
        reference=compared.experts_alone,
        oracle=experts.experts_right,
        ranks=(2, 4),
    ),
    silent("zero", "DDP with a sharded optimizer", legal.zero),
)
BY_NAME = {row.name: row for row in ROWS}
