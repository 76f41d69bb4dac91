"""What is true of each program of the third board, written down before the tool was run on any.

A program is right as it stands; `--wrong` switches on its one mistake. `check` is the true answer
that ranks show, None where they all do the same wrong thing; `diff` the one that the reference
shows.
"""

from __future__ import annotations

from tests.lab.outside.answers import ANY, PARAMS, REPLICAS, VALUES, Place, Row

NOT_REDUCED = ("gradient-not-reduced",)

ROWS = {
    # The last stage is trained from step 2 on; its gradients are then each rank's own.
    "unfrozen": Row(
        3,
        Place(NOT_REDUCED, ("stages.2", "stages.2.*"), ("grad:*",), (2,), ((0, 1, 2),), ("grads",)),
        Place(
            (*NOT_REDUCED, "divergence", "replica-mismatch"),
            ("stages.2", "stages.2.*"),
            ("grad:*",),
            (2,),
            ((0, 1, 2),),
            ("grads",),
        ),
    ),
    # Changes of one size: a wrong bias may be a permutation of the right one.
    "balance": Row(
        2,
        Place(
            REPLICAS,
            ("blocks.*.router",),
            ("buffer:expert_bias",),
            (0,),
            ((0,), (1,), (0, 1)),
            ("params",),
        ),
        Place(
            (*VALUES, "permutation"),
            ("blocks.*.router",),
            ("buffer:expert_bias",),
            (0,),
            (),
            ("params",),
        ),
    ),
    # Scale and shift are set inside the first forward. Beside another run its outputs show it,
    # between ranks the sum of the scale, which no data enter, and parameters after the step.
    "flow": Row(
        3,
        Place(
            REPLICAS,
            ("flows.*.norm",),
            ("output.1", *PARAMS),
            (0,),
            ((0, 1, 2),),
            ("forward", "params"),
        ),
        Place(
            VALUES,
            ("flows.*.norm",),
            ("output*", *PARAMS),
            (0,),
            ((0, 1, 2),),
            ("forward", "params"),
        ),
    ),
    # All gradients of a bucket are off by one factor, on each rank by another: then no slot is
    # named.
    "integers": Row(
        3,
        Place((*REPLICAS, "scale-error"), ANY, ("grad:*", ""), (0,), ((0, 1, 2),), ("grads",)),
        Place(VALUES, ANY, ("grad:*", ""), (0,), ((0, 1, 2),), ("grads",)),
    ),
    # The noise of rank 0 is that of one process.
    "privacy": Row(
        2,
        Place(REPLICAS, ANY, ("grad:*",), (0,), ((0, 1), (1,)), ("grads",)),
        Place(VALUES, ANY, ("grad:*",), (0,), ((1,), (0, 1)), ("grads",)),
    ),
    # The copies of one weight on the first and the last stage go apart.
    "tied": Row(
        3,
        Place(
            (*NOT_REDUCED, *REPLICAS, "structure-mismatch"),
            ("embed", "head"),
            ("grad:weight", "param:weight"),
            (0,),
            ((0,), (2,), (0, 2)),
        ),
        Place(
            (*NOT_REDUCED, *VALUES, "structure-mismatch"),
            ("embed", "head"),
            ("grad:weight", "param:weight"),
            (0,),
            ((0,), (2,), (0, 2)),
            ("grads", "params"),
        ),
    ),
    # Rank 0 has the masks of one process, all others have other ones.
    "dropout": Row(
        4,
        Place(
            REPLICAS,
            ("dropout", "layers.*.dropout_?"),
            ("output",),
            (0,),
            ((1,), (3,), (1, 3), (0, 1), (2, 3), (0, 1, 2, 3)),
            ("forward",),
        ),
        Place(
            VALUES,
            ("dropout", "layers.*.dropout_?"),
            ("output",),
            (0,),
            ((1,), (0, 1), (2, 3), (1, 2, 3), (0, 1, 2, 3)),
            ("forward",),
        ),
    ),
    # The gradient of the last layer overflows in step 0. Rank 1 owns it and leaves out the step,
    # as one process does; rank 0 takes it with the first layers, and keeps its scale.
    "overflow": Row(
        2,
        Place(
            (*REPLICAS, "structure-mismatch", "parameter-not-updated"),
            ANY,
            ("", "scaler:*", *PARAMS),
            (0, 1),
            ((0,), (1,), (0, 1)),
        ),
        Place(
            (*VALUES, "structure-mismatch"),
            ("", "layers.[0-3].*"),
            ("", "scaler:*", *PARAMS),
            (0, 1),
            ((0,), (0, 1)),
        ),
        tolerance=2e-2,
    ),
    # What the outer optimizer lacks differs between workers from their first meeting on. Beside
    # another run it may show only where the next forward uses it.
    "rounds": Row(
        4,
        Place(
            (*REPLICAS, *NOT_REDUCED),
            ("norm", "blocks.*.norm_?"),
            (*PARAMS, "grad:*"),
            (0, 1),
            ((0, 1, 2, 3), (0, 1), (2, 3)),
        ),
        Place(
            (*VALUES, *NOT_REDUCED, "parameter-not-updated"),
            ("norm", "blocks.*.norm_?"),
            (*PARAMS, "grad:*", "output"),
            (1, 2),
            ((0, 1, 2, 3), (0, 1), (2, 3)),
        ),
        reference_ranks=2,
    ),
    # The sum of one head's gradient and the other's: known by the collectives, or by its outcome.
    "tasks": Row(
        2,
        Place(
            ("collective-mismatch", *NOT_REDUCED, *REPLICAS),
            ("heads.*", ""),
            ("grad:*", "collective*", "input*", "output*", ""),
            (0,),
            ((0,), (1,), (0, 1)),
            ("backward", "accumulated", "collective", "grads"),
        ),
        Place(
            (*VALUES, *NOT_REDUCED),
            ("heads.*",),
            ("grad:*",),
            (0,),
            ((0,), (1,), (0, 1)),
            ("grads",),
        ),
    ),
    # Rank 0 numbers its tokens right. Positions are an input of the model, cosines and sines of
    # each layer; what attention makes of them is wrong though its other input is right.
    "context": Row(
        3,
        None,
        Place(
            (*VALUES, "duplicate-data"),
            ("", "rotary", "layers.0", "layers.0.attention*"),
            ("input*", "output*"),
            (0,),
            ((1, 2), (0, 1, 2)),
            ("forward",),
        ),
    ),
    "tables": Row(
        3,
        None,
        Place(
            ("permutation", "divergence"),
            ("sparse", "interaction"),
            ("input*", "output*"),
            (0,),
            ((0, 1, 2),),
            ("forward",),
        ),
        prepares=True,
    ),
    "hybrid": Row(
        4,
        None,
        Place(
            ("scale-error", "divergence"),
            ("blocks.*",),
            ("grad:*",),
            (0,),
            ((0, 1, 2, 3),),
            ("grads",),
        ),
    ),
    # The engine's forwards of step 1 are the first that use other weights. They are steps of their
    # own, and its parameters belong to no optimizer.
    "rollout": Row(
        2,
        None,
        Place(
            (*VALUES, "parameter-not-updated"),
            ("@Gpt*",),
            ("output*", *PARAMS),
            (),
            ((0, 1),),
        ),
    ),
    # Forward is right, and each rank weighs its rows by another factor: this shows in the gradient
    # of the loss, or in all final gradients.
    "speech": Row(
        3, None, Place(VALUES, ANY, ("grad*", ""), (0,), (), ("backward", "accumulated", "grads"))
    ),
}
