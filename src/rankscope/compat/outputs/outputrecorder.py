"""`OutputRecorder`, and what the entries of a model's `_can_record_outputs` ask for.

An entry is a module class, the name of one, a recorder, or a list of these. All of them are read
into `Watch`, the only form that the rest of output capture knows. Recorders of transformers are
read by their fields, so a declaration may hold either kind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

DECLARATION = "_can_record_outputs"
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes under which wrappers of torch hold a module: no part of the name its author gave."""


class _Base:
    """What transformers' recorder takes the place of: Python lets no class give up `object`."""


@dataclass
class OutputRecorder(_Base):
    """Which modules one output is recorded from, and which element of what they return.

    A module is chosen by `target_class`, by `class_name`, or by either where both are given;
    `layer_name` then narrows the choice. Fields, order and defaults are those of transformers
    5.23.
    """

    target_class: type[nn.Module] | None
    """Modules of this class and of its subclasses; None leaves the choice to `class_name`."""
    index: int | None = 0
    """Element of a returned tuple or list; negative counts from the end, None takes the whole."""
    layer_name: str | None = None
    """Part of the module's path, whole names only: `mlp.gate` is in `layers.0.mlp.gate`, and
    `attn` is not in `layers.0.self_attn`."""
    class_name: str | None = None
    """End of the module's path or of its class's name, or the full name of one of its bases."""
    capture_initial_hidden_state: bool = True
    """Whether `hidden_states` begin with the input of the first module recorded."""
    num_hidden_layers_key: str = "num_hidden_layers"
    """Accepted for transformers, which counts negative indices from this value of the config.
    They are counted from the states there are here, so nothing reads it."""

    def __post_init__(self) -> None:
        be_known_to_transformers()


def transformers_capturing() -> ModuleType | None:
    """Return transformers' module of output capture, None where the program has not loaded it."""
    return sys.modules.get("transformers.utils.output_capturing")


def be_known_to_transformers() -> None:
    """Make `OutputRecorder`, with all there are already, a kind of the recorder of transformers.

    Its capture, its patching and its backbones read the declarations of all models inside a model,
    and take for a class what is not an instance of their own recorder.
    """
    recorder_class = getattr(transformers_capturing(), "OutputRecorder", None)
    if recorder_class is not None and not issubclass(OutputRecorder, recorder_class):
        OutputRecorder.__bases__ = (recorder_class,)


@dataclass(frozen=True, slots=True)
class Watch:
    """One entry of a declaration: what to record, from which modules of the model that has it."""

    key: str
    target: type[nn.Module] | None
    name: str | None
    layer_name: str | None
    index: int | None
    takes_first_input: bool

    def covers(self, cls: type, path: str) -> bool:
        """True where a module at `path` (a dot before every name, "" for the model) is meant."""
        is_of_target = self.target is not None and issubclass(cls, self.target)
        if not (is_of_target or self._is_named(cls, path)):
            return False
        if self.layer_name is None:
            return True
        part = f".{self.layer_name.strip('.')}."
        return part in f"{path}." or part in f"{_without_wrappers(path)}."

    def _is_named(self, cls: type, path: str) -> bool:
        if self.name is None:
            return False
        return (
            path.endswith(self.name)
            or _without_wrappers(path).endswith(self.name)
            or cls.__name__.endswith(self.name)
            or any(base.__name__ == self.name for base in cls.__mro__)
        )


def _without_wrappers(path: str) -> str:
    return ".".join(name for name in path.split(".") if name not in _WRAPPED)


def read_declaration(declared: Mapping[str, Any] | None) -> tuple[Watch, ...]:
    """Return what a model's `_can_record_outputs` asks for, in its order. Raises TypeError where an
    entry is neither a class, a name, a recorder nor a list of these."""
    return tuple(watch for key, entry in (declared or {}).items() for watch in _watches(key, entry))


def _watches(key: str, entry: Any) -> Iterator[Watch]:
    index = 0 if "hidden_states" in key else 1
    if isinstance(entry, (list, tuple)):
        for recorder in entry:
            yield from _watches(key, recorder)
    elif isinstance(entry, type):
        yield Watch(key, entry, None, None, index, key == "hidden_states")
    elif isinstance(entry, str):
        yield Watch(key, None, entry, None, index, key == "hidden_states")
    elif hasattr(entry, "target_class"):
        yield Watch(
            key,
            entry.target_class,
            getattr(entry, "class_name", None),
            getattr(entry, "layer_name", None),
            getattr(entry, "index", 0),
            key == "hidden_states" and getattr(entry, "capture_initial_hidden_state", True),
        )
    else:
        raise TypeError(
            f"_can_record_outputs[{key!r}] is {entry!r}; it takes a module class, the name of "
            "one, an OutputRecorder, or a list of these"
        )
