"""What is true of each program of the fourth board, written down before the tool was run on any.

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
PASSAGES = Place(
    SCALED,
    ("passage", "passage.outer"),
    ("grad_output*",),
    (0,),
    ((0, 1, 2),),
    ("backward",),
    also=Place(
        SCALED,
        ("",),
        ("grad_output.1",),
        (0,),
        ((0, 1, 2),),
        ("backward",),
        also=Place(SCALED, ("passage.*",), GRADS, (0,), ((0, 1, 2),), ("grads", "accumulated")),
    ),
)

ROWS = {
    # Each rank multiplies its shards of all gradients by a factor of its own. No slot is named
    # where that is said of all of them.
    "clipped": Row(
        3,
        Place(("scale-error",), ANY, (*GRADS, ""), (0,), (), ("grads",)),
        Place(SCALED, ANY, (*GRADS, ""), (0,), (), ("grads",)),
    ),
    # Times are an input of the model, the first input holds the noise. Rank 0 has the times of one
    # process in the first step, noise is another one on all ranks.
    "matching": Row(
        3,
        Place(
            ("duplicate-data",),
            ("", "time", "time.*"),
            ("input*",),
            (0,),
            ((0, 1, 2), (1, 2)),
            ("forward",),
        ),
        Place(
            (*CHANGED, "duplicate-data"),
            ("", "enter", "time", "time.0"),
            ("input*",),
            (0,),
            ((0, 1, 2), (1, 2)),
            ("forward",),
        ),
    ),
    # The second iteration has a penalty. It is step 1 where a step holds both optimizers, else the
    # critic's is step 3.
    "penalty": Row(
        3,
        Place(
            NOT_REDUCED,
            ("", "inner.*", "score", "@Critic*"),
            GRADS,
            (1, 3),
            ((0, 1, 2),),
            ("grads", "accumulated"),
        ),
        Place(
            (*NOT_REDUCED, "divergence"),
            ("", "inner.*", "score", "@Critic*"),
            GRADS,
            (1, 3),
            ((0, 1, 2),),
            ("grads", "accumulated"),
        ),
    ),
    "grouped": Row(
        4,
        Place(
            NOT_REDUCED,
            ("layers.*.attention.w[kv]",),
            GRADS,
            (0,),
            ((0, 1), (2, 3), (0, 1, 2, 3)),
            ("grads", "accumulated"),
        ),
        Place(
            (*NOT_REDUCED, "divergence"),
            ("layers.*.attention.w[kv]",),
            GRADS,
            (0,),
            ((0, 1), (2, 3), (0, 1, 2, 3)),
            ("grads", "accumulated"),
        ),
    ),
    # What ranks sum are elements of other places. Each writes the same numbers to places of its
    # own, so that gradients are other ones on each rank, and also wrong on all.
    "sparsified": Row(
        3,
        Place(REPLICAS, ANY, GRADS, (0,), ((0, 1, 2),), ("grads",)),
        Place(CHANGED, ANY, GRADS, (0,), ((0, 1, 2),), ("grads",)),
    ),
    # Each rank has other counts of how often nodes send. Features are not the same on the ranks.
    "graph": Row(
        3,
        Place(
            REPLICAS,
            ("first", "second"),
            ("buffer:sends",),
            (0,),
            ((0, 1, 2),),
            ("setup",),
        ),
        Place(
            CHANGED,
            ("first", "second"),
            ("buffer:sends",),
            (0,),
            ((0, 1, 2),),
            ("setup",),
            also=Place(("divergence",), ("first",), ("output",), (0,), ((0, 1, 2),), ("forward",)),
        ),
    ),
    # After the first step the rows of rank 2 alone are better; it keeps what the others take back.
    "plateau": Row(
        3,
        Place(REPLICAS, ANY, PARAMS, (1,), ((2,), (0, 1, 2)), ("params",)),
        Place(
            CHANGED,
            ("rnn",),
            ("output*",),
            (1,),
            ((2,), (0, 1, 2)),
            ("forward",),
            also=Place(CHANGED, ANY, PARAMS, (1,), ((2,), (0, 1, 2)), ("params",)),
        ),
    ),
    "stale": Row(
        3,
        Place(
            ("parameter-not-updated",),
            ("backbone", "backbone.*"),
            PARAMS,
            (0,),
            ((0, 1, 2),),
            ("params",),
        ),
        Place(
            ("parameter-not-updated", "divergence"),
            ("backbone", "backbone.*"),
            PARAMS,
            (0,),
            ((0, 1, 2),),
            ("params",),
        ),
    ),
    "empty": Row(
        3,
        Place(REPLICAS, ("rotary",), ("buffer:inv_freq",), (0,), ((1, 2), (0, 1, 2)), ("setup",)),
        Place(
            CHANGED,
            ("rotary",),
            ("buffer:inv_freq",),
            (0,),
            ((1, 2), (0, 1, 2)),
            ("setup",),
            also=Place(CHANGED, ("rotary",), ("output*",), (0,), ((1, 2), (0, 1, 2)), ("forward",)),
        ),
        prepares=True,
    ),
    # Rank 1 takes the new target after the first step, one process after the second. The target is
    # called without gradients. It has the class and the size of the other network.
    "targets": Row(
        3,
        Place(REPLICAS, ANY, PARAMS, (1,), ((1,), (0, 1, 2))),
        Place(
            CHANGED,
            ANY,
            ("output",),
            (1,),
            ((1,), (0, 1, 2)),
            ("forward",),
            also=Place(CHANGED, ANY, PARAMS, (1,), ((1,),)),
        ),
    ),
    # The first rate is the same.
    "schedule": Row(
        3,
        None,
        Place(SCALED, ANY, (*PARAMS, ""), (1,), ((0, 1, 2),), ("params",)),
    ),
    "biases": Row(
        4,
        None,
        Place(
            ("divergence",),
            ("layers.*.out", "layers.*.down"),
            ("output",),
            (0,),
            ((0, 1, 2, 3),),
            ("forward",),
        ),
    ),
    # The loss is not in the model: its gradient is the first that is wrong. On the last rank, whose
    # last token never has a label, it is only scaled.
    "shifted": Row(
        4,
        None,
        Place(
            VALUES,
            ("", "head"),
            ("grad_output*",),
            (0,),
            ((0, 1, 2, 3), (0, 1, 2)),
            ("backward",),
            also=Place(
                SCALED,
                ANY,
                GRADS,
                (0,),
                ((0, 1, 2, 3), (0, 1, 2)),
                ("grads", "accumulated"),
            ),
        ),
    ),
    # Questions have the right gradient, passages lack what the questions of other ranks give.
    "retrieval": Row(3, None, PASSAGES),
    # Stages are roots of their own.
    "interleaved": Row(
        2,
        None,
        Place(
            ("divergence", "permutation"),
            ("*layers.[12].*",),
            PARAMS,
            (0,),
            ((0,), (1,), (0, 1)),
            ("setup",),
        ),
        prepares=True,
    ),
}
"""Programs of further kinds."""
