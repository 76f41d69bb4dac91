"""What to do about a finding, in a sentence or two."""

from __future__ import annotations

from typing import Final

from rankscope.judge.suspects import Suspect
from rankscope.record.call import Phase
from rankscope.record.finding import Kind

__all__ = ["advice_for"]

_ADVICE: Final = {
    Kind.STRUCTURE: "Look for a condition in the module that calls it which depends on the rank, "
    "or on values that differ between ranks.",
    Kind.SHAPE: "Compare how these ranks cut or build the tensor: sizes, offsets, padding.",
    Kind.DTYPE: "Look for a cast, an autocast region or a checkpoint of another dtype on these "
    "ranks.",
    Kind.PLACEMENT: "Look at the DTensor.from_local call that makes this value: with "
    "run_check=False nothing compares what it calls Replicate(). Reduce or broadcast it first, or "
    "give it the placement it has. Behind dropout: ranks that hold the same must draw the same "
    "random numbers.",
    Kind.GRADIENT: "Call the model through its data-parallel wrapper, not through .module; look "
    "at no_sync() around the last micro-batch, and at parameters added after wrapping. Ranks that "
    "are meant to train apart are known by their average: trace a step that has one.",
    Kind.NONFINITE: "Look at this module on these ranks: its inputs were finite. Keep its full "
    "tensors: --rs-tensors with its path.",
    Kind.COLLECTIVE: "Compare the order and the arguments of collectives on these ranks: each "
    "must be called by all members in the same order, with the same op and reduce op.",
    Kind.GROUP: "Call new_group with the same lists in the same order on every rank, also on "
    "those that are no members.",
    Kind.HANG: "Find out why these ranks did not come to this collective: a branch, a loop of "
    "another length, an exception that was caught.",
    Kind.RECOMPUTE: "Checkpointed code must do the same twice: look for random numbers without "
    "preserve_rng_state, for state it changes, and for another autocast or mode in backward.",
    Kind.PARAMETER: "Make the optimizer after fully_shard, parallelize_module or a change of the "
    "parameters, from the model's own parameters().",
    Kind.DUPLICATE: "Look at the sampler: DistributedSampler, its rank and its seed, or a loader "
    "that is built from the global rank.",
    Kind.CRASH: "The traceback of this rank is in its log. One that is gone without an exception "
    "left none: ask the kernel's log (out of memory), the scheduler, and who could send it a "
    "signal.",
}
_REPLICA: Final = {
    Phase.SETUP: "The ranks begin with different weights: look at seeds, at how the checkpoint is "
    "loaded on each rank, and at the broadcast after it.",
    Phase.FORWARD: "Its inputs are as they should be: look for a reduction that is missing in this "
    "module, for other weights, and for random numbers that should be the same on these ranks.",
    Phase.RECOMPUTE: "Look for random numbers that should be the same on these ranks.",
    Phase.BACKWARD: "The gradients that came in agree: look for a reduction that is missing in the "
    "backward of this module.",
    Phase.GRADS: "Something changed these gradients on some ranks only: clipping, scaling, a hook, "
    "a reduction over the wrong group.",
    Phase.PARAMS: "The gradients agree: look at optimizer state and options that differ by rank.",
    Phase.COLLECTIVE: "Look at the arguments of this collective on these ranks.",
}


def advice_for(suspect: Suspect) -> str:
    """Return what to look at."""
    if suspect.advice:
        return suspect.advice
    if suspect.kind is Kind.REPLICA:
        return _REPLICA[suspect.phase]
    return _ADVICE.get(suspect.kind, "")
