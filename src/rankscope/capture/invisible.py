"""Looking at tensors without being seen by anything around.

Two degrees. On the CPU rankscope runs no torch operation: it reads attributes and memory, and only
function modes (a default device is one) could notice that: `invisible`. Where torch operations are
needed (accelerators, meshes) autograd, autocast, functorch and every Python mode are kept out too:
`invisible_operations`. Whoever runs them also passes dtype and device to every factory, since those
defaults are what is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rankscope.capture.torch_internals.dispatch import disable_torch_function, operation_guards

invisible = disable_torch_function
"""Returns a context for reading attributes and memory of tensors, about half a microsecond.
Registering a tensor hook needs no more either: grad mode is left as it is."""


@contextlib.contextmanager
def invisible_operations() -> Iterator[None]:
    """Run torch operations in which no mode, hook, autocast or autograd takes part."""
    with contextlib.ExitStack() as stack:
        for guard in operation_guards():
            stack.enter_context(guard)
        yield
