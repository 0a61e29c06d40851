"""Expert parallelism: each rank of a mesh has some whole experts, and receives the rows of all ranks that are routed to
them.

A statistic of an expert never spans ranks, so its codes and scales are the ones that a single process would get from
the rows of all ranks, in the order of ranks.
"""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from lpq.distributed.alike import check_part
from lpq.distributed.expert_rows import Dispatch, Dispatched, RowExchange, encoded_rows
from lpq.distributed.model_check import ModelCheck
from lpq.registry.errors import suggestion
from lpq.tensor.fsdp_protocol import Gathered

__all__ = ["ExpertParallel"]


class ExpertParallel(ParallelStyle):
    """A style for ``parallelize_module``, for a module that holds experts and nothing else.

    Its forward takes rows, ``[rows, features]``, which lie expert by expert, and where each expert's end, as
    ``lpq.nn.GroupedLinear`` does, and returns a row for each. Its parameters have one part for each expert along their
    first dimension. Each rank calls the module with rows for all experts and gets the results of those rows; the
    module's forward gets the rows of all ranks for this rank's experts. The host waits for the numbers of rows.

    ``dispatch="high_precision"``: rows travel as they are. ``"encoded"``: they travel as the row operand of the
    module's recipe, which is refused where the result would not be the same to the bit. The gradients of results travel
    encoded, too, where that changes no bit.
    """

    def __init__(self, *, dispatch: Dispatch = "high_precision") -> None:
        super().__init__()
        if dispatch not in get_args(Dispatch):
            raise ValueError(f"ExpertParallel: dispatch={dispatch!r}: {suggestion(str(dispatch), get_args(Dispatch))}")
        self.how = dispatch

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        check_part(module, f", to be shared out by ExpertParallel(dispatch={self.how!r})", device_mesh)
        _check(module, device_mesh)
        encoded = self.how == "encoded"
        if encoded and (why_not := encoded_rows(module)[1]):
            raise ValueError(
                f"ExpertParallel: rows of {type(module).__name__} cannot be dispatched encoded: {why_not}. Use "
                "dispatch='high_precision', or one recipe whose x is encoded row by row, and whose column operand is "
                "made of that (col_source=row)"
            )
        check = ModelCheck(module)  # replicas, with which no rows are exchanged
        for part in module.modules():
            if hasattr(type(part), "dispatched"):
                part.dispatched = Dispatched(encoded)
                part.model.check = part.model.check or check
        module.dispatched = RowExchange(module, encoded)
        hooks: tuple[Any, ...] = () if getattr(module, "routes_tokens", False) else (_dispatch_inputs, _combine_outputs)
        return distribute_module(module, device_mesh, _share_out, *hooks)


def _dispatch_inputs(module: Any, inputs: Any, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """The arguments of the module's forward."""
    if len(inputs) != 2:
        raise TypeError(
            f"ExpertParallel: {type(module).__name__} was called with {len(inputs)} arguments, and a module of experts "
            "takes rows and where each expert's end; convert one that routes tokens itself with a recipe first"
        )
    exchange: RowExchange = module.dispatched
    rows, ends = inputs
    return exchange.dispatch(rows, ends, mesh)


def _combine_outputs(module: Any, output: Tensor, mesh: DeviceMesh) -> Tensor:
    exchange: RowExchange = module.dispatched
    return exchange.combine(output)


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a module whose experts cannot be divided over the ranks of this mesh."""
    name = type(module).__name__
    if mesh.ndim != 1:
        raise ValueError(f"ExpertParallel: the mesh has {mesh.ndim} dimensions: pass one of them, as mesh['ep']")
    parameters = dict(module.named_parameters())
    counts = {parameter.shape[0] for parameter in parameters.values() if parameter.dim() == 3}
    if len(counts) != 1:
        raise ValueError(
            f"ExpertParallel: {name} has stacks of {sorted(counts)} experts: apply it to a module with one number"
        )
    count = counts.pop()
    if count % mesh.size():
        raise ValueError(
            f"ExpertParallel: {count} experts of {name} over {mesh.size()} ranks: use a number that divides them"
        )
    for key, parameter in parameters.items():
        if hasattr(parameter, "device_mesh"):
            raise ValueError(f"ExpertParallel: {key} of {name} is sharded already: apply it once, before fully_shard")
        if parameter.dim() < 2 or parameter.shape[0] != count:
            raise ValueError(
                f"ExpertParallel: {key} of {name} is {list(parameter.shape)}, and not one part for each of {count} "
                "experts: apply it to a module that holds experts alone"
            )
        if isinstance(parameter, Gathered):
            raise ValueError(
                f"ExpertParallel: {key} of {name} was prepared by lpq.convert(…, weights=…), which is not built for "
                "experts that are divided over ranks: convert without weights="
            )


def _share_out(name: str, module: Any, mesh: DeviceMesh) -> None:
    """Leave each rank its experts."""
    for key, parameter in module.named_parameters(recurse=False):
        part = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        module.register_parameter(key, nn.Parameter(part, requires_grad=parameter.requires_grad))
