"""Expert parallelism: each rank of a mesh has some experts, whole, and is sent the rows of all ranks that go to them.

A statistic of an expert never spans ranks, so that its codes and scales are those of one process which is given the
rows of all ranks, one rank's behind the other's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from lpq.tensor.fsdp_protocol import Gathered
from lpq.torch_private.collectives import all_to_all

__all__ = ["ExpertParallel"]


class ExpertParallel(ParallelStyle):
    """A style for ``parallelize_module``, for a module that holds experts and nothing else.

    Its forward takes rows, ``[rows, features]``, which lie expert by expert, and where each expert's end, as
    ``lpq.nn.GroupedLinear`` does, and returns a row for each. Its parameters have one part for each expert along their
    first dimension. Each rank calls it with rows for all experts and gets those rows back; what its forward sees is the
    rows of all ranks for the experts of this one. Rows travel as they are. The host waits for how many go where.
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        _check(module, device_mesh)
        exchange = _Exchange()
        dispatch: Any = exchange.dispatch  # torch says that they return nothing, and uses what they return
        combine: Any = exchange.combine
        module.shares_out_experts = True
        return distribute_module(module, device_mesh, _share_out, dispatch, combine)


class _Sent(NamedTuple):
    """What was sent for one call."""

    order: Tensor
    """Which of the rows that arrived, rank by rank, stands where, expert by expert."""
    sent: list[int]
    """How many rows went to each rank; and how many came from each."""
    received: list[int]
    rows: int
    """How many the caller gave, those behind the last expert's included."""


class _Exchange:
    """Sends the rows of a call to their experts, and the results back."""

    def __init__(self) -> None:
        self._calls: list[_Sent] = []
        """Those that run."""

    def dispatch(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        """The rows of all ranks for the experts of this one, and where each expert's end."""
        rows, ends = inputs
        if not isinstance(ends, Tensor):
            ends = torch.tensor(list(ends), device=rows.device).cumsum(0)
        ranks, group = mesh.size(), mesh.get_group().group_name
        counts = ends.to(torch.int64).diff(prepend=ends.new_zeros(1, dtype=torch.int64)).view(ranks, -1)
        each = [counts.shape[1]] * ranks
        arriving = all_to_all(counts.reshape(-1), each, each, group).view(ranks, -1)
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        arrived: Tensor = _send(rows[: sum(sent)], received, sent, group)
        expert = torch.arange(counts.shape[1], device=rows.device).repeat(ranks).repeat_interleave(arriving.view(-1))
        order = expert.argsort(stable=True)
        self._calls.append(_Sent(order, sent, received, len(rows)))
        return arrived[order], arriving.sum(0).cumsum(0, dtype=torch.int32)

    def combine(self, module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
        """The results of the rows that this rank sent, in their order; zero where a row went to no expert."""
        call = self._calls.pop()
        back = torch.empty_like(call.order)
        back[call.order] = torch.arange(len(back), device=back.device)
        y: Tensor = _send(output[back], call.sent, call.received, mesh.get_group().group_name)
        behind = call.rows - len(y)
        return torch.cat([y, y.new_zeros(behind, *y.shape[1:])]) if behind else y


class _Send(torch.autograd.Function):
    """Rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        ctx.how = sent, received, group
        return all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return all_to_all(gradient, *ctx.how), None, None, None


_send: Any = _Send.apply


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse a module whose experts the ranks of this mesh cannot share out."""
    name = type(module).__name__
    if mesh.ndim != 1:
        raise ValueError(f"ExpertParallel: the mesh has {mesh.ndim} dimensions: pass one of them, as mesh['ep']")
    parameters = dict(module.named_parameters())
    counts = {parameter.shape[0] for parameter in parameters.values() if parameter.dim() == 3}
    if len(counts) != 1:
        raise ValueError(
            f"ExpertParallel: {name} has stacks of {sorted(counts)} experts: share out a module of one number"
        )
    count = counts.pop()
    if count % mesh.size():
        raise ValueError(
            f"ExpertParallel: {count} experts of {name} over {mesh.size()} ranks: use a number that divides them"
        )
    for key, parameter in parameters.items():
        if parameter.dim() < 2 or parameter.shape[0] != count:
            raise ValueError(
                f"ExpertParallel: {key} of {name} is {list(parameter.shape)}, and not one part for each of {count} "
                "experts: share out a module that holds experts alone"
            )
        if isinstance(parameter, Gathered):
            raise ValueError(
                f"ExpertParallel: {key} of {name} was prepared by lpq.convert(…, weights=…), which is not built for "
                "experts that ranks share out: convert without weights="
            )


def _share_out(name: str, module: Any, mesh: DeviceMesh) -> None:
    """Leave each rank its experts."""
    for key, parameter in module.named_parameters(recurse=False):
        part = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        module.register_parameter(key, nn.Parameter(part, requires_grad=parameter.requires_grad))
    if hasattr(module, "experts_elsewhere"):
        module.experts_elsewhere = True
