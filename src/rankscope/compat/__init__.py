"""Three tools of Hugging Face transformers for any `nn.Module`, without transformers installed.

The module debugger, output capture and class patching, under the names and signatures they have in
transformers 5.23; docs/compat.md says call by call what is the same and what is better. Importing
this package imports neither torch nor transformers: every name is loaded when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.compat.classpatching import apply_patches
    from rankscope.compat.debugger.modeldebugger import model_addition_debugger_context
    from rankscope.compat.outputcapture import capture_outputs, select_hidden_states
    from rankscope.compat.outputflags import merge_with_config_defaults
    from rankscope.compat.outputrecorder import OutputRecorder
    from rankscope.compat.patchmapping import (
        clear_patch_mapping,
        get_patch_mapping,
        patch_output_recorders,
        register_patch_mapping,
        unregister_patch_mapping,
    )

__all__ = [
    "OutputRecorder",
    "apply_patches",
    "capture_outputs",
    "clear_patch_mapping",
    "get_patch_mapping",
    "merge_with_config_defaults",
    "model_addition_debugger_context",
    "patch_output_recorders",
    "register_patch_mapping",
    "select_hidden_states",
    "unregister_patch_mapping",
]

_HOMES = {
    "OutputRecorder": "rankscope.compat.outputrecorder",
    "apply_patches": "rankscope.compat.classpatching",
    "capture_outputs": "rankscope.compat.outputcapture",
    "clear_patch_mapping": "rankscope.compat.patchmapping",
    "get_patch_mapping": "rankscope.compat.patchmapping",
    "merge_with_config_defaults": "rankscope.compat.outputflags",
    "model_addition_debugger_context": "rankscope.compat.debugger.modeldebugger",
    "patch_output_recorders": "rankscope.compat.patchmapping",
    "register_patch_mapping": "rankscope.compat.patchmapping",
    "select_hidden_states": "rankscope.compat.outputcapture",
    "unregister_patch_mapping": "rankscope.compat.patchmapping",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'rankscope.compat' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
