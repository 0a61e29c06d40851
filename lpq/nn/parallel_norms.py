"""How ranks have the output of a norm whose layers they share out: each has the whole, or some rows of it, which the
layers gather encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lpq.distributed.tensor_parallel import SEQUENCE
from lpq.nn.linear import Layer
from lpq.nn.parallel import gathered_rows
from lpq.nn.plan import Plan
from lpq.operations.cut import Cut


class DividedNorm(NamedTuple):
    """How ranks have the output of a norm."""

    mesh: DeviceMesh
    placement: Placement
    cut: Cut | None
    """How its rows are divided; None: each rank has all of it."""

    @property
    def group(self) -> str:
        return self.mesh.get_group(self.mesh.ndim - 1).group_name  # FSDP2's dimensions, if any, are before


def over_ranks(
    x: Tensor, norm: nn.Module, layers: Sequence[Layer], plans: Sequence[tuple[Plan, bool]]
) -> DividedNorm | str:
    """Find out how ranks have the output of ``norm`` for ``x``, by which all these layers take it; or why it is not
    encoded. ``plans``: one for each encoding, and whether backward needs its column operand."""
    weights: list[Any] = [layer._parameters.get("weight") for layer in layers]
    layouts = [layer.layouts for layer in layers if layer.layouts is not None]
    if len(layouts) < len(layers) or not all(hasattr(weight, "device_mesh") for weight in weights):
        return "layers that take its output are shared out over ranks by no style of lpq.distributed.tensor_parallel"
    title, mesh = layers[0].title, weights[0].device_mesh
    placement: Placement = layouts[0].input
    for layer, layout, weight in zip(layers, layouts, weights, strict=True):
        if not weight.placements[-1].is_shard(0):
            return f"{layer.title} is shared out by its inputs, of which a rank has a part: it encodes them itself"
        if layout.input != placement or weight.device_mesh != mesh:
            return f"{layer.title} and {title} take their input in different layouts"
    sizes, last, own = [*x.shape], x.dim() - 1, norm._parameters["weight"]
    ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    if isinstance(x, DTensor):
        if x.device_mesh != mesh or not isinstance(own, DTensor) or own.placements != (Replicate(),):
            return "its input or its weight lies over ranks otherwise than the layers that take its output"
        placement = x.placements[0]
    elif isinstance(own, DTensor) and own.device_mesh == mesh:
        # Asked before a pass, in which a style lays out the input.
        placement = vars(norm).get(SEQUENCE, Partial())
    if isinstance(placement, Shard) and not isinstance(x, DTensor):
        sizes[placement.dim] *= ranks
    if not isinstance(placement, Shard | Replicate):
        return f"its input lies over the ranks as {type(placement).__name__}"
    if isinstance(placement, Replicate):
        return DividedNorm(mesh, placement, None)
    dim = placement.dim % x.dim()
    if dim == last:
        return "ranks have parts of its rows"
    cut: Cut | None = None  # the same by each of these plans
    for plan, col in plans:
        rows = gathered_rows(plan, sizes, dim, rank, ranks, col, x.dtype)
        if not isinstance(rows, Cut):
            return f"ranks have parts of its output, which is gathered in high precision: {rows}"
        cut = rows
    return DividedNorm(mesh, placement, cut)


def local_parts(over: DividedNorm, *tensors: Tensor | None) -> list[Tensor | None]:
    """This rank's parts of the input, the weight and the bias of a norm. The gradients of parameters are parts of a
    sum, where ranks have different rows."""
    x, *parameters = tensors
    sums = None if over.cut is None else [Partial()]
    return [
        x.to_local() if isinstance(x, DTensor) else x,
        *(p.to_local(grad_placements=sums) if isinstance(p, DTensor) else p for p in parameters),
    ]


def laid_out(over: DividedNorm, x: Tensor, y: Tensor) -> Tensor:
    """Lay out the output as the input is."""
    return DTensor.from_local(y, over.mesh, [over.placement], run_check=False) if isinstance(x, DTensor) else y
