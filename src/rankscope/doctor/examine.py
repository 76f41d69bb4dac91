"""All conditions, in the order in which they depend on each other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rankscope.agent.identity import placed
from rankscope.doctor.condition import Condition
from rankscope.doctor.host import clock, descriptors, kernel, leftovers, spool_conditions
from rankscope.doctor.interpreter import interpreter_conditions
from rankscope.doctor.job import collector, ranks, read_settings, trace_folder, variables

__all__ = ["Question", "examine", "job_conditions"]

_ON_SETTINGS = (
    "spool folder", "spool disk", "spool space", "spool files", "socket", "trace folder",
    "collector", "leftovers",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is going to be run here."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """{field: text} of settings that are given; the rest comes from variables and defaults."""
    local_ranks: int | None = None
    """Ranks of this host; None for what a launcher's variables say, else 1."""
    hosts: int = 1
    python: tuple[str, ...] = (sys.executable,)
    """How the ranks' interpreter is called."""


def examine(question: Question, environ: Mapping[str, str] = os.environ) -> Iterator[Condition]:
    """Yield every condition as soon as it is known."""
    yield from interpreter_conditions(question.python, environ)
    yield from job_conditions(question, environ)


def job_conditions(
    question: Question, environ: Mapping[str, str] = os.environ
) -> Iterator[Condition]:
    """Yield those that do not ask the ranks' interpreter."""
    found = placed(environ)
    local_ranks = question.local_ranks or (found and found.local_world_size) or 1
    world_size = local_ranks * question.hosts
    if question.local_ranks is None and found is not None:
        world_size = max(world_size, found.world_size)
    yield ranks(environ)
    yield variables(environ)
    settings, condition = read_settings(question.settings, world_size, environ)
    yield condition
    if settings is None:
        yield from (Condition.skipped(name, "settings") for name in _ON_SETTINGS)
    else:
        yield from spool_conditions(settings, local_ranks)
        yield trace_folder(settings, question.hosts)
        yield collector(settings)
        yield leftovers(settings)
    yield descriptors(local_ranks, question.hosts)
    yield clock(question.hosts)
    yield kernel(environ)
