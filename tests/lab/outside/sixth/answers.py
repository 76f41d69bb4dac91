"""What is true of each program of the sixth board, written down before the tool was run on any.

A program is right as it stands; `--wrong` switches on its one mistake. `check` is the true answer
that ranks show, None where they all do the same wrong thing; `diff` the one that the reference
shows.
"""

from __future__ import annotations

from tests.lab.outside.answers import ANY, PARAMS, REPLICAS, VALUES, Place, Row

GRADS = ("grad:*",)
NOT_REDUCED = ("gradient-not-reduced", "replica-mismatch")
CHANGED = ("divergence", "replica-mismatch")
SCALED = ("divergence", "scale-error")
FINAL = ("grads", "accumulated")

ROWS = {
    "flattened": Row(
        3,
        Place(REPLICAS, ANY, PARAMS, (), ((0, 1, 2),), ("setup",)),
        Place(CHANGED, ANY, PARAMS, (), ((1, 2), (0, 1, 2)), ("setup",)),
    ),
    # Ranks 0 and 1 have the first stage.
    "grid": Row(
        4,
        Place(NOT_REDUCED, ANY, GRADS, (0,), ((0, 1),), FINAL),
        Place((*NOT_REDUCED, "divergence"), ANY, GRADS, (0,), ((0, 1),), FINAL),
    ),
    # What the last layer of the decoder gives back to the encoder is the first that is wrong.
    "translator": Row(
        2,
        Place(
            NOT_REDUCED,
            ("decoder.*", "between", "encoder.*"),
            ("grad_input*", "grad_output*"),
            (0,),
            ((0, 1),),
            ("backward",),
            also=Place(
                NOT_REDUCED, ("", "between", "encoder.*", "source"), GRADS, (0,), ((0, 1),), FINAL
            ),
        ),
        Place(
            (*NOT_REDUCED, "divergence"),
            ("decoder.*", "between", "encoder.*"),
            ("grad_input*", "grad_output*"),
            (0,),
            ((0, 1),),
            ("backward",),
            also=Place(
                (*NOT_REDUCED, "divergence"),
                ("", "between", "encoder.*", "source"),
                GRADS,
                (0,),
                ((0, 1),),
                FINAL,
            ),
        ),
    ),
    # Both weights began equal, and each steps with a gradient of its own.
    "retied": Row(
        2,
        Place(
            ("structure-mismatch",),
            ("embed", "head"),
            ("param:weight", "grad:weight", ""),
            (0,),
            ((0, 1),),
        ),
        Place(
            ("divergence", "structure-mismatch"),
            ("embed", "head"),
            ("param:weight", "grad:weight", ""),
            (0,),
            ((0, 1),),
        ),
    ),
    # The first rate is the same on all ranks; rank 0 has the right one.
    "cosine": Row(
        3,
        Place(REPLICAS, ANY, PARAMS, (1,), ((0, 1, 2),), ("params",)),
        Place(VALUES, ANY, PARAMS, (1,), ((1, 2), (0, 1, 2)), ("params",)),
    ),
    # Rank 0 cools down again behind the first step: what the second one leaves is the first buffer
    # that a train step shows, and what its codes give the first output.
    "annealed": Row(
        3,
        Place(REPLICAS, ("codes",), ("buffer:temperature",), (0, 1), ((0,),), ("params",)),
        Place(
            VALUES,
            ("codes",),
            ("buffer:temperature",),
            (0, 1),
            ((0,),),
            ("params",),
            also=Place(VALUES, ("codes",), ("output",), (1,), ((0,),), ("forward",)),
        ),
    ),
    "classes": Row(
        3,
        Place(REPLICAS, ("criterion",), ("buffer:weight",), (), ((0, 1, 2),), ("setup",)),
        Place(
            VALUES,
            ("criterion",),
            ("buffer:weight",),
            (),
            ((0, 1, 2),),
            ("setup",),
            also=Place(VALUES, ("criterion",), ("output",), (0,), ((0, 1, 2),), ("forward",)),
        ),
    ),
    # Rank 0 draws the noise of one process. It comes behind the step of the optimizer: where that
    # is what a step leaves, the next one begins with what is wrong.
    "langevin": Row(
        3,
        Place(REPLICAS, ANY, PARAMS, (0, 1), ((0, 1, 2),), ("params",)),
        Place(
            CHANGED,
            ANY,
            PARAMS,
            (0, 1),
            ((1, 2), (0, 1, 2)),
            ("params",),
            also=Place(CHANGED, ("", "0"), ("output",), (1,), ((1, 2), (0, 1, 2)), ("forward",)),
        ),
    ),
    # Blocks keep sums of their shards, and have no gradient when the optimizer steps.
    "replicas": Row(
        4,
        None,
        Place(
            ("parameter-not-updated", "structure-mismatch", "divergence"),
            ("blocks.*", ""),
            (*GRADS, *PARAMS, ""),
            (0,),
            ((0, 1, 2, 3),),
            (*FINAL, "params"),
        ),
    ),
    # The second layer, on rank 1, is the first without the mask.
    "padding": Row(
        3,
        None,
        Place(
            ("divergence", "structure-mismatch"),
            ("layers.1", "layers.1.attention", "layers.1.attention.out"),
            ("input*", "output"),
            (0,),
            ((1,),),
            ("forward",),
        ),
    ),
    # Rows of the matrix lie in another order, its pieces together have the same elements.
    "fused": Row(
        2,
        None,
        Place(
            ("divergence", "permutation"),
            ("layers.*.mlp", "layers.*.mlp.*"),
            ("input*", "output"),
            (0,),
            ((0, 1),),
            ("forward",),
            also=Place(
                ("divergence", "permutation"),
                ("layers.*.mlp.gate_up",),
                ("param:weight",),
                (),
                ((0, 1),),
                ("setup",),
            ),
        ),
    ),
    # All ranks go on with rows of a later batch.
    "midway": Row(
        3,
        None,
        Place(
            (*VALUES, "duplicate-data", "permutation"),
            ("", "enter"),
            ("input*",),
            (0,),
            ((0, 1, 2),),
            ("forward",),
        ),
        prepares=True,
    ),
    # Gradients are zero, or the nearest one that float16 has.
    "units": Row(
        2,
        None,
        Place(SCALED, ANY, (*GRADS, ""), (0,), ((0, 1),), FINAL),
        tolerance=3e-2,
    ),
    # Ranks 0 and 2 have the same experts, so do ranks 1 and 3. Gradients of two experts are summed,
    # which the sums themselves show too.
    "expertise": Row(
        4,
        Place(
            ("collective-mismatch", *NOT_REDUCED),
            ("layers.*.mixture.experts.*",),
            GRADS,
            (0,),
            also=Place(("collective-mismatch",), ANY, ("collective*", "input*", "output*"), (0,)),
        ),
        Place(
            (*VALUES, *NOT_REDUCED),
            ("layers.*.mixture.experts.*",),
            GRADS,
            (0,),
            (),
            FINAL,
        ),
    ),
    # Weights grow first in the second step, between backward and the optimizer. Those that grow on
    # one rank alone are zero until the third step.
    "sparse": Row(
        3,
        Place(REPLICAS, ("[02]",), ("buffer:mask", *PARAMS), (1,), ((0, 1, 2),), ("params",)),
        Place(CHANGED, ("[02]",), ("buffer:mask", *PARAMS), (1,), ((0, 1, 2),), ("params",)),
    ),
}
"""Programs of further kinds."""
