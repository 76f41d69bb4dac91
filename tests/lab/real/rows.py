"""The table of public bugs: where each was reported, its program, and what must be said of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.lab.faults.answers import all_ranks, parameter_names, unreduced
from tests.lab.faults.expected import Expected
from tests.lab.faults.programs.compared import alone
from tests.lab.faults.rows import Row
from tests.lab.faults.setup import Setup
from tests.lab.real.programs import (
    beside,
    byhand,
    dtensors,
    experts,
    frameworks,
    huggingface,
    loops,
    shards,
    stages,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug(Row):
    """One public bug; where it has a reference, `diff` is asked and not `check`."""

    source: str
    """Tracker and number."""
    url: str
    """"" where nobody reported it."""
    ranks: tuple[int, ...] = (2,)
    dtypes: tuple[str, ...] = ("float32",)
    missed: str = ""
    """Why `check` does not name it; "" where it does."""
    alarm: str = ""
    """What `check` says of the right twin; "" where that is clean."""
    package: str = ""
    """What has to be installed."""

    @property
    def is_installed(self) -> bool:
        """Whether the library is there that the program drives."""
        return not self.package or importlib.util.find_spec(self.package) is not None

    @property
    def in_words(self) -> str:
        """The begin of its row on the page: name with its report, and what is wrong."""
        name = f"[{self.name}]({self.url})" if self.url else self.name
        return f"* {name}: {self.about}\n"


def ignored(setup: Setup) -> Expected:
    return Expected(
        kinds=("gradient-not-reduced",),
        phases=("grads",),
        places=(("*norm", "grad:*"),),
        all_of=(("norm", "grad:weight"), ("norm", "grad:bias")),
        ranks=all_ranks(setup),
        step=0,
    )


def equal_shards(setup: Setup) -> Expected:
    """The second layer's five rows make shards of three and of two: what they have in common is in
    no digest."""
    return Expected(
        kinds=("placement-mismatch", "duplicate-data"),
        phases=("setup",),
        places=(("fc1", "param:weight"), ("fc2", "param:weight")),
        ranks=all_ranks(setup),
    )


def scaled_between(setup: Setup) -> Expected:
    """Something between backward and step gave every rank's gradients another factor."""
    return Expected(
        kinds=("scale-error",),
        phases=("grads",),
        places=(("*", "grad:*"),),
        ranks=all_ranks(setup),
        step=0,
    )


def lost(setup: Setup) -> Expected:
    """The step saw one micro-batch, the model two."""
    return Expected(
        kinds=("scale-error",),
        phases=("grads",),
        places=(("*", "grad:*"),),
        all_of=tuple((path, f"grad:{name}") for path, name in parameter_names(setup)),
        ranks=all_ranks(setup),
        step=0,
    )


def lost_inside(setup: Setup) -> Expected:
    """The same in an engine that keeps gradients to itself: the step shows in parameters alone."""
    return replace(lost(setup), places=(("*", "grad:*"), ("*", "param:*")), all_of=())


def activation_scalars(setup: Setup) -> Expected:
    names = tuple(
        (f"model.layers.{n}.mlp.act_fn", f"grad:alpha_{sign}") for n in range(2) for sign in "pn"
    )
    return Expected(
        kinds=("gradient-not-reduced", "replica-mismatch"),
        phases=("grads",),
        places=names,
        all_of=names,
        ranks=all_ranks(setup),
        step=0,
    )


def partial_called_replicated(setup: Setup) -> Expected:
    return Expected(
        kinds=("placement-mismatch", "replica-mismatch"),
        phases=("backward",),
        places=(("contrast", "grad_input*"), ("gather", "grad_output*")),
        ranks=all_ranks(setup),
        step=0,
    )


def head_norm_gradients(setup: Setup) -> Expected:
    names = tuple(
        (f"layers.{n}.attention.q_proj.2", "grad:weight") for n in range(setup.shape.layers)
    )
    return Expected(
        kinds=("gradient-not-reduced", "replica-mismatch", "placement-mismatch"),
        phases=("grads",),
        places=names,
        all_of=names,
        ranks=all_ranks(setup),
        step=0,
    )


