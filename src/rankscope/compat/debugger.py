"""`model_addition_debugger_context`: the files of transformers' module debugger, from a trace.

    with model_addition_debugger_context(model, debug_path="trace"):
        model(**inputs)                    # or model.forward(**inputs)

The block is traced as `rankscope.trace` would, every rank for itself, full tensors kept; at its end
`rankscope.view.hf` writes the files from that trace, which is then removed. docs/compat.md says
what is the same as in transformers 5.23 and what is not.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from torch import nn

from rankscope.agent.guard import Guard, say, text_of
from rankscope.agent.joining import who_am_i
from rankscope.block import rank_block
from rankscope.capture.forms import said_of, without_addresses
from rankscope.compat.debuggercalls import DirectCalls
from rankscope.tree.reader import open_trace
from rankscope.view.hf import Files, write_rank
from rankscope.view.hfvalues import LocalValues

__all__ = ["model_addition_debugger_context"]

_SETTINGS: Final = {
    "steps": "all", "ranks": "all", "paths": "*", "phases": "forward", "digest": "none",
    "slots": "input*,output*,returned*,form:*", "tensors": "**",
    "compile": "opaque", "keep_spool": "0",
}  # fmt: skip
_NEW: Final = ".rankscope-debugger-"
Ranks = int | Iterable[int] | Literal["all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What one `with` asks for."""

    model: nn.Module
    folder: Path
    files: Files
    rank: int


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

    Raises:
        ValueError: `debug_path` cannot be a folder.
    """
    identity = who_am_i()
    is_wanted = _wants(ranks, identity.rank)
    folder = _folder(debug_path) if is_wanted else Path()
    with DirectCalls(model, no_grad=no_grad) as direct:
        if not is_wanted:
            yield model
            return
        is_alone = identity.world_size == 1 or ranks == "all"
        label = "" if ranks == 0 else f"_rank{identity.rank}"
        files = Files(
            prunes=do_prune_layers, as_text=use_repr, all_outputs=all_outputs, label=label
        )
        request = _Request(model=model, folder=folder, files=files, rank=identity.rank)
        with _traced(request, direct, runs_reprs=is_alone):
            yield model


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


@contextmanager
def _traced(request: _Request, direct: DirectCalls, *, runs_reprs: bool) -> Iterator[None]:
    """Trace the block and write its files, however it ends; what fails here is said, not raised."""
    own = Path(tempfile.mkdtemp(prefix=_NEW, dir=request.folder))
    try:
        with rank_block(
            request.model, {**_SETTINGS, "out": own / "trace"}, _repr_of if runs_reprs else said_of
        ) as session:
            direct.follow(session)
            try:
                yield
            finally:
                direct.follow(None)
    finally:
        Guard(lambda error: say(f"the debugger's files were not written: {text_of(error)}")).hook(
            _write
        )(request, own / "trace")
        shutil.rmtree(own, ignore_errors=True)


def _write(request: _Request, folder: Path) -> None:
    if not folder.is_dir():
        return  # it could not begin, and why was said
    trace = open_trace(folder)
    values = LocalValues(trace, request.rank, as_text=request.files.as_text)
    write_rank(request.folder, trace.steps, values, request.files, rank=request.rank)


def _repr_of(value: object) -> str:
    """Return the repr of an argument, as transformers writes it; its class where that raises."""
    said: list[str] = []
    guard = Guard(lambda _error: said.append(said_of(value)))
    guard.hook(lambda: said.append(without_addresses(repr(value))))()
    return said[0] if said else said_of(value)
