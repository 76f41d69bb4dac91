"""`model_addition_debugger_context`: the files of transformers' module debugger, from a trace.

    with model_addition_debugger_context(model, debug_path="trace"):
        model(**inputs)                    # or model.forward(**inputs)

The block is traced as `rankscope.trace` would, every rank for itself, full tensors kept; at its end
`treefiles` writes the files from that trace, which is removed with the last open block.
docs/compat.md says what is the same as in transformers 5.23 and what is not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from torch import nn

from rankscope.agent.join import who_am_i
from rankscope.compat.debugger.directcalls import DirectCalls
from rankscope.compat.debugger.trace import DebuggerBlock
from rankscope.compat.debugger.treefiles import Files

Ranks = int | Iterable[int] | Literal["all"]


@contextmanager
def model_addition_debugger_context(
    model: nn.Module,
    debug_path: str | os.PathLike[str] | None = None,
    do_prune_layers: bool = True,
    use_repr: bool = True,
    no_grad: bool = True,
    ranks: Ranks = 0,
    *,
    all_outputs: bool = False,
    forwards: int | None = 100,
) -> Iterator[nn.Module]:
    """Write what goes in and comes out of every module of `model`, for each of its forwards in the
    block: `{Class}_debug_tree_FULL_TENSORS.json` and `_SUMMARY.json`.

    Args:
        model: any module; wrapped in DDP, FSDP2 or a checkpoint wrapper too.
        debug_path: folder for the files, made with its parents; default the current one.
        do_prune_layers: leave the first and the last of each list of layers.
        use_repr: write values as lines of `print`; else each tensor to a safetensors file of its
            own, which the JSON names.
        no_grad: run the forward of every module below the model under `torch.no_grad()`, on every
            rank, as transformers does; with False the block may train.
        ranks: whose files are written: 0, other ranks, or "all". Unless it is 0 the rank stands in
            every name.
        all_outputs: write the outputs of modules that hold others too.
        forwards: of how many forwards files are written, the first of the block; what is left out
            is said on stderr. None for all.

    Raises:
        ValueError: `debug_path` cannot be a folder, or `forwards` is no number of forwards.
    """
    if forwards is not None and forwards < 1:
        raise ValueError(f"forwards={forwards}: give 1 or more, or None for all")
    identity = who_am_i()
    is_wanted = _wants(ranks, identity.rank)
    folder = _folder(debug_path) if is_wanted else None
    label = "" if ranks == 0 else f"_rank{identity.rank}"
    files = Files(prunes=do_prune_layers, as_text=use_repr, all_outputs=all_outputs, label=label)

    is_alone = identity.world_size == 1 or ranks == "all"
    block = DebuggerBlock(
        model, folder, files, rank=identity.rank, runs_reprs=is_alone, forwards=forwards
    )
    direct = DirectCalls(model, no_grad=no_grad)
    with direct.standing():
        direct.session = block.begin()
        try:
            yield model
        finally:
            direct.session = None
            block.end()


def _wants(ranks: Ranks, rank: int) -> bool:
    if isinstance(ranks, str):
        if ranks != "all":
            raise ValueError(f"ranks={ranks!r}: give a rank, several, or 'all'")
        return True
    return rank == ranks if isinstance(ranks, int) else rank in set(ranks)


def _folder(debug_path: str | os.PathLike[str] | None) -> Path:
    folder = Path(debug_path or ".").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Unexpected or existing debug_path={debug_path}.") from error
    return folder