def misplaced_block(setup: Setup) -> Expected:
    """Its weights lie on another mesh than those of its siblings, and its input is not what its
    placement says."""
    path = f"layers.{setup.layer}.feed_forward"
    return Expected(
        kinds=("placement-mismatch",),
        phases=("setup", "forward"),
        places=((f"{path}*", "param:*"), (f"{path}*", "input*")),
        ranks=all_ranks(setup),
    )


def untied(setup: Setup) -> Expected:
    return Expected(
        kinds=("structure-mismatch",),
        phases=("setup",),
        places=(("head", "param:weight"), ("embed", "param:weight")),
        ranks=all_ranks(setup),
    )


def unsummed_input(path: str) -> Callable[[Setup], Expected]:
    """The gradients of a module's output agree and those of its input do not."""

    def expectation(setup: Setup) -> Expected:
        return Expected(
            kinds=("replica-mismatch",),
            phases=("backward",),
            places=((path.format(layer=setup.layer), "grad_input*"),),
            ranks=all_ranks(setup),
            step=0,
        )

    return expectation


def unsummed_in_every_layer(setup: Setup) -> Expected:
    """In the last layer first: that is where backward begins."""
    return Expected(
        kinds=("replica-mismatch",),
        phases=("backward",),
        places=((f"layers.{setup.shape.layers - 1}.attention", "grad_input*"),),
        ranks=all_ranks(setup),
        step=0,
    )


def wrong_group(setup: Setup) -> Expected:
    return Expected(
        kinds=("replica-mismatch", "group-mismatch", "collective-mismatch"),
        phases=("forward", "collective"),
        places=(
            (f"layers.{setup.layer}.attention.o_proj", "output"),
            (f"layers.{setup.layer}.attention.o_proj", "collective.*"),
            (f"layers.{setup.layer}.attention", "output"),
        ),
        ranks=all_ranks(setup),
        step=0,
    )


def other_input(setup: Setup) -> Expected:
    return Expected(
        kinds=("replica-mismatch",),
        phases=("forward",),
        places=(("", "input*"), ("embed", "input*")),
        ranks=all_ranks(setup),
        step=0,
    )


def other_loss(setup: Setup) -> Expected:
    return Expected(
        kinds=("replica-mismatch",),
        phases=("backward",),
        places=(("", "grad_output*"), ("head", "grad_output*")),
        ranks=all_ranks(setup),
        step=0,
    )


def norm_gradients(setup: Setup) -> Expected:
    norms = tuple((p, f"grad:{n}") for p, n in parameter_names(setup) if "norm" in p)
    return Expected(
        kinds=("gradient-not-reduced", "replica-mismatch"),
        phases=("grads",),
        places=norms,
        all_of=norms,
        ranks=all_ranks(setup),
        step=0,
    )


def crossed(setup: Setup) -> Expected:
    attention = f"layers.{setup.layer}.attention"
    return Expected(
        kinds=("collective-mismatch",),
        phases=("collective", "grads"),
        places=((f"{attention}.q_proj", "*"), (f"{attention}.k_proj", "*")),
        ranks=all_ranks(setup),
        step=0,
    )


def all_unreduced_in(prefix: str) -> Callable[[Setup], Expected]:
    """No gradient of the model was reduced; `prefix` leads to the model."""

    def expectation(setup: Setup) -> Expected:
        return replace(
            unreduced(setup),
            kinds=("gradient-not-reduced", "replica-mismatch"),
            all_of=tuple((prefix + p, f"grad:{name}") for p, name in parameter_names(setup)),
        )

    return expectation


def unreduced_adapters(setup: Setup) -> Expected:
    """Adapters stand beside the model: nothing says what they are called."""
    return replace(
        unreduced(setup),
        kinds=("gradient-not-reduced", "replica-mismatch"),
        places=(("*down", "grad:weight"), ("*up", "grad:weight")),
    )


