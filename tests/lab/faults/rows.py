"""The table of the benchmark: programs, the ranks they run on, and what must be said of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.lab.faults import answers, truth
from tests.lab.faults.expected import Expected
from tests.lab.faults.programs import (
    collectives,
    data,
    experts,
    legal,
    mesh,
    pipeline,
    sequence,
    tensor,
)
from tests.lab.faults.setup import Setup, Trained

Program = Callable[[Setup], Trained]
Oracle = Callable[[Setup, Trained], str]


def always_right(setup: Setup) -> None:
    """A program in which there is no fault to switch on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program of the benchmark."""

    name: str
    about: str
    program: Program
    oracle: Oracle
    """Returns what is wrong after training, proved without rankscope; "" where all is right."""
    expected: Callable[[Setup], Expected | None] = always_right
    ranks: tuple[int, ...] = (2, 4)
    layout: str = ""
    """A layout file, with `{ranks}` and `{rows}` to fill in; none by default."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    reference: Program | None = None
    """Run without its fault by one process, it is what `diff` holds the program to; without one,
    `check` is asked."""
    paths: tuple[str, ...] = ()
    """Rules that give the program's modules the names they have in the reference."""

    @property
    def has_fault(self) -> bool:
        """False for programs that are only there to be left alone."""
        return self.expected is not always_right

    def layout_of(self, setup: Setup) -> str:
        """Return the text of the layout file, "" for none."""
        filled = self.layout.replace("{ranks}", str(setup.ranks))
        return filled.replace("{rows}", str(setup.ranks // 2))


ROWS: tuple[Row, ...] = (
    Row(
        name="ddp-bypassed",
        about="the loop calls the module inside the DDP wrapper",
        program=data.ddp,
        oracle=data.replicas_agree,
        expected=answers.unreduced,
        ranks=(2,),
    ),
    Row(
        name="clipping-on-one-rank",
        about="gradients are clipped on one tensor-parallel rank only",
        program=tensor.clipping,
        oracle=tensor.clipped_alike,
        expected=answers.clipped,
        ranks=(2,),
    ),
    Row(
        name="router-seed",
        about="a router made from a seed that depends on the rank; layout declared",
        program=experts.seeded_routers,
        oracle=experts.routers_agree,
        expected=answers.router,
        ranks=(2,),
        layout=experts.ROUTER_LAYOUT,
    ),
    Row(
        name="router-seed-dtensor",
        about="the same, the router a replicated DTensor",
        program=experts.seeded_dtensor_routers,
        oracle=experts.routers_agree,
        expected=answers.router,
        ranks=(2,),
    ),
    Row(
        name="row-reduce-by-hand",
        about="one row-parallel layer by hand does not sum over ranks; nothing declared",
        program=tensor.by_hand,
        oracle=tensor.replicas_and_slices_right,
        expected=answers.row_reduce,
        ranks=(2,),
    ),
    Row(
        name="row-reduce-declared",
        about="the same, layout declared",
        program=tensor.by_hand,
        oracle=tensor.replicas_and_slices_right,
        expected=answers.row_reduce,
        ranks=(2,),
        layout=tensor.LAYOUT,
    ),
    Row(
        name="row-reduce-dtensor",
        about="one row-parallel layer hands out the local part of its DTensor",
        program=tensor.with_dtensor,
        oracle=tensor.replicated_agree,
        expected=answers.row_reduce,
        ranks=(2,),
    ),
    Row(
        name="group-order",
        about="`new_group` lists in another order on two of the ranks",
        program=mesh.grouped,
        oracle=mesh.summed_with_its_own,
        expected=answers.groups,
        ranks=(4,),
    ),
    Row(
        name="from-local-lie",
        about="`DTensor.from_local(run_check=False)` calls different values replicated",
        program=tensor.lifted,
        oracle=tensor.entered_alike,
        expected=answers.lie,
        ranks=(4,),
    ),
    Row(
        name="infinity",
        about="one infinity in one activation of one rank, at step 3 of a 2x2 mesh",
        program=mesh.fsdp2_tp_four_steps,
        oracle=mesh.finite,
        expected=answers.infinity,
        ranks=(4,),
    ),
    Row(
        name="collectives-swapped",
        about="two all-reduces of one shape in the other order on one rank",
        program=collectives.swapped,
        oracle=collectives.sums_are_sums,
        expected=answers.swap,
        ranks=(2,),
    ),
    Row(
        name="optimizer-too-early",
        about="the optimizer was built before `fully_shard`",
        program=data.fsdp2_with_optimizer,
        oracle=data.parameters_move,
        expected=answers.unmoved,
        ranks=(2,),
    ),
    Row(
        name="no-sync-too-long",
        about="DDP with accumulation, the last micro-batch inside `no_sync` as well",
        program=data.ddp_accumulating,
        oracle=data.replicas_agree,
        expected=answers.unreduced,
    ),
    Row(
        name="gradient-twice",
        about="one tensor-parallel rank counts one norm's gradient twice",
        program=tensor.double_counting,
        oracle=tensor.gradients_agree,
        expected=answers.double_counted,
    ),
    Row(
        name="shard-order-at-load",
        about="one data row loads the slices of a weight in the other order; layout declared",
        program=mesh.loading,
        oracle=mesh.loaded_alike,
        expected=answers.shard_order,
        ranks=(4,),
        layout=mesh.MIXED_LAYOUT,
    ),
    Row(
        name="dtype-left-behind",
        about="one rank keeps one norm in another dtype",
        program=tensor.dtype_left_behind,
        oracle=tensor.dtypes_agree,
        expected=answers.left_dtype,
    ),
    Row(
        name="recompute-random-state",
        about="a checkpointed layer with dropout does not restore the random state",
        program=data.ddp_checkpointing,
        oracle=data.as_without_checkpoints,
        expected=answers.recomputed,
    ),
    Row(
        name="same-rows-everywhere",
        about="every data-parallel rank reads the rows of rank 0",
        program=data.ddp_on_shared_rows,
        oracle=data.rows_differ,
        expected=answers.shared_rows,
    ),
    Row(
        name="stale-pipeline-buffer",
        about="a hand-written stage reads the buffer of the micro-batch before",
        program=pipeline.by_hand,
        oracle=pipeline.buffers_fresh,
        expected=answers.stale,
        ranks=(2,),
    ),
    Row(
        name="context-gradient-kept",
        about="one context-parallel rank keeps its own gradient of one weight",
        program=sequence.split_sequence,
        oracle=sequence.sequence_right,
        expected=answers.own_gradient("layers.{layer}.attention.o_proj"),
    ),
    Row(
        name="router-gradient-kept",
        about="one expert-parallel rank keeps its own gradient of one router",
        program=experts.split_experts,
        oracle=experts.experts_right,
        expected=answers.own_gradient("layers.{layer}.feed_forward.router"),
    ),
    Row(
        name="sequence-norm-partial",
        about="one norm's gradient is not summed under sequence parallelism by hand",
        program=sequence.split_between_layers,
        oracle=sequence.shared_agree,
        expected=answers.partial_norm,
    ),
    Row(
        name="experts-swapped",
        about="one rank loads two experts the other way round; layout declared",
        program=experts.loaded_experts,
        oracle=experts.experts_alike,
        expected=answers.swapped_experts,
        layout=experts.REPLICA_LAYOUT,
    ),
    Row(
        name="ddp",
        about="replicas on different rows",
        program=data.ddp,
        oracle=data.replicas_agree,
    ),
    Row(
        name="ddp-dropout",
        about="replicas whose dropout has a seed of its own on every rank",
        program=data.ddp_with_dropout,
        oracle=data.parameters_agree,
    ),
    Row(
        name="ddp-compiled",
        about="replicas under `torch.compile`",
        program=data.ddp_compiled,
        oracle=data.replicas_agree,
        ranks=(2,),  # compiling takes longer than all other rows
    ),
    Row(
        name="ddp-autocast",
        about="replicas under bf16 autocast",
        program=data.ddp_autocast,
        oracle=data.about_one_process,
        dtypes=("float32",),
    ),
    Row(
        name="fsdp2-uneven",
        about="shards of different sizes",
        program=data.fsdp2,
        oracle=data.parameters_move,
    ),
    Row(
        name="fsdp2-checkpoint-accumulation",
        about="shards, checkpointing, and two micro-batches a step",
        program=data.fsdp2_accumulating,
        oracle=truth.like_one_process,
    ),
    Row(
        name="fsdp2-tp",
        about="2x2 FSDP2 times DTensor tensor parallelism",
        program=mesh.fsdp2_tp,
        oracle=mesh.finite,
        ranks=(4,),
    ),
    Row(
        name="tp-dtensor",
        about="DTensor tensor parallelism",
        program=tensor.with_dtensor,
        oracle=tensor.replicated_agree,
    ),
    Row(
        name="tp-by-hand",
        about="tensor parallelism by hand",
        program=tensor.by_hand,
        oracle=tensor.replicas_and_slices_right,
    ),
    Row(
        name="pipeline",
        about="pipeline stages with different modules",
        program=pipeline.scheduled,
        oracle=pipeline.stages_right,
    ),
    Row(
        name="context-parallel",
        about="the sequence split, keys and values gathered",
        program=sequence.split_sequence,
        oracle=sequence.sequence_right,
    ),
    Row(
        name="expert-parallel",
        about="experts split over ranks, tokens travel to them",
        program=experts.split_experts,
        oracle=experts.experts_right,
    ),
    Row(
        name="sequence-parallel",
        about="tensor parallelism by hand, the sequence split between layers",
        program=sequence.split_between_layers,
        oracle=sequence.shared_agree,
    ),
    Row(
        name="tp-dropout",
        about="tensor parallelism by hand, dropout with a seed of its own on what is cut",
        program=tensor.with_dropout,
        oracle=tensor.kept_agree,
    ),
    Row(
        name="frozen-layer",
        about="DDP with one layer frozen",
        program=legal.frozen_layer,
        oracle=data.parameters_agree,
    ),
    Row(
        name="tied-head",
        about="DDP, the head tied to the embedding",
        program=legal.tied,
        oracle=data.parameters_agree,
    ),
    Row(
        name="one-rank-evaluates",
        about="DDP, rank 0 alone evaluates between steps",
        program=legal.one_rank_evaluates,
        oracle=data.parameters_agree,
    ),
    Row(
        name="stochastic-depth",
        about="DDP, layers left out at random on each rank",
        program=legal.stochastic_depth,
        oracle=data.parameters_agree,
    ),
    Row(
        name="zero",
        about="DDP with a sharded optimizer",
        program=legal.zero,
        oracle=data.replicas_agree,
    ),
    Row(
        name="hsdp",
        about="FSDP2 shards along one axis of a 2x2 mesh, replicas along the other",
        program=legal.hybrid_shards,
        oracle=truth.like_one_process,
        ranks=(4,),
    ),
)
BY_NAME = {row.name: row for row in ROWS}
