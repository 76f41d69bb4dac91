"""Optimizer steps inside `no_sync()`: one warning, and nothing that follows from them is a fault.

Ranks that train apart (local SGD) step while their wrapper is told not to reduce gradients. Whether
they ever average is not known where no traced step holds an average, so it is said, once. From then
on parameters, gradients and activations of these ranks differ because of that.

A program that forgot to end `no_sync()` before its optimizer steps cannot be told from that. One
that ends it, but after the last backward pass, can: its gradients do not carry the flag.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from rankscope.diagnosis.candidates import Candidate
from rankscope.record.call import Phase
from rankscope.record.finding import Kind, Severity
from rankscope.record.ranklists import ranks_named

__all__ = ["with_steps_apart_told_once"]

_ADVICE: Final = (
    "If these ranks are meant to train apart (local SGD), trace a step that holds their average "
    "(--rs-steps): only then it is known that they do. Else end no_sync() before the last backward "
    "pass of a step, or set_requires_gradient_sync(True)."
)
_FOLLOWS: Final = frozenset(Phase) - {Phase.SETUP, Phase.COLLECTIVE}


def with_steps_apart_told_once(suspects: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yield the suspects, with one warning in place of all that comes of steps in `no_sync()`."""
    listed = list(suspects)
    first: dict[int, Candidate] = {}
    for suspect in listed:
        if _is_held_back(suspect):
            first.setdefault(suspect.incarnation, suspect)
    told = {
        life: sum(_is_due_to(suspect, began) for suspect in listed if suspect.incarnation == life)
        for life, began in first.items()
    }
    for suspect in listed:
        began = first.get(suspect.incarnation)
        if began is None or not _is_due_to(suspect, began):
            yield suspect
        elif suspect is began:
            yield dataclasses.replace(
                began,
                message=f"{ranks_named(began.members.tolist())} step inside no_sync(), each with "
                "gradients of their own data, and no traced step averages their parameters; what "
                "differs between these ranks from here on follows from that",
                advice=_ADVICE,
                weight=told[suspect.incarnation],
            )


def _is_held_back(suspect: Candidate) -> bool:
    return suspect.kind is Kind.GRADIENT and suspect.severity is Severity.WARNING


def _is_due_to(suspect: Candidate, began: Candidate) -> bool:
    if _is_held_back(suspect):
        return True
    return (
        suspect.kind is Kind.REPLICA
        and suspect.phase in _FOLLOWS
        and suspect.step >= began.step
        and bool(np.isin(suspect.members, began.members).all())
    )
