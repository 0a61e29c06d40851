"""Styles for ``parallelize_module``: layers with a recipe move encoded activations and gradients between ranks.

They replace torch's styles of the same names, and do the same for every module without a recipe: one plan serves a
partly converted model. Convert the model first, then call ``parallelize_module``, and ``fully_shard`` last.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import parallel as torch_styles

from lpq.distributed.alike import check_part
from lpq.tensor import QuantizedTensor
from lpq.torch_private import symmetric
from lpq.torch_private.hooks import noting_own
from lpq.torch_private.styles import InputStyle, LayerStyle

SEQUENCE = "lpq_sequence"
"""An attribute of modules that got ``SequenceParallel``: how their input lies over the ranks."""
STYLED = "lpq_styled"
"""An attribute of modules without a recipe that got a style of lpq's."""

__all__ = ["ColwiseParallel", "Layouts", "PrepareInput", "RowwiseParallel", "SequenceParallel"]


class Layouts(NamedTuple):
    """How a layer's input lies over the ranks, and how its output is to lie."""

    input: Placement
    output: Placement
    overlap: bool = False
    """Whether an input that is gathered is multiplied as its parts arrive."""


class _Style(LayerStyle):
    """The part that lpq adds to torch's styles: an input is passed on as it is, and a layer gets its layouts."""

    input_layouts: Any
    output_layouts: Any
    overlap: bool = False

    @classmethod
    def lay_out(cls, module: nn.Module, inputs: Any, placements_in: Any, placements_out: Any, mesh: DeviceMesh) -> Any:
        """Pass the inputs of a layer with a recipe as they are; lay out the first input of any other module."""
        if _has_recipe(module):
            return inputs
        first = inputs[0]
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, placements_in, run_check=False)
        if first.placements == placements_out:
            return first
        return first.redistribute(placements=placements_out, async_op=True)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _prepare(module, device_mesh, Layouts(self.input_layouts[0], self.output_layouts[0], self.overlap))
        return noting_own(partial(super()._apply, module, device_mesh), module)  # type: ignore[safe-super]  # torch's


class ColwiseParallel(_Style, torch_styles.ColwiseParallel):
    """Share out the rows of a layer's weight, and the columns of its output.

    With ``input_layouts=Shard(1)`` each rank has a part of the sequence. The input of a layer with a recipe is encoded
    first, and its codes are gathered: the row operand in forward, the column operand in backward. Layers that are given
    the same tensor, as q, k and v are, gather it once.
    With ``overlap=True`` it multiplies the parts of its input as they arrive, which takes torch's symmetric memory.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        overlap: bool = False,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.overlap = overlap


class RowwiseParallel(_Style, torch_styles.RowwiseParallel):
    """Divide the columns of a layer's weight, and of its input, over the ranks; the output is the sum over the ranks.
    With ``output_layouts=Shard(1)`` each rank has the sum for its part of the sequence. In a layer with a recipe the
    gradient of this sum is encoded first, and its codes are gathered. A bias is added once, after the sum.
    """


class PrepareInput(InputStyle):
    """Have the layers inside of a module gather its input encoded, where torch's style gathers it before the module:
    the module gets a DTensor with the global shape.
    """

    encoded: bool = False
    """Whether layers inside gather."""

    def lay_out(self, input: Any, mesh: DeviceMesh, placement_in: Any, placement_out: Any) -> Any:
        """Pass this rank's part of an input that layers inside gather."""
        if self.encoded and placement_in is not None and placement_in.is_shard() and placement_out.is_replicate():
            over: Any = DTensor.from_local
            return input if isinstance(input, DTensor) else over(input, mesh, (placement_in,), run_check=False)
        return super().lay_out(input, mesh, placement_in, placement_out)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = copy(self)  # a style may be given to several modules
        style.encoded = any(map(_has_recipe, module.modules()))
        return noting_own(partial(super(PrepareInput, style)._apply, module, device_mesh), module)


class SequenceParallel(torch_styles.SequenceParallel):
    """torch's ``SequenceParallel``, for a norm whose input has the sequence divided over the ranks.

    A norm that ``lpq.fuse`` has found encodes its part of the sequence, and layers behind it gather the codes. With
    torch's own style it computes in high precision, as a hook looks at its output.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_part(module, f", its sequence divided as {self.sequence_sharding[0]}", device_mesh)
        vars(module)[SEQUENCE] = self.sequence_sharding[0]
        return noting_own(partial(super()._apply, module, device_mesh), module)


def _has_recipe(module: nn.Module) -> bool:
    return getattr(module, "weight_quantizer", None) is not None and getattr(module, "recipe", None) is not None


def _prepare(module: nn.Module, mesh: DeviceMesh, layouts: Layouts) -> None:
    """Set, on a layer of lpq, how its input lies over the ranks, and how its output is to lie."""
    check_part(module, f", input {layouts.input}, output {layouts.output}", mesh)
    if not hasattr(module, "weight_quantizer"):
        vars(module)[STYLED] = True
        return
    if isinstance(module.weight, QuantizedTensor):
        raise ValueError(
            f"{module.title}: its weight was prepared by lpq.convert(…, weights='quantized'), which is not built for "
            "weights that tensor parallelism shards: convert with weights='high_precision', or without weights="
        )
    for name, placement in (("input_layouts", layouts.input), ("output_layouts", layouts.output)):
        if not isinstance(placement, Placement):
            raise TypeError(f"{module.title}: {name}={placement!r} is no placement of DTensor, such as Shard(1)")
    reason = symmetric.why_not(mesh) if layouts.overlap else None
    if reason is not None:
        raise RuntimeError(
            f"{module.title}: overlap=True has ranks read each other's memory, which these cannot: {reason}. Leave "
            "it out of the style, or shard the layer over GPUs of one host that are linked"
        )
    module.layouts = layouts  # type: ignore[assignment]
