"""Everything in rankscope.compat works where transformers is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BARE = """
import sys
import rankscope.compat
from rankscope.compat import *
assert "transformers" not in sys.modules
for name in rankscope.compat.__all__:
    getattr(rankscope.compat, name)
loaded = {name for name in sys.modules if name.split(".")[0] == "transformers"}
assert not loaded, loaded
"""
WORK = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())

import torch
from torch import nn
from rankscope.compat import (
    OutputRecorder, apply_patches, capture_outputs, clear_patch_mapping, get_patch_mapping,
    merge_with_config_defaults, model_addition_debugger_context, patch_output_recorders,
    register_patch_mapping, unregister_patch_mapping,
)

class Layer(nn.Linear):
    pass

class Other(nn.Linear):
    pass

class Config:
    use_cache = True

class Tower(nn.Module):
    _can_record_outputs = {"hidden_states": OutputRecorder(Layer)}

    def __init__(self, layer=Layer):
        super().__init__()
        self.config = Config()
        self.layers = nn.ModuleList(layer(4, 4) for _ in range(2))

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, x, use_cache=None):
        assert use_cache is True
        for layer in self.layers:
            x = layer(x)
        return {"last_hidden_state": x}

register_patch_mapping({"^Linear$": Other, "^Layer$": Other})
with apply_patches("torch.nn"):
    assert type(nn.TransformerEncoderLayer(4, 2).linear1) is Other
patched, plain = Tower(Other), Tower()
patch_output_recorders(patched)
unregister_patch_mapping(["^Linear$"])
assert get_patch_mapping() == {"^Layer$": Other}
clear_patch_mapping()
with model_addition_debugger_context(plain, debug_path=sys.argv[1]):
    plain(torch.ones(1, 4))
for model in (patched, plain):
    assert len(model(torch.ones(1, 4), output_hidden_states=True)["hidden_states"]) == 3
assert not [name for name in sys.modules if name.split(".")[0] == "transformers"]
"""


def test_importing_it_and_every_name_of_it_loads_no_transformers() -> None:
    subprocess.run([sys.executable, "-c", BARE], check=True, timeout=300)


def test_all_three_tools_work_where_transformers_cannot_be_imported(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WORK, str(tmp_path)], check=True, timeout=300)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"Tower_debug_tree_FULL_TENSORS.json", "Tower_debug_tree_SUMMARY.json"}
