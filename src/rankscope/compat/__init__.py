"""Three tools of Hugging Face transformers for any `nn.Module`, without transformers installed.

The module debugger, output capture and class patching, under the names and signatures they have in
transformers 5.23; docs/compat.md says call by call what is the same and what is better. Importing
this package imports neither torch nor transformers: every name is loaded when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.compat.capture import capture_outputs, select_hidden_states
    from rankscope.compat.config_defaults import merge_with_config_defaults
    from rankscope.compat.debugger import model_addition_debugger_context
    from rankscope.compat.patchapply import apply_patches
    from rankscope.compat.patchmapping import (
        clear_patch_mapping,
        get_patch_mapping,
        register_patch_mapping,
        unregister_patch_mapping,
    )
    from rankscope.compat.patchrecorders import patch_output_recorders
    from rankscope.compat.recorder import OutputRecorder

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
    "OutputRecorder": "rankscope.compat.recorder",
    "apply_patches": "rankscope.compat.patchapply",
    "capture_outputs": "rankscope.compat.capture",
    "clear_patch_mapping": "rankscope.compat.patchmapping",
    "get_patch_mapping": "rankscope.compat.patchmapping",
    "merge_with_config_defaults": "rankscope.compat.config_defaults",
    "model_addition_debugger_context": "rankscope.compat.debugger",
    "patch_output_recorders": "rankscope.compat.patchrecorders",
    "register_patch_mapping": "rankscope.compat.patchmapping",
    "select_hidden_states": "rankscope.compat.capture",
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
