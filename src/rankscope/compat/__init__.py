"""Three tools of Hugging Face transformers for any `nn.Module`, without transformers installed.

The module debugger, output capture and class patching, under the names and signatures they have in
transformers 5.23; docs/compat.md says call by call what is the same and what is better. Importing
this package imports neither torch nor transformers: every name is loaded when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.compat.debugger.modeldebugger import model_addition_debugger_context
    from rankscope.compat.outputs.capture import capture_outputs, select_hidden_states
    from rankscope.compat.outputs.flags import merge_with_config_defaults
    from rankscope.compat.outputs.outputrecorder import OutputRecorder
    from rankscope.compat.patching.apply import apply_patches
    from rankscope.compat.patching.mapping import (
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
    "OutputRecorder": "rankscope.compat.outputs.outputrecorder",
    "apply_patches": "rankscope.compat.patching.apply",
    "capture_outputs": "rankscope.compat.outputs.capture",
    "clear_patch_mapping": "rankscope.compat.patching.mapping",
    "get_patch_mapping": "rankscope.compat.patching.mapping",
    "merge_with_config_defaults": "rankscope.compat.outputs.flags",
    "model_addition_debugger_context": "rankscope.compat.debugger.modeldebugger",
    "patch_output_recorders": "rankscope.compat.patching.mapping",
    "register_patch_mapping": "rankscope.compat.patching.mapping",
    "select_hidden_states": "rankscope.compat.outputs.capture",
    "unregister_patch_mapping": "rankscope.compat.patching.mapping",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'rankscope.compat' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
