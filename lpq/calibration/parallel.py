"""Tensor parallelism while statistics are collected: ranks over which layers are divided go through a batch together.

A divided layer is gathered when its turn comes, and multiplied whole on each rank, as one process multiplies it: sums
of parts round differently for other numbers of ranks, and so would scales. Ranks that exchange rows of experts take
turns: in each the experts see one batch, as in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from lpq.calibration.errors import CalibrationError
from lpq.distributed.expert_rows import RowExchange
from lpq.nn import Layer
from lpq.nn.grouped_linear import GroupedLayer
from lpq.nn.parallel import refuse_cut_blocks
from lpq.operations.cut import Cut
from lpq.torch_private.tensors import local_part


class Peers:
    """The ranks over which layers of a model are divided together with this rank, and which therefore get the same
    batches."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = tuple(_shared_out(model))
        """The layers that are sharded over them."""
        for layer in self.layers:
            _check_cut(layer)
        here = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.ranks = tuple(sorted({here, *(rank for layer in self.layers for rank in _ranks(layer.weight))}))
        elsewhere = [parameter for m in model.modules() if is_shared_out(m) for parameter in m.parameters()]
        self.exchange = tuple(sorted({here, *(rank for weight in elsewhere for rank in _ranks(weight))}))
        """The ranks with which this rank exchanges rows of experts."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have each rank multiply whole matrices inside, to the bit as one process does."""
        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(_Whole(layer).in_each_pass())
            yield


def is_shared_out(layer: nn.Module) -> bool:
    """Whether ranks share the experts of a layer out, so that each gets the rows of all ranks for its own."""
    return isinstance(layer, GroupedLayer) and layer.dispatched is not None


@contextmanager
def sending(model: nn.Module, rows: bool) -> Iterator[None]:
    """Inside, send this rank's ``rows`` to experts that are divided over ranks, or none of them."""
    exchanges = [at for m in model.modules() if isinstance(at := getattr(m, "dispatched", None), RowExchange)]
    try:
        for exchange in exchanges:
            exchange.sends = rows
        yield
    finally:
        for exchange in exchanges:
            exchange.sends = True


def _shared_out(model: nn.Module) -> Iterator[nn.Module]:
    """The linear layers whose weights tensor parallelism shards, whether FSDP2 shards them as well or not."""
    with_weights = [m for m in model.modules() if isinstance(m, nn.Linear | Layer) and m.weight.dim() == 2]
    if not any(isinstance(module.weight, DTensor) for module in with_weights):
        return
    from lpq.torch_private.fsdp import outermost, sites

    sharded = sites(outermost(model), "weight")
    for module in with_weights:
        over = isinstance(module.weight, DTensor)
        if over and (sharded[module].is_parallel if module in sharded else True):
            yield module


def _ranks(weight: Any) -> list[int]:
    """The ranks of tensor parallelism of a weight: the last dimension of its mesh, as FSDP2 puts its own before."""
    return dist.get_process_group_ranks(weight.device_mesh.get_group(weight.device_mesh.ndim - 1))


def _check_cut(layer: nn.Module) -> None:
    """Refuse a layer if the ranks' parts of a weight, which are not multiplied here, would cut what cannot be cut."""
    if not isinstance(layer, Layer) or (quantizer := layer.weight_quantizer()) is None:
        return
    weight: Any = layer.weight
    dim, ranks = weight.placements[-1].dim, weight.device_mesh.size(weight.device_mesh.ndim - 1)
    whole = weight.shape[dim]
    reason = Cut(dim, 0, ranks, whole // ranks).why_not(quantizer, row=True, col=True)
    if whole % ranks:
        reason = f"it has {whole} {'columns' if dim else 'rows'}"
    refuse_cut_blocks(layer, ranks, {"its weight": reason}, CalibrationError)


class _Whole:
    """A layer that multiplies whole matrices: it has its whole parameters while a pass runs, and gets the whole input,
    however the input is sharded. The style of the layer shards the output again."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._own: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """The parameters and the buffers of the layer, while it has others."""

    @contextmanager
    def in_each_pass(self) -> Iterator[None]:
        """Gather before each pass inside, after all other hooks, and undo that behind it, also where it fails."""
        before = self._layer.register_forward_pre_hook(self._gather, with_kwargs=True)
        after = self._layer.register_forward_hook(self._share_out, prepend=True, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._restore()

    def _gather(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, *others = args if args else (kwargs.pop("input"),)
        if not isinstance(x, DTensor):
            layouts = getattr(layer, "layouts", None)
            placement: Placement = layouts.input if layouts is not None else Replicate()
            x = DTensor.from_local(x, layer.weight.device_mesh, [placement], run_check=False)
        whole = x.redistribute(placements=[Replicate()]).to_local()
        parameters, buffers = dict(layer._parameters), dict(layer._buffers)
        self._own.append((parameters, buffers))
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                layer._parameters[name] = nn.Parameter(parameter.full_tensor().detach(), requires_grad=False)
        # Buffers are equal on all ranks.
        layer._buffers.update({name: None if b is None else local_part(b) for name, b in buffers.items()})
        return (whole, *others), kwargs

    def _share_out(self, layer: Any, args: Any, y: Tensor | None) -> Tensor | None:
        self._restore()
        return None if y is None else DTensor.from_local(y, layer.weight.device_mesh, [Replicate()], run_check=False)

    def _restore(self) -> None:
        while self._own:
            parameters, buffers = self._own.pop()
            self._layer._parameters.update(parameters)
            self._layer._buffers.update(buffers)
