"""Reads of a layer's weight by the pass of another module, which may multiply by it without the layer.

The layer takes its weight from its parameters, so that what reads the attribute is other code, and the layer's own pass
has nothing to do for it.
"""

from __future__ import annotations

from typing import Any

import torch

from lpq.torch_private.callers import another_pass_reads


class Weight:
    """The weight as an attribute of a class of layers. It notes the first such read in the layer's ``passes``; a read
    that a compiler traces is not noted."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: Any = None) -> Any:
        if layer is None:
            return self
        parameters = layer._parameters
        if self.name not in parameters:
            raise AttributeError(self.name)  # so that torch looks elsewhere, and says so
        passes = vars(layer).get("passes")  # none while the class before the conversion sets it up
        if not (torch.compiler.is_compiling() or passes is None or passes.read_past) and another_pass_reads(layer):
            passes.read_past = True
        return parameters[self.name]