def some_unreduced(*names: str, step: int = 0) -> Callable[[Setup], Expected]:
    """Gradients that no reduction reached; `{layer}` is the layer of the fault, `*` every layer."""

    def expectation(setup: Setup) -> Expected:
        layers = range(setup.shape.layers)
        found = [
            name.format(layer=setup.layer).replace("*", str(n)).rpartition(".")
            for name in names
            for n in (layers if "*" in name else layers[:1])
        ]
        places = tuple((path, f"grad:{name}") for path, _, name in found)
        return Expected(
            kinds=("gradient-not-reduced", "replica-mismatch"),
            phases=("grads",),
            places=places,
            all_of=places,
            ranks=all_ranks(setup),
            step=step,
        )

    return expectation


def thawed(setup: Setup) -> Expected:
    """The parameters of one layer, from the step on in which they have gradients."""
    prefix = f"layers.{setup.layer}."
    names = [f"{path}.{name}" for path, name in parameter_names(setup) if path.startswith(prefix)]
    return some_unreduced(*names, step=1)(setup)


def differing_output(path: str) -> Callable[[Setup], Expected]:
    """The inputs of a module agree and its output does not."""

    def expectation(setup: Setup) -> Expected:
        return Expected(
            kinds=("replica-mismatch",),
            phases=("forward",),
            places=((path, "output"), (path, "returned")),
            ranks=all_ranks(setup),
            step=0,
        )

    return expectation


def unsummed_scores(setup: Setup) -> Expected:
    return replace(
        unsummed_in_every_layer(setup),
        places=((f"layers.{setup.shape.layers - 1}.feed_forward.experts", "grad_input*"),),
    )


def never_learns(setup: Setup) -> Expected:
    names = tuple(
        (f"layers.{n}.feed_forward.router", "param:weight") for n in range(setup.shape.layers)
    )
    return Expected(
        kinds=("parameter-not-updated",),
        phases=("params", "grads"),
        places=names,
        all_of=names,
        ranks=all_ranks(setup),
        step=0,
    )


def two_copies(setup: Setup) -> Expected:
    return Expected(
        kinds=("structure-mismatch", "replica-mismatch", "gradient-not-reduced"),
        phases=("setup", "grads", "params"),
        places=(("embed", "*:weight"), ("head", "*:weight")),
        ranks=all_ranks(setup),
    )


def clipped_apart(setup: Setup) -> Expected:
    """What all ranks hold has another factor on each."""
    names = ("embed", "positions", "norm", "head", "layers.*.attention_norm")
    return replace(
        some_unreduced(*(f"{n}.weight" for n in (*names, "layers.*.feed_forward_norm")))(setup),
        kinds=("replica-mismatch", "scale-error"),
    )


def unsummed_gather(setup: Setup) -> Expected:
    """What was gathered is the same on all ranks, its gradient is not, and nobody sums it."""
    return Expected(
        kinds=("replica-mismatch", "gradient-not-reduced", "collective-mismatch"),
        phases=("backward",),
        places=(("gather", "grad_output*"), ("gather", "grad_input*"), ("contrast", "grad_input*")),
        ranks=all_ranks(setup),
        step=0,
    )


def seeded_adapter(setup: Setup) -> Expected:
    """Its weights differ from the begin; what it gives differs as soon as it gives something."""
    return Expected(
        kinds=("replica-mismatch",),
        phases=("setup", "forward"),
        places=(("head.adapter.down", "param:weight"), ("head.adapter.down", "output")),
        ranks=all_ranks(setup),
        step=0,
    )


def weighed_unlike(setup: Setup) -> Expected:
    """Each rank's part of the loss has a factor of its own: that is where backward begins."""
    return Expected(
        kinds=("scale-error",),
        phases=("backward",),
        places=(("", "grad_output.logits"), ("lm_head", "grad_output")),
        ranks=all_ranks(setup),
        step=0,
    )


def rescaled(setup: Setup) -> Expected:
    """Activations and their gradients agree; what was added up of them does not."""
    return Expected(
        kinds=("divergence",),
        phases=("grads",),
        places=(("*", "grad:*"), ("", "")),
        ranks=all_ranks(setup),
        step=0,
    )


def times_tokens(setup: Setup) -> Expected:
    """The loss is as many times too large as there are tokens: on the last stage, or everywhere."""
    return Expected(
        kinds=("scale-error",),
        phases=("backward", "grads"),
        places=(("", "grad_output"), ("", "")),
        ranks=(setup.ranks - 1,),
        step=0,
    )


