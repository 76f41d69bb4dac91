"""Model files of transformers in which one import line was changed: rankscope's calls for theirs.

A migrated file is loaded beside the untouched one, as a module of its own in the same package, so
its classes are new ones and its weights are taken over by name.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

_CAPTURING = re.compile(r"^from \.\.\.utils\.output_capturing import (.+)$", re.MULTILINE)
_GENERIC = re.compile(r"^from \.\.\.utils\.generic import (.*merge_with_config_defaults.*)$", re.M)
_MERGE = "from rankscope.compat import merge_with_config_defaults"


def _migrate(source: str) -> str:
    source = _CAPTURING.sub(r"from rankscope.compat import \1", source)

    def split(line: re.Match[str]) -> str:
        others = [name.strip() for name in line[1].split(",")]
        others.remove("merge_with_config_defaults")
        kept = f"from ...utils.generic import {', '.join(others)}\n" if others else ""
        return kept + _MERGE

    return _GENERIC.sub(split, source)


@functools.cache
def migrated(model: str) -> ModuleType:
    """Return `transformers.models.<model>.modeling_<model>` with rankscope's calls."""
    original = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    source = Path(str(original.__file__)).read_text()
    changed = _migrate(source)
    assert changed != source and "output_capturing" not in changed
    name = f"{original.__name__}_migrated"
    path = Path(tempfile.mkdtemp(prefix="migrated-")) / f"modeling_{model}.py"
    path.write_text(changed)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Arrangements:
    """A model and the parts of it at the given paths, each made once untouched and once migrated,
    with the same random weights: what all arrangements of them are copied from.
    """

    def __init__(self, model: str, class_name: str, config: Any, parts: tuple[str, ...]) -> None:
        torch.manual_seed(7)
        config = copy.deepcopy(config)
        for part in (config, *vars(config).values()):
            if hasattr(part, "_attn_implementation"):
                part._attn_implementation = "eager"
        home = f"transformers.models.{model}.modeling_{model}"
        whole = _class(home, class_name, is_ours=False)(config)
        self._made = {("", False): whole, ("", True): _class(home, class_name, True)(config)}
        self._paths = [path for path in parts if path]
        for path in self._paths:
            part = whole.get_submodule(path)
            home, name = type(part).__module__, type(part).__name__
            for is_ours in (False, True):
                self._made[path, is_ours] = _class(home, name, is_ours)(part.config)
            whole.set_submodule(path, self._made[path, False])
        self._weights = copy.deepcopy(whole.state_dict())

    def of(self, ours: set[str]) -> nn.Module:
        """Return a model of its own whose parts at the paths in `ours` are migrated, the others
        untouched; "" is the model around them.
        """
        whole = self._made["", "" in ours]
        for path in self._paths:  # a part in a part comes after it
            whole.set_submodule(path, self._made[path, path in ours])
        made = copy.deepcopy(whole).eval()
        made.load_state_dict(self._weights)
        return made


def _class(home: str, name: str, is_ours: bool) -> Any:
    module = migrated(home.split(".")[-2]) if is_ours else importlib.import_module(home)
    return getattr(module, name)


def pair(model: str, class_name: str, config: Any) -> tuple[nn.Module, nn.Module]:
    """Return an untouched model and its migrated twin, with the same random weights."""
    original = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    torch.manual_seed(7)
    theirs = getattr(original, class_name)(config).eval()
    ours = getattr(migrated(model), class_name)(config).eval()
    if model == "llava":  # its parts come from a registry of transformers
        ours.model.vision_tower = migrated("clip").CLIPVisionModel(config.vision_config)
        ours.model.language_model = migrated("llama").LlamaModel(config.text_config)
        ours.eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours
