"""An accelerator for tests, written in Python, whose work is late.

    from tests.lab import lateaccelerator

    lateaccelerator.install()                # needs torch 2.13, and holds for the whole process
    x = torch.ones(3, device="late") * 2     # waits in the queue of the current stream
    x.sum().item()                           # runs what it needs, and is counted as synchronizing

A GPU runs its work at some time of its own. This accelerator is the worst GPU there can be: work
runs when somebody waits for it, and not before. What reads too early finds poison, what forgets to
order two streams gets wrong numbers, each time and on every machine. The files:

    streams.py       queues, events, the thread that runs the work, counting who waits
    memory.py        addresses that no host may read; blocks that are used again behind their stream
    operations.py    an operator of torch becomes an entry of a queue
    copies.py        host and device, pinned memory, poison
    collectives.py   a process group whose collectives are late too (gloo, on a queue of its own)
    freedstorage.py  what FSDP2 frees is poison
    devicemodule.py  `torch.late`: what a program finds of the device in torch

What the mechanism for backends in Python (`torch.utils.backend_registration`) cannot give:

* The C++ side knows one stream. `torch.Stream`, `torch.Event` and `torch.accelerator` do nothing on
  this device: programs have to use `torch.late`, as they use `torch.cuda`. So autograd runs every
  backward node on the default stream of its thread, not on the stream of the forward.
* One device. Nothing of it works in another process (no IPC), nothing is compiled.
* Storages cannot be resized: what FSDP2 frees in that way is overwritten instead. No casts of
  autocast.
* No generator of its own in C++: `operations.py` holds a state of its own, and
  `torch.Generator(device="late")` fails.
* torch's `Backend` has no constructor for Python, so the process group is a class of its own. Where
  it is called itself, and no method of torch's, rankscope sees no collective (FSDP2's own).
* A future of DDP's C++ reducer cannot order streams: the stream that asks for it waits there.

Numbers come from the kernels of the CPU. Where torch takes an operator of such a device to pieces
first (a layer norm, a fused optimizer), they are those of the CPU to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["call_idle", "install", "why_not"]


def why_not() -> str | None:
    """Return why this torch cannot have the accelerator, None where it can."""
    from torch.utils import backend_registration

    # 2.11 and 2.12 have the function, and then miss kernels for such a device
    has_function = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    if not has_function or torch.__version__ < (2, 13):
        return f"torch {torch.__version__} takes no backend written in Python, as 2.13 does"
    return None


def install() -> None:
    """Make the device "late" known to torch in this process, for good.

    Before the first backward: autograd makes a thread for each device that it finds then.
    """
    if hasattr(torch, "late"):
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from tests.lab.lateaccelerator import collectives, copies, freedstorage, operations
    from tests.lab.lateaccelerator.devicemodule import LateModule

    _setup_privateuseone_for_python_backend("late", backend_module=LateModule("torch.late"))
    operations.register()
    copies.register()
    collectives.register()
    freedstorage.register()


def call_idle(claim: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a rank whose accelerator is idle, and has been waited for by nobody."""
    install()
    from tests.lab.lateaccelerator.streams import work

    work.error = None
    torch.late.synchronize()  # type: ignore[attr-defined]  # what `install` registers
    work.synchronizations.clear()
    return claim(*arguments)