def experts_doubled(setup: Setup) -> Expected:
    return Expected(
        kinds=("scale-error",),
        phases=("grads",),
        places=(("*.experts", "grad:w*"),),
        ranks=all_ranks(setup),
        step=0,
    )


ROWS: tuple[Bug, ...] = (
    Bug(
        name="apertus-tp-auto",
        about='Apertus under `tp_plan="auto"`: xIELU\'s scalars see a part of the columns',
        source="transformers 5.23",
        url="https://github.com/huggingface/transformers",
        program=huggingface.apertus,
        oracle=huggingface.scalars_right,
        expected=activation_scalars,
        package="transformers",
    ),
    Bug(
        name="fsdp1-ignored-modules",
        about="FSDP1 does not reduce the gradients of `ignored_modules`",
        source="pytorch #98281",
        url="https://github.com/pytorch/pytorch/issues/98281",
        program=shards.ignored_norm,
        oracle=shards.norm_right,
        expected=ignored,
    ),
    Bug(
        name="random-shards",
        about="`DTensor.normal_` on a CPU mesh gives every shard the same numbers",
        source="pytorch #168058",
        url="https://github.com/pytorch/pytorch/issues/168058",
        program=shards.random_shards,
        oracle=shards.shards_differ,
        expected=equal_shards,
    ),
    Bug(
        name="fsdp1-clipping",
        about="`torch.nn.utils.clip_grad_norm_` on FSDP1 takes the norm of one rank's shards",
        source="torchtitan #766",
        url="https://github.com/pytorch/torchtitan/issues/766",
        program=shards.clipped_shards,
        oracle=shards.norm_as_asked,
        expected=scaled_between,
    ),
    Bug(
        name="lost-accumulation",
        about="ZeRO-2 keeps the gradients of the last micro-batch alone (written in plain torch)",
        source="open-instruct #1498",
        url="https://github.com/allenai/open-instruct/pull/1498",
        program=shards.partitioned_accumulation,
        oracle=shards.accumulated_right,
        expected=lost,
    ),
    Bug(
        name="gathered-to-local",
        about="rows gathered by `redistribute` and taken out by `to_local`: gradients not summed",
        source="pytorch #153016",
        url="https://github.com/pytorch/pytorch/issues/153016",
        program=dtensors.gathered,
        oracle=dtensors.contrast_right,
        expected=partial_called_replicated,
    ),
    Bug(
        name="norm-to-local",
        about="a norm on the heads of one rank takes its replicated weight out by `to_local`",
        source="torchtitan #2532",
        url="https://github.com/pytorch/torchtitan/pull/2532",
        program=dtensors.head_norms,
        oracle=dtensors.head_norms_right,
        expected=head_norm_gradients,
    ),
    Bug(
        name="latent-rope-key",
        about="the rotary key that all heads share lacks the sum of its gradient over ranks",
        source="torchtitan #1373",
        url="https://github.com/pytorch/torchtitan/pull/1373",
        program=byhand.rope_key,
        oracle=byhand.latent_right,
        expected=unsummed_in_every_layer,
    ),
    Bug(
        name="column-without-sum",
        about="one column-parallel layer by hand does not sum the gradient of its input",
        source="SkyRL #1886",
        url="https://github.com/NovaSky-AI/SkyRL/pull/1886",
        program=byhand.open_column,
        oracle=byhand.right,
        expected=unsummed_input("layers.{layer}.feed_forward.up_proj"),
    ),
    Bug(
        name="strided-gradient",
        about="a sum over ranks of `x.contiguous()` while `x`, which is transposed, is handed on",
        source="Megatron-LM #5337",
        url="https://github.com/NVIDIA/Megatron-LM/issues/5337",
        program=byhand.strided_gradient,
        oracle=byhand.strided_right,
        expected=unsummed_input("head"),
    ),
    Bug(
        name="other-mesh",
        about="one feed-forward is split over the data-parallel axis of the mesh",
        source="a style of mistake; no report",
        url="",
        program=dtensors.other_mesh,
        oracle=dtensors.replicas_right,
        expected=misplaced_block,
        ranks=(4,),
    ),
    Bug(
        name="other-mesh-of-two",
        about="the same in a model of two layers",
        source="a style of mistake; no report",
        url="",
        program=dtensors.other_mesh_of_two,
        oracle=dtensors.of_two_right,
        expected=lambda setup: misplaced_block(dtensors.of_two(setup)),
        ranks=(4,),
    ),
    Bug(
        name="tie-lost",
        about="`parallelize_module` unties the head from the embedding",
        source="torchtitan #1524",
        url="https://github.com/pytorch/torchtitan/issues/1524",
        program=dtensors.tied,
        oracle=dtensors.still_tied,
        expected=untied,
    ),
    Bug(
        name="other-group",
        about="one row-parallel layer sums over the data-parallel ranks",
        source="Megatron-LM #7452, number 4",
        url="https://github.com/NVIDIA/Megatron-LM/issues/7452",
        program=byhand.rows_and_columns,
        oracle=byhand.mesh_right,
        expected=wrong_group,
        ranks=(4,),
    ),
    Bug(
        name="own-rows",
        about="tensor-parallel ranks read different rows",
        source="accelerate #3092",
        url="https://github.com/huggingface/accelerate/issues/3092",
        program=byhand.own_rows,
        oracle=byhand.same_rows,
        expected=other_input,
    ),
    Bug(
        name="own-loss",
        about="one tensor-parallel rank weighs its loss",
        source="a style of mistake; no report",
        url="",
        program=byhand.own_loss,
        oracle=byhand.right,
        expected=other_loss,
    ),
    Bug(
        name="sequence-norms",
        about="norms' gradients reduced over data-parallel ranks, not over the sequence's",
        source="Megatron-LM #1446",
        url="https://github.com/NVIDIA/Megatron-LM/issues/1446",
        program=byhand.sequence_norms,
        oracle=byhand.mesh_right,
        expected=norm_gradients,
        ranks=(4,),
    ),
    Bug(
        name="other-order",
        about="gradients averaged one by one, in the other order on one rank",
        source="DeepSpeed #2343",
        url="https://github.com/deepspeedai/DeepSpeed/issues/2343",
        program=byhand.other_order,
        oracle=byhand.averaged_right,
        expected=crossed,
    ),
    Bug(
        name="smoothing-over-a-part",
        about="label smoothing takes the mean over one rank's part of the vocabulary",
        source="Megatron-LM #7452, number 1",
        url="https://github.com/NVIDIA/Megatron-LM/issues/7452",
        program=byhand.smoothed,
        oracle=byhand.smoothed_right,
        expected=differing_output("criterion"),
        missed="a loss is not compared over ranks, and the gradients of all replicas agree",
    ),
    Bug(
        name="gathered-logits",
        about="a loss over a split vocabulary is handed all logits",
        source="Megatron-LM #7452, number 2",
        url="https://github.com/NVIDIA/Megatron-LM/issues/7452",
        program=byhand.gathered_logits,
        oracle=byhand.gathered_right,
        expected=unsummed_input("criterion"),
        missed="only the gradient of the loss's input differs, in a module without parameters",
    ),
    Bug(
        name="norm-of-heads",
        about="a norm on the heads of each rank, whose gradients nobody sums",
        source="Megatron-LM #7452, number 11",
        url="https://github.com/NVIDIA/Megatron-LM/issues/7452",
        program=byhand.head_norm,
        oracle=byhand.head_norm_right,
        expected=some_unreduced("layers.*.attention.o_proj.0.weight"),
        missed="the norm begins as ones, and each rank has other heads, so it may be a shard",
    ),
    Bug(
        name="shared-key",
        about="multi-query attention: the gradients of the key that all ranks share are not summed",
        source="bigcode Megatron-LM #35",
        url="https://github.com/bigcode-project/Megatron-LM/issues/35",
        program=byhand.shared_key,
        oracle=byhand.shared_key_right,
        expected=some_unreduced("layers.*.attention.wkv.weight"),
    ),
    Bug(
        name="own-dropout",
        about="tensor-parallel ranks drop other elements of what all of them hold",
        source="slapo #21",
        url="https://github.com/awslabs/slapo/issues/21",
        program=byhand.own_dropout,
        oracle=byhand.losses_agree,
        expected=differing_output("layers.0.dropout"),
    ),
    Bug(
        name="own-norm",
        about="every tensor-parallel rank clips by the norm of what it holds",
        source="Megatron-LM #5916",
        url="https://github.com/NVIDIA/Megatron-LM/pull/5916",
        program=byhand.own_norm,
        oracle=byhand.clipped_alike,
        expected=clipped_apart,
    ),
    Bug(
        name="flag-after-forward",
        about="DDP's flag for accumulation is set between forward and backward",
        source="build-nanogpt #30",
        url="https://github.com/karpathy/build-nanogpt/pull/30",
        program=loops.flag_after_forward,
        oracle=loops.right,
        expected=all_unreduced_in(""),
    ),
    Bug(
        name="static-graph",
        about="a trainer's own `prepare_for_backward` with a static graph: no first reduction",
        source="Lightning #18086",
        url="https://github.com/Lightning-AI/pytorch-lightning/issues/18086",
        program=loops.static_graph,
        oracle=loops.right,
        expected=all_unreduced_in("gpt."),
    ),
    Bug(
        name="replaced-parameter",
        about="a parameter is replaced after DDP was built",
        source="pytorch #12603",
        url="https://github.com/pytorch/pytorch/issues/12603",
        program=loops.replaced_parameter,
        oracle=loops.replaced_right,
        expected=some_unreduced("head.weight"),
    ),
    Bug(
        name="unfrozen-later",
        about="a layer frozen when DDP was built is thawed after a step",
        source="Lightning #20340",
        url="https://github.com/Lightning-AI/pytorch-lightning/issues/20340",
        program=loops.unfrozen_later,
        oracle=loops.stays_replicated,
        expected=thawed,
    ),
    Bug(
        name="low-rank-side",
        about="adapters in a DDP network that nobody calls: `forward` of the layers is replaced",
        source="sd-scripts #989",
        url="https://github.com/kohya-ss/sd-scripts/pull/989",
        program=loops.low_rank_side,
        oracle=loops.adapters_right,
        expected=unreduced_adapters,
    ),
    Bug(
        name="never-finished",
        about="an example script never calls what reduces the gradients",
        source="Megatron-LM #1685",
        url="https://github.com/NVIDIA/Megatron-LM/issues/1685",
        program=loops.never_finished,
        oracle=loops.right,
        expected=unreduced,
    ),
    Bug(
        name="wiped-between",
        about="what prepares the next micro-batch frees the gradients of the one before",
        source="Automodel #3530",
        url="https://github.com/NVIDIA-NeMo/Automodel/pull/3530",
        program=loops.wiped_between,
        oracle=loops.right,
        expected=lost,
    ),
    Bug(
        name="own-count",
        about="every rank divides its loss by its own number of tokens",
        source="Megatron-LM #7452, number 3",
        url="https://github.com/NVIDIA/Megatron-LM/issues/7452",
        program=loops.own_count,
        oracle=loops.weighed_right,
        expected=scaled_between,
        missed="nothing differs between ranks but the data: a reference run is needed",
    ),
    Bug(
        name="reduced-too-early",
        about="ZeRO-1 reduces before the last micro-batch is added",
        source="DeepSpeed #7985",
        url="https://github.com/deepspeedai/DeepSpeed/pull/7985",
        program=shards.reduced_too_early,
        oracle=shards.partly_right,
        expected=all_unreduced_in(""),
    ),
    Bug(
        name="lone-shards",
        about="FSDP1 with one rank a shard group reduces nothing",
        source="verl #7493",
        url="https://github.com/verl-project/verl/issues/7493",
        program=shards.lone_shards,
        oracle=shards.lone_right,
        expected=all_unreduced_in(""),
    ),
    Bug(
        name="open-scores",
        about="experts split over ranks: the gradient of the scores is not summed",
        source="transformers #48205",
        url="https://github.com/huggingface/transformers/pull/48205",
        program=experts.open_scores,
        oracle=experts.mixture_right,
        expected=unsummed_scores,
    ),
    Bug(
        name="detached-router",
        about="routing scores gathered by a collective without a gradient: the router never learns",
        source="Automodel #2995",
        url="https://github.com/NVIDIA-NeMo/Automodel/pull/2995",
        program=experts.detached_router,
        oracle=experts.mixture_right,
        expected=never_learns,
    ),
    Bug(
        name="tied-over-stages",
        about="embedding and head tied over two pipeline stages, their gradients never summed",
        source="piper #13",
        url="https://github.com/uw-syfi/piper/issues/13",
        program=stages.tied_over_stages,
        oracle=stages.copies_agree,
        expected=two_copies,
    ),
    Bug(
        name="gathered-full-tensor",
        about="rows gathered by `full_tensor`: their gradients are cut up, not summed",
        source="Automodel #1260",
        url="https://github.com/NVIDIA-NeMo/Automodel/pull/1260",
        program=dtensors.gathered_whole,
        oracle=dtensors.contrast_right,
        expected=unsummed_gather,
        missed="a gather's output is a plain tensor, whose gradient is not compared",
    ),
    Bug(
        name="sequence-left-out",
        about="DDP over a group that leaves out the ranks that share a sequence",
        source="VeOmni #1059",
        url="https://github.com/ByteDance-Seed/VeOmni/issues/1059",
        program=loops.sequence_left_out,
        oracle=loops.right,
        expected=all_unreduced_in(""),
    ),
    Bug(
        name="adapters-by-rank",
        about="adapters that tensor-parallel ranks hold whole, made from a seed of each rank",
        source="Automodel #3822",
        url="https://github.com/NVIDIA-NeMo/Automodel/pull/3822",
        program=byhand.adapters_by_rank,
        oracle=byhand.adapters_alike,
        expected=seeded_adapter,
        missed="what differs at the begin may be shards; gradients of the next step are named",
    ),
    Bug(
        name="lightning-backward",
        about="`loss.backward()` in Lightning's manual optimization: DDP reduces nothing",
        source="Lightning #9237",
        url="https://github.com/Lightning-AI/pytorch-lightning/issues/9237",
        program=frameworks.lightning_backward,
        oracle=frameworks.stepped_right,
        expected=all_unreduced_in("gpt."),
        package="lightning",
    ),
    Bug(
        name="deepspeed-accumulation",
        about="DeepSpeed ZeRO-2 with accumulation by the user: the last backward alone counts",
        source="open-instruct #1498",
        url="https://github.com/allenai/open-instruct/pull/1498",
        program=frameworks.deepspeed_accumulation,
        oracle=frameworks.stepped_right,
        expected=lost_inside,
        package="deepspeed",
        missed="the engine takes gradients away before the step, which are then not known",
    ),
    Bug(
        name="own-token-count",
        about="`average_tokens_across_devices=False`: the loss is divided by a rank's own tokens",
        source="transformers #34373",
        url="https://github.com/huggingface/transformers/pull/34373",
        program=beside.tokens_averaged,
        oracle=beside.tokens_right,
        expected=weighed_unlike,
        reference=beside.tokens_counted,
        package="transformers",
    ),
    Bug(
        name="rescaled-twice",
        about="a pipeline that accumulates divides gradients of earlier calls once more",
        source="torchtitan #1733",
        url="https://github.com/pytorch/torchtitan/issues/1733",
        program=beside.rescaled_twice,
        oracle=beside.pipeline_right,
        expected=rescaled,
        reference=alone,
    ),
    Bug(
        name="never-divided",
        about="a pipeline's loss is divided by all tokens only after backward",
        source="torchtitan #2972",
        url="https://github.com/pytorch/torchtitan/issues/2972",
        program=beside.never_divided,
        oracle=beside.pipeline_right,
        expected=times_tokens,
        reference=alone,
    ),
    Bug(
        name="expert-gradients-doubled",
        about="gradients of experts that ranks share are as many times too large",
        source="pytorch #160285",
        url="https://github.com/pytorch/pytorch/issues/160285",
        program=beside.grouped_experts,
        oracle=beside.grouped_right,
        expected=experts_doubled,
        reference=beside.grouped_alone,
    ),
)
BY_NAME = {row.name: row for row in ROWS}
