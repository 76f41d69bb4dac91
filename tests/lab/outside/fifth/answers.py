"""What is true of each program of the fifth board, written down before the tool was run on any.

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
    # The third step has rows of the first one again. No rank has those of another.
    "epochs": Row(
        3,
        None,
        Place(
            (*CHANGED, "duplicate-data", "permutation"),
            ("", "enter"),
            ("input*",),
            (2,),
            ((0, 1, 2),),
            ("forward",),
        ),
    ),
    "gate": Row(
        2,
        Place(NOT_REDUCED, ("layers.*_scale",), GRADS, (0,), ((0, 1),), FINAL),
        Place((*NOT_REDUCED, "divergence"), ("layers.*_scale",), GRADS, (0,), ((0, 1),), FINAL),
    ),
    # Forward is right, and the loss is no module: its gradient is the first that is wrong.
    "loaders": Row(
        3,
        None,
        Place(
            VALUES,
            ("", "head"),
            ("grad_output*",),
            (0,),
            ((2,),),
            ("backward",),
            also=Place(VALUES, ANY, GRADS, (0,), ((2,), (0, 1, 2)), FINAL),
        ),
    ),
    # Owners send what they stepped, so that all ranks are wrong alike.
    "redundancy": Row(
        3,
        None,
        Place(VALUES, ANY, PARAMS, (0,), ((0, 1, 2),), ("params",)),
        prepares=True,
    ),
    # Cosines and sines of some times are other numbers, while the times are right to bfloat16.
    "timesteps": Row(
        3,
        None,
        Place(
            ("divergence",),
            ("", "timesteps"),
            ("input*", "output"),
            (0,),
            ((0, 1, 2),),
            ("forward",),
        ),
        tolerance=2e-2,
    ),
    # The last convolution that exchanges is the first whose input has a wrong gradient. That of a
    # band is a piece; gradients of parameters in front of it are whole.
    "halo": Row(
        3,
        None,
        Place(
            ("divergence",),
            ("layers.1", "layers.1.inner", "layers.0*"),
            ("grad_input*", "grad_output*"),
            (0,),
            ((0, 1, 2),),
            ("backward",),
            also=Place(
                ("divergence",),
                ("enter.conv", "layers.0.inner.conv", "layers.0.outer"),
                GRADS,
                (0,),
                ((0, 1, 2),),
                FINAL,
            ),
        ),
    ),
    # The rows of new tokens alone are each rank's own.
    "tokens": Row(
        3,
        Place(REPLICAS, ("embed",), ("param:weight",), (), ((0, 1, 2),), ("setup",)),
        Place(
            CHANGED,
            ("embed",),
            ("param:weight",),
            (),
            ((0, 1, 2),),
            ("setup",),
            also=Place(CHANGED, ("embed",), ("output",), (0,), ((0, 1, 2),), ("forward",)),
        ),
        prepares=True,
    ),
    # Ranks with the same shard have the same factor, which is another one for other shards.
    "norms": Row(
        4,
        Place(("scale-error",), ANY, (*GRADS, ""), (0,), (), ("grads",)),
        Place(SCALED, ANY, (*GRADS, ""), (0,), (), ("grads",)),
    ),
    # An iteration has three optimizers: one step, or three.
    "temperature": Row(
        3,
        Place(NOT_REDUCED, ("@Temperature*",), ("grad:log_alpha",), (0, 2), ((0, 1, 2),), FINAL),
        Place(
            (*NOT_REDUCED, "divergence"),
            ("@Temperature*",),
            ("grad:log_alpha",),
            (0, 2),
            ((0, 1, 2),),
            FINAL,
        ),
    ),
    # In one process the queue has three times as many new keys; its place differs too.
    "moco": Row(
        3,
        Place(REPLICAS, ("",), ("buffer:queue",), (0,), ((0, 1, 2),), ("params",)),
        Place(CHANGED, ("",), ("buffer:queue", "buffer:place"), (0,), ((0, 1, 2),), ("params",)),
    ),
    # Ranks do it alike, but what backward computes again is not what forward gave.
    "spectral": Row(
        3,
        Place(("recompute-mismatch",), ("blocks.*",), ANY, (0,), ((0, 1, 2),), ("recompute",)),
        Place(
            ("divergence", "scale-error"),
            ("blocks.*",),
            ("grad_output*", "grad_input*"),
            (0,),
            ((0, 1, 2),),
            ("backward",),
            also=Place(
                ("divergence", "scale-error"),
                ("blocks.*",),
                (*GRADS, "buffer:*"),
                (0,),
                ((0, 1, 2),),
                (*FINAL, "params"),
            ),
        ),
    ),
    # The slow weights of rank 0 are right. They are first used behind the second step of the inner
    # optimizer: what it left is right, what the third step begins with is wrong.
    "lookahead": Row(
        3,
        Place(REPLICAS, ANY, PARAMS, (1, 2), ((0, 1, 2),), ("params",)),
        Place(
            CHANGED,
            ANY,
            PARAMS,
            (1,),
            ((1, 2), (0, 1, 2)),
            ("params",),
            also=Place(
                CHANGED,
                ("words", "rnn"),
                ("output*",),
                (2,),
                ((1, 2), (0, 1, 2)),
                ("forward",),
            ),
        ),
    ),
    "skipgram": Row(
        3,
        Place(NOT_REDUCED, ("words", "contexts"), GRADS, (0,), ((0, 1, 2),), FINAL),
        Place(
            (*NOT_REDUCED, "divergence"),
            ("words", "contexts"),
            GRADS,
            (0,),
            ((0, 1, 2),),
            FINAL,
        ),
    ),
    # Rank 0 leaves out the labels that one process does.
    "guidance": Row(
        2,
        Place(
            REPLICAS,
            ("labels", "labels.table"),
            ("input*", "output"),
            (0,),
            ((0, 1), (1,)),
            ("forward",),
        ),
        Place(
            CHANGED,
            ("labels", "labels.table"),
            ("input*", "output"),
            (0,),
            ((0, 1), (1,)),
            ("forward",),
        ),
    ),
    # The second matrix is zero at first: what it makes of a part of the sum shows in its gradient
    # alone. Its input is one that should have been summed.
    "lowrank": Row(
        2,
        Place(
            NOT_REDUCED,
            ("layers.*.lora_b",),
            GRADS,
            (0,),
            ((0, 1),),
            FINAL,
            also=Place(REPLICAS, ("layers.*.lora_b",), ("input*",), (0,), ((0, 1),), ("forward",)),
        ),
        Place(
            (*NOT_REDUCED, "divergence"),
            ("layers.*.lora_b",),
            GRADS,
            (0,),
            ((0, 1),),
            FINAL,
            also=Place(CHANGED, ("layers.*.lora_b",), ("input*",), (0,), ((0, 1),), ("forward",)),
        ),
    ),
}
