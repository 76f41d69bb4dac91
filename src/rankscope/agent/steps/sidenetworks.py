"""Networks that a frozen model's modules call and do not hold: adapters in the place of the layers'
own `forward`. The model's forward builds a graph where theirs does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rankscope.agent.hooks.members import modules_of, parameters_of_module
from rankscope.agent.hooks.modules import Root
from rankscope.agent.steps.compiled import outermost_modules_of
from rankscope.agent.steps.optimizersearch import OptimizerSearch, held_parameters

__all__ = ["SideNetworks"]


class SideNetworks:
    """Finds such networks, and says which train steps they begin."""

    def __init__(self, optimizers: OptimizerSearch, record_setup: Callable[[Root], None]) -> None:
        self._optimizers = optimizers
        self._record_setup = record_setup
        self.frozen: Root | None = None
        """Root whose last forward could have built a graph, and reached nothing that is trained."""

    def trained_network_of(self, module: nn.Module) -> nn.Module | None:
        """Return the outermost module that holds `module`, where an optimizer trains it."""
        wanted = frozenset(map(id, parameters_of_module(module)))
        optimizer = self._optimizers.holder_of(wanted)
        if optimizer is None:
            return None
        for network in outermost_modules_of(optimizer):
            if any(each is module for _, each in modules_of(network)):
                return network
        return None

    def is_called_by_frozen(self, side: Root | None) -> bool:
        """True for a root of its own that modules of the frozen root call; takes note of that."""
        if self.frozen is None or side is None or side is self.frozen:
            return False
        self.called(self.frozen, side)
        return True

    def called(self, root: Root | None, side: Root) -> None:
        """Note a network that modules of a root call and do not hold: from the next forward on the
        root builds a graph where the network would."""
        if root is None or side is root or side in root.sides:
            return
        root.sides.append(side)
        self._record_setup(side)

    def trains_side_of_frozen(self, optimizer: torch.optim.Optimizer) -> bool:
        """True where an optimizer trains a side network of the frozen root; asked once a root."""
        frozen, self.frozen = self.frozen, None
        if frozen is None:
            return False
        held = held_parameters(optimizer)
        return any(
            id(parameter) in held
            for side in frozen.sides
            if (top := side.module()) is not None
            for parameter in parameters_of_module(top)
        )
