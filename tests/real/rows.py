"""The table of public bugs: where each was reported, its program, and what must be said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.answers import all_ranks, parameter_names
from tests.faults.expected import Expected
from tests.faults.rows import Row
from tests.faults.setup import Setup
from tests.real.programs import byhand, dtensors, huggingface, shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug(Row):
    """One public bug."""

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
    def in_words(self) -> str:
        """The begin of its row on the page: name, what is wrong, and where that was reported."""
        source = f"[{self.source}]({self.url})" if self.url else self.source
        return f"| {self.name} | {self.about} | {source} |"


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
    both = (("fc1", "param:weight"), ("fc2", "param:weight"))
    return Expected(
        kinds=("placement-mismatch", "duplicate-data"),
        phases=("setup",),
        places=both,
        all_of=both,
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
        missed="a parameter of one element is a constant, which may be an equal shard",
    ),
    Bug(
        name="fsdp1-ignored-modules",
        about="FSDP1 does not reduce the gradients of `ignored_modules`",
        source="pytorch #98281",
        url="https://github.com/pytorch/pytorch/issues/98281",
        program=shards.ignored_norm,
        oracle=shards.norm_right,
        expected=ignored,
        missed="a norm begins as ones and zeros, which may be equal shards, so it is no replica",
    ),
    Bug(
        name="random-shards",
        about="`DTensor.normal_` on a CPU mesh gives every shard the same numbers",
        source="pytorch #168058",
        url="https://github.com/pytorch/pytorch/issues/168058",
        program=shards.random_shards,
        oracle=shards.shards_differ,
        expected=equal_shards,
        missed="nobody asks whether the shards of one DTensor are equal",
    ),
    Bug(
        name="fsdp1-clipping",
        about="`torch.nn.utils.clip_grad_norm_` on FSDP1 takes the norm of one rank's shards",
        source="torchtitan #766",
        url="https://github.com/pytorch/torchtitan/issues/766",
        program=shards.clipped_shards,
        oracle=shards.norm_as_asked,
        expected=scaled_between,
        missed="a gradient is read once, so what happens between backward and step is not seen",
    ),
    Bug(
        name="lost-accumulation",
        about="ZeRO-2 keeps the gradients of the last micro-batch alone (written in plain torch)",
        source="open-instruct #1498",
        url="https://github.com/allenai/open-instruct/pull/1498",
        program=shards.partitioned_accumulation,
        oracle=shards.accumulated_right,
        expected=lost,
        missed="a gradient is read once, so what an earlier micro-batch gave is not known",
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
        missed="the gradients of five parameters are named, not the module that lacks the sum",
    ),
    Bug(
        name="column-without-sum",
        about="one column-parallel layer by hand does not sum the gradient of its input",
        source="SkyRL #1886",
        url="https://github.com/NovaSky-AI/SkyRL/pull/1886",
        program=byhand.open_column,
        oracle=byhand.right,
        expected=unsummed_input("layers.{layer}.feed_forward.up_proj"),
        missed="the feed-forward around the layer is named",
    ),
    Bug(
        name="strided-gradient",
        about="a sum over ranks of `x.contiguous()` while `x`, which is transposed, is handed on",
        source="Megatron-LM #5337",
        url="https://github.com/NVIDIA/Megatron-LM/issues/5337",
        program=byhand.strided_gradient,
        oracle=byhand.strided_right,
        expected=unsummed_input("head"),
        missed="the parameters below are named, each as a gradient that was not reduced",
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
        missed="the healthy layer is blamed: the wrong one looks as if a reduction made it agree",
    ),
    Bug(
        name="tie-lost",
        about="`parallelize_module` unties the head from the embedding",
        source="torchtitan #1524",
        url="https://github.com/pytorch/torchtitan/issues/1524",
        program=dtensors.tied,
        oracle=dtensors.still_tied,
        expected=untied,
        missed="nobody asks whether two parameters that began equal stay one",
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
        missed="ranks 0-1 are named, ranks 2-3 with the same fault are not",
    ),
    Bug(
        name="own-rows",
        about="tensor-parallel ranks read different rows",
        source="accelerate #3092",
        url="https://github.com/huggingface/accelerate/issues/3092",
        program=byhand.own_rows,
        oracle=byhand.same_rows,
        expected=other_input,
        missed="tensor-parallel ranks with other rows look like data-parallel ranks",
    ),
    Bug(
        name="own-loss",
        about="one tensor-parallel rank weighs its loss",
        source="a style of mistake; no report",
        url="",
        program=byhand.own_loss,
        oracle=byhand.right,
        expected=other_loss,
        missed="the gradients of the parameters are named in place of that of the output",
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
        missed="norms begin as ones, and the ranks that share a sequence have other inputs",
    ),
    Bug(
        name="other-order",
        about="gradients averaged one by one, in the other order on one rank",
        source="DeepSpeed #2343",
        url="https://github.com/deepspeedai/DeepSpeed/issues/2343",
        program=byhand.other_order,
        oracle=byhand.averaged_right,
        expected=crossed,
        missed="both gradients are named as not reduced",
    ),
)
BY_NAME = {row.name: row for row in ROWS}
