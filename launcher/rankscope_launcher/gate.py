"""What `rankscope.start` calls at every start of a Python 3.15 or newer: nothing without RANKSCOPE.

It imports only what every interpreter has imported by then. `rankscope.pth` says the same in one
line for older ones, where that line costs no import at all.
"""

import os

__all__ = ["start"]


def start() -> None:
    """Arm rankscope for the import of torch where the variable RANKSCOPE asks for a trace."""
    if os.environ.get("RANKSCOPE", "").lower() not in ("", "0", "false", "no", "off"):
        from rankscope_launcher.startup import install

        install()
