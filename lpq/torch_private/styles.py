"""Styles of tensor parallelism: the functions by which torch's styles lay out the inputs of a module."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel
from torch.distributed.tensor.parallel import ParallelStyle

SHARED_OUT = "_distribute_module_applied"
"""An attribute of modules that a style for layers has shared out, which torch does once."""


class LayerStyle(ParallelStyle):
    """Comes before one of torch's styles for layers, and lays out their inputs by ``lay_out``."""

    @classmethod
    def lay_out(cls, module: nn.Module, inputs: Any, layout: Any, desired: Any, mesh: DeviceMesh) -> Any:
        """The inputs that the layer gets."""
        raise NotImplementedError(f"{cls.__name__} does not lay out inputs")

    @classmethod
    def _prepare_input_fn(cls, layout: Any, desired: Any, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return cls.lay_out(module, inputs, layout, desired, mesh)


class InputStyle(parallel.PrepareModuleInput):
    """torch's ``PrepareModuleInput``, which lays out each input by ``lay_out``."""

    def lay_out(self, input: Any, mesh: DeviceMesh, layout: Any, desired: Any) -> Any:
        """The input that the module gets."""
        return super()._prepare_input_arg(input, mesh, layout, desired)

    def _prepare_input_arg(self, input: Any, mesh: DeviceMesh, input_layout: Any, desired_layout: Any) -> Any:
        return self.lay_out(input, mesh, input_layout, desired_layout)
