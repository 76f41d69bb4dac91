"""The files that the debugger of transformers writes, from a trace that kept full tensors.

    Net_debug_tree_FULL_TENSORS.json   module calls as they nest: inputs of all, outputs of leaves
    Net_debug_tree_SUMMARY.json        the same without the tensors' values
    Net.fc_inputs_args_0.safetensors   one for each tensor, where they are not written as text

A further forward of the same model and every rank that is not the only one have files of their own:
`Net_debug_tree_rank1_1_...`. docs/commands/export.md has the names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rankscope.chunks.safetensors import write_tensor
from rankscope.compat.debugger.calltree import CallReader, ForwardCall, forwards, prune_layers
from rankscope.errors import FolderError, SelectionError
from rankscope.export.formats import ExportPlace
from rankscope.export.subset import Selection
from rankscope.layout.layoutfile import LayoutFile
from rankscope.run.filenames import TRACE_NAME, Progress
from rankscope.tree.views import Node, Step, Trace

if TYPE_CHECKING:
    from rankscope.compat.debugger.values import GlobalValues, LocalValues, Shown

_MOST_NAME: Final = 200  # bytes of a file's name before its suffix; file systems take 255
_quoted: Final = json.encoder.encode_basestring_ascii
_TREE: Final = re.compile(r"(.+)_debug_tree(?:_rank(\d+))?(?:_(\d+))?_FULL_TENSORS\.json")
_UNSAFE: Final = {ord(char): f"%{ord(char):02X}" for char in "/\\%\0\n\r"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """How the files are written: with the first and the last alone of a list of layers, with the
    outputs of modules that hold others too, and with the rank in every name."""

    prunes: bool = True
    as_text: bool = True
    """Values as lines of `print`; else a safetensors file for each."""
    all_outputs: bool = False
    label: str = ""


def write(
    trace: Trace,
    selection: Selection,
    place: ExportPlace,
    progress: Progress,
    *,
    is_global: bool = False,
    layout: LayoutFile | None = None,
    all_layers: bool = False,
    all_outputs: bool = False,
    safetensors: bool = False,
) -> Sequence[str]:
    """Write the files of every rank that is selected, or of all ranks together."""
    from rankscope.compat.debugger.values import GlobalValues, LocalValues

    steps = [step for step in selection.groups(trace) if not step.is_setup]
    ranks = sorted(selection.ranks(trace))
    files = Files(prunes=not all_layers, as_text=not safetensors, all_outputs=all_outputs)
    names: list[str] = []
    notes: dict[str, None] = {}
    for done, rank in enumerate([None] if is_global else ranks):
        progress("writing forwards", done / len(ranks))
        values: GlobalValues | LocalValues
        if rank is None:
            values = GlobalValues(trace, layout, as_text=files.as_text)
        else:
            values = LocalValues(trace, rank, as_text=files.as_text)
        label = "" if rank is None or len(ranks) == 1 else f"_rank{rank}"
        names += write_rank(place.target, steps, values, replace(files, label=label), rank=rank)
        notes.update(dict.fromkeys(values.notes))
    if not names:
        raise SelectionError("the trace holds no forward of a model in what is asked for")
    return (f"{len(names) // 2} forwards, a pair of files for each", *notes)


def write_rank(
    folder: Path,
    steps: Sequence[Step],
    values: LocalValues | GlobalValues,
    files: Files,
    *,
    rank: int | None,
    is_root: Callable[[Node], bool] | None = None,
) -> list[str]:
    """Write the forwards of one model on one rank (None: of all together) into `folder`, where
    files of the same names are replaced; return the names of the JSON files. `is_root` is None
    where the model is the trace's own root."""
    written: list[str] = []
    is_root = is_root or (lambda node: not node.path)
    for number, root in enumerate(forwards(steps, rank, is_root)):
        mark = f"{files.label}_{number}" if number else files.label
        call = CallReader(root, rank, mark).call(root)
        if files.prunes:
            prune_layers(call)
        written += _Writer(folder, values, files).write(call, f"{root.class_name}_debug_tree{mark}")
    return written


def trees_in(given: Path) -> list[Path]:
    """Return the trees that a debugger wrote into a folder, in the order of the forwards, or the
    one that is named; [] where there is none, and for a trace.

    Raises:
        FolderError: they are of several models or ranks.
    """
    if (given / TRACE_NAME).exists():
        return []
    files = [given] if given.is_file() else [*given.glob("*_FULL_TENSORS.json")]
    found = [(known, file) for file in files if (known := _TREE.fullmatch(file.name))]
    whose = {f"{known[1]} of rank {known[2]}" if known[2] else known[1] for known, _ in found}
    if len(whose) > 1:
        raise FolderError(
            f"{given}: holds files of several models or ranks ({', '.join(sorted(whose))})",
            "name one of its *_FULL_TENSORS.json, or keep those of each in a folder",
        )
    return [file for _, file in sorted(found, key=lambda each: int(each[0][3] or 0))]


