"""What `rankscope tensor` hands out: of each value one rank's tensor, or the global one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.errors import FolderError, LayoutError, SelectionError, TraceError
from rankscope.layout.layoutfile import LayoutFile
from rankscope.record.ranks import ranks_text
from rankscope.run.files import free_place
from rankscope.spool.chunks.safetensors import Outgoing, write_tensors
from rankscope.tree.tensors.globalvalues import assembled, local_tensor, plan_whole
from rankscope.tree.tensors.kept import held_shapes, references, stored, value_name, why_not_kept
from rankscope.tree.tensors.tensornames import Chosen, Wanted, choose
from rankscope.tree.views import Trace

if TYPE_CHECKING:
    import torch

_MOST_LEFT_OUT = 5
_WORST_FIRST = (TraceError, LayoutError, SelectionError)  # kept and unreadable ... never kept
Say = Callable[[str], None]
"""Told, one line each, what was inferred, left out, or found to differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTensor:
    """One tensor to hand out, made when it is wanted; `whence` says whose it is."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    whence: str
    make: Callable[[], torch.Tensor]


def asked_tensors(
    trace: Trace,
    wanted: Wanted,
    say: Say,
    *,
    rank: int | None = None,
    is_global: bool = False,
    layouts: LayoutFile | None = None,
) -> list[AskedTensor]:
    """Return the tensors that were asked for: one rank's (None: of the only one that has it), or
    put together from all.

    What a glob takes and cannot be handed out is left out and said; a name that means one value has
    to give it.

    Raises:
        SelectionError: a name means nothing, or was not kept; says why.
        LayoutError: nothing says how pieces belong together, or they contradict it.
        TraceError: bytes cannot be found.
    """
    held = {int(each["rank"]) for each in trace.run["ranks"]}
    if rank is not None and rank not in held:
        raise SelectionError(f"--rank {rank}: the trace holds ranks {ranks_text(held)}")
    chosen, notes = choose(trace, wanted)
    for line in notes:
        say(line)
    asked: list[AskedTensor] = []
    left_out: list[tuple[int, str]] = []
    for each in chosen:
        try:
            asked.append(
                _global(each, layouts, say) if is_global else _local(each, _rank_of(each, rank))
            )
        except (SelectionError, LayoutError, TraceError) as error:
            if each.is_named:
                raise
            badness = next(i for i, kind in enumerate(_WORST_FIRST) if isinstance(error, kind))
            left_out.append((badness, str(error)))
    left_out.sort(key=lambda each: each[0])
    for _, line in left_out[:_MOST_LEFT_OUT] if asked else ():
        say(f"left out: {line}")
    if asked and len(left_out) > _MOST_LEFT_OUT:
        say(f"left out: {len(left_out) - _MOST_LEFT_OUT} more")
    if not asked:
        reason = left_out[0][1] if left_out else "none of these is a tensor"
        more = f" (and {len(left_out) - 1} more like it)" if len(left_out) > 1 else ""
        raise SelectionError(f"nothing to hand out: {reason}{more}")
    return asked


def save_tensors(out: Path, asked: Iterable[AskedTensor], *, is_forced: bool = False) -> int:
    """Write tensors under their keys, and return the size of the file. A file that is
    there is replaced where `is_forced` says so.

    Raises:
        FolderError: something is there, or it cannot be written.
    """
    from rankscope.tree.tensors.rebuild import bytes_of

    def outgoing(each: AskedTensor) -> Outgoing:
        return each.key, each.dtype, each.shape, lambda: bytes_of(each.make())

    try:
        target = free_place(out, is_forced=is_forced)
        return write_tensors(target, [outgoing(each) for each in asked])
    except OSError as error:
        raise FolderError(
            f"--out {out}: cannot be written: {error.strerror or error}; nothing was left there: "
            "make room, or give another name"
        ) from error


def printed(asked: Iterable[AskedTensor]) -> Iterator[tuple[str, str]]:
    """Yield a headline and the numbers of each tensor; of large ones the edges."""
    for each in asked:
        yield f"{each.key}  {each.dtype}{list(each.shape)}  {each.whence}", str(each.make())


def _rank_of(each: Chosen, rank: int | None) -> int:
    if rank is not None:
        return rank
    known = sorted(references(each.value))
    if not known:
        raise SelectionError(why_not_kept(each.value, each.value.ranks))
    if len(held_shapes(each.value)) > 1:
        raise SelectionError(
            f"{value_name(each.value)} is on ranks {ranks_text(held_shapes(each.value))}: ask for "
            f"one with --rank {known[0]}, or for the global tensor with --global"
        )
    return known[0]


def _local(each: Chosen, rank: int) -> AskedTensor:
    value = each.value
    if rank not in references(value):
        raise SelectionError(why_not_kept(value, [rank]))
    found = stored(value, rank, references(value)[rank])
    return AskedTensor(
        key=each.key,
        dtype=found.dtype,
        shape=found.shape,
        whence=f"of rank {rank}",
        make=lambda: local_tensor(value, rank, is_checked=True),
    )


def _global(each: Chosen, layouts: LayoutFile | None, say: Say) -> AskedTensor:
    planned = plan_whole(each.value, layouts)

    def made() -> torch.Tensor:
        whole = assembled(each.value, planned.plan)
        for mismatch in whole.mismatches:
            say(f"{each.key}: {mismatch}")
        return whole.tensor

    for note in planned.notes:
        say(f"{each.key}: {note}")
    return AskedTensor(
        key=each.key,
        dtype=planned.dtype,
        shape=planned.plan.global_shape,
        whence=f"global, from ranks {ranks_text(planned.plan.ranks)}",
        make=made,
    )