class _FileEntry(dict[str, Any]):
    """What stands for a tensor."""


class _Writer:
    def __init__(self, folder: Path, values: LocalValues | GlobalValues, files: Files) -> None:
        self._folder = folder
        self._values = values
        self._files = files
        self._used: set[str] = set()
        self._written: dict[tuple[object, str, tuple[int, ...]], str] = {}

    def write(self, call: ForwardCall, base: str) -> list[str]:
        texts = _json(self._node(call, is_root=True), "\n")
        names = [f"{_safe(base)}_FULL_TENSORS.json", f"{_safe(base)}_SUMMARY.json"]
        for name, text in zip(names, texts):
            draft = self._folder / f".{name}.{os.getpid()}.new"
            try:
                draft.write_text(text, encoding="utf-8")
                os.replace(draft, self._folder / name)
            finally:
                draft.unlink(missing_ok=True)
        return names

    def _node(self, call: ForwardCall, *, is_root: bool = False) -> dict[str, Any]:
        inputs = {
            kind: self._data(
                call, {"items": forms} if kind == "kwargs" else forms, f"_inputs_{kind}"
            )
            for kind, forms in call.inputs.items()
            if forms or is_root
        }
        node: dict[str, Any] = {"module_path": call.name, "inputs": inputs}
        is_shown = is_root or not call.holds_others or self._files.all_outputs
        if self._files.all_outputs or not call.children:
            node["outputs"] = self._data(call, call.output, "_outputs") if is_shown else None
        if is_root and not node.get("outputs"):
            node.pop("outputs", None)
        if call.returned is not None and self._values.is_changed(call.views):
            node["returned"] = self._data(call, call.returned, "_returned")
        if call.children:
            node["children"] = [self._node(child) for child in call.children]
        if call.error:
            node["error"] = call.error
        return node

    def _data(self, call: ForwardCall, form: Any, place: str) -> Any:
        if isinstance(form, list):
            return [self._data(call, each, f"{place}_{i}") for i, each in enumerate(form)]
        if not isinstance(form, dict):
            return form
        if "items" in form:
            items = form["items"].items()
            return {key: self._data(call, each, f"{place}_{key}") for key, each in items}
        shown = self._values.shown(call.node, call.views.get(form["slot"], ()), form)
        if shown is None:
            return _FileEntry(shape=None, dtype=None, value=None, note="it was not recorded")
        return _FileEntry(
            shape=f"torch.Size({list(shown.shape)})",
            dtype=f"torch.{shown.dtype}",
            value=self._value(shown, f"{call.stem}{place}"),
            **shown.facts,
        )

    def _value(self, shown: Shown, stem: str) -> Any:
        if self._files.as_text:
            return None if shown.lines is None else list(shown.lines)
        if shown.data is None:
            return None
        name = self._free(_safe(stem))
        path, known = f"{self._folder}/{name}", (shown.origin, shown.dtype, shown.shape)
        written = None if shown.origin is None else self._written.setdefault(known, path)
        same = None if written == path else written
        write_tensor(path, shown.dtype, shown.shape, shown.data, same)
        return f"./{name}"

    def _free(self, stem: str) -> str:
        name, number = f"{stem}.safetensors", 1
        while name in self._used:
            name, number = f"{stem}~{number}.safetensors", number + 1
        self._used.add(name)
        return name


def _safe(name: str) -> str:
    """Return a name as a file may have it: `/` and others as %2F, a long one cut, with its hash."""
    safe = name.translate(_UNSAFE).encode("utf-8", "backslashreplace")
    if len(safe) <= _MOST_NAME:
        return safe.decode()
    digest = hashlib.sha256(safe).hexdigest()[:16]
    return f"{safe[: _MOST_NAME - 17].decode(errors='ignore')}~{digest}"


def _json(data: Any, line: str) -> tuple[str, str]:
    """Return data as `json.dumps(data, indent=2)` writes it, and the same without the values of
    tensors. (`json` has no C code for indented text: it takes eight times as long.) `line` is a
    line's end with the indent of the next."""
    inner = line + "  "
    comma = "," + inner
    if isinstance(data, str):
        text = _quoted(data)
    elif isinstance(data, dict) and data:
        parts = [(key, f"{_quoted(key)}: ", *_json(each, inner)) for key, each in data.items()]
        left_out = "value" if isinstance(data, _FileEntry) else None
        whole = comma.join(name + text for _, name, text, _ in parts)
        rest = comma.join(name + text for key, name, _, text in parts if key != left_out)
        return f"{{{inner}{whole}{line}}}", f"{{{inner}{rest}{line}}}"
    elif isinstance(data, list) and data:
        if all(type(each) is str for each in data):
            text = f"[{inner}{comma.join(map(_quoted, data))}{line}]"
        else:
            whole, rest = map(comma.join, zip(*(_json(each, inner) for each in data)))
            return f"[{inner}{whole}{line}]", f"[{inner}{rest}{line}]"
    else:
        text = json.dumps(data)
    return text, text
