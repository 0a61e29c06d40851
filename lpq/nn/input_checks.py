"""Checks of a layer's input and weight before anything is launched, with errors in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from lpq.nn.stateful_layer import StatefulLayer
from lpq.nn.weighted_layer import WeightedLayer
from lpq.operations.inputs import DTYPES
from lpq.operations.operators import ORDINARY
from lpq.tensor.fsdp_protocol import Gathered
from lpq.tensor.quantized_tensor import REMEDY
from lpq.torch_private.compiling import once_when_traced
from lpq.torch_private.dispatch import jit_traces, transforms
from lpq.torch_private.distributed import active_replica, outlasts_ranks
from lpq.torch_private.tensors import base_of, has_storage, local_part


def check(layer: WeightedLayer, input: Tensor, weight: Tensor) -> None:
    """Raise if the layer cannot multiply this input by this weight."""
    _check_tensors(layer, input, weight)
    if input.shape[-1] != layer.in_features:
        raise ValueError(
            f"{layer.title}: the input is {list(input.shape)}, its last dimension must be {layer.in_features}"
        )
    if hasattr(weight, "device_mesh"):
        raise RuntimeError(
            f"{layer.title}: its weight is sharded and was not gathered; call the module that fully_shard was "
            "called on, whose forward gathers it, or its unshard(). Under tensor parallelism convert before "
            "parallelize_module, with a style of lpq.distributed.tensor_parallel; or give the layer a DTensor"
        )
    if hasattr(input, "device_mesh"):
        raise TypeError(
            f"{layer.title}: its input is a DTensor, and its weight is not: give the layer a style in the plan of "
            "parallelize_module, or pass input.full_tensor()"
        )
    if input.device != weight.device:
        raise on_two_devices(layer.title, input, weight)
    if (why := why_not_followed()) is not None:
        raise RuntimeError(f"{layer.title}: {why}")
    if not torch.compiler.is_compiling():
        check_static(layer, layer.title)
        part = layer.gather is not None and "weight" in vars(layer) and base_of(weight) is not None
        if part and not any(isinstance(p, Gathered) for p in layer.parameters()):  # else FSDP2 gathers it quantized
            raise RuntimeError(
                f"{layer.title}: its weight, which lpq.convert(…, weights=…) prepared, was made a part of another "
                f"parameter, as FullyShardedDataParallel (FSDP1) does it: {REMEDY}"
            )
    if weight.shape[1:] != (layer.in_features,):
        raise ValueError(
            f"{layer.title}: the weight is {list(weight.shape)}, and must be [outputs, {layer.in_features}]"
        )


def _check_tensors(layer: WeightedLayer, input: Tensor, weight: Tensor) -> None:
    if not isinstance(input, Tensor):
        why = "trace by torch.fx before lpq.convert" if isinstance(input, torch.fx.Proxy) else "it must be a tensor"
        raise TypeError(f"{layer.title}: the input is a {type(input).__name__}, {why}")
    if input.is_nested:
        raise TypeError(
            f"{layer.title}: the input is nested: pass x.values(), or torch.nested.to_padded_tensor(x, 0.0)"
        )
    if input.layout != torch.strided:
        raise TypeError(f"{layer.title}: the input is {input.layout}: pass x.to_dense()")
    if not input.dim():
        raise ValueError(f"{layer.title}: the input is [], its last dimension must be {layer.in_features}")
    if input.dtype not in DTYPES or weight.dtype not in DTYPES:
        raise unfit_dtypes(layer.title, input, weight)


def unfit_dtypes(title: str, input: Tensor, weight: Tensor) -> TypeError:
    """The error for tensors one of which has a dtype that cannot be encoded."""
    name, tensor = ("weight", weight) if weight.dtype not in DTYPES else ("input", input)  # the model was cast, too
    return TypeError(
        f"{title}: the {name} is {tensor.dtype}; float32, bfloat16 and float16 can be encoded: cast it first"
    )


def on_two_devices(title: str, input: Tensor, weight: Tensor) -> RuntimeError:
    """The error for an input and a weight on two devices."""
    return RuntimeError(
        f"{title}: the input is on {input.device} and the weight on {weight.device}: move one to the other"
    )


@once_when_traced
def why_not_followed() -> str | None:
    """Why a layer cannot run inside of a transform of ``torch.func``, or of ``torch.jit.trace``; None if it does not. A
    compiler that traces a transform would differentiate the layer in a way of its own, and get other gradients."""
    if jit_traces():
        return (
            "torch.jit.trace records neither the kernels nor the sizes of a layer with a recipe: use "
            "torch.export.export, or give the layer none (layer.recipe = None)"
        )
    if transforms():
        return (
            "torch.func's transforms (grad, vmap, jvp …) do not pass through a layer with a recipe: use "
            "torch.autograd, as loss.backward() does, or give the layer none (layer.recipe = None)"
        )
    return None


def check_backward(dy: Tensor) -> None:
    """Refuse a backward that is to be differentiated, or that is given many gradients at once."""
    if torch.compiler.is_compiling():
        return
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: a layer with a recipe has no second derivative, as it does not keep its input. "
            "Leave that out, or have the policy leave the layer in high precision"
        )
    if type(dy) in ORDINARY and not has_storage(dy):
        raise RuntimeError(
            "is_grads_batched=True (or vectorize=True): a layer with a recipe encodes one gradient at a time, and by "
            "its own values. Call torch.autograd.grad for each, or have the policy leave the layer in high precision"
        )


def check_parallel(layer: WeightedLayer, input: Tensor, weight: Any) -> None:
    """Raise if the layer cannot multiply this input by this weight, which is sharded over a mesh."""
    _check_tensors(layer, input, weight)
    if input.device != weight.device:
        raise on_two_devices(layer.title, input, weight)
    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim == 1 and not placements[0].is_shard():
        raise ValueError(
            f"{layer.title}: its weight lies over {mesh} as {placements[0]!r}, and a layer with a recipe multiplies a "
            "Shard: give it ColwiseParallel or RowwiseParallel, or have the policy leave it in high precision"
        )
    if mesh.ndim != 1:
        raise RuntimeError(
            f"{layer.title}: its weight lies over {mesh} as {placements}, and not over the ranks of tensor "
            "parallelism alone: call the module that fully_shard was called on, whose forward gathers it"
        )
    if getattr(input, "device_mesh", mesh) != mesh:
        raise ValueError(
            f"{layer.title}: its input lies over {input.device_mesh} and its weight over {mesh}: distribute it over "  # type: ignore[attr-defined]
            "that mesh"
        )
    for name, placement in zip(("input_layouts", "output_layouts"), layer.layouts or (), strict=False):
        if isinstance(placement, Shard) and not -input.dim() <= placement.dim < input.dim():
            raise ValueError(f"{layer.title}: {name}={placement}, and its input has {input.dim()} dimensions")
    if isinstance(local_part(weight), Gathered) and (layer.gather is None or layer.gather.unit is None):
        raise ValueError(
            f"{layer.title}: its weight was prepared by lpq.convert(…, weights=…), which is not built for weights that "
            "tensor parallelism alone shards: call fully_shard after parallelize_module, or convert without "
            "weights="
        )
    if layer.model.accumulate is not None:
        raise ValueError(
            f"{layer.title}: accumulate={layer.model.accumulate!r} does not work with tensor parallelism: convert with "
            "accumulate=None"
        )
    ranks = mesh.size()
    for what, size in (("columns", weight.shape[1]), ("rows", weight.shape[0])):
        if placements[0].is_shard(0 if what == "rows" else 1) and size % ranks:
            raise ValueError(
                f"{layer.title}: the {size} {what} of its weight over {ranks} ranks are uneven: leave it out of the "
                "plan, or use a number of ranks that divides them"
            )


def check_parallel_input(layer: WeightedLayer, part: Tensor, parts: int) -> None:
    """Raise if this rank's part of the input does not fit; ``parts``: of how many its features are one."""
    if part.shape[-1] * parts != layer.in_features:
        way = (
            "a layer that is given all features (ColwiseParallel)"
            if parts == 1
            else f"a layer that is given features of {parts} ranks (RowwiseParallel)"
        )
        raise ValueError(
            f"{layer.title}: the input of this rank is {list(part.shape)}, and for {way} its last dimension must be "
            f"{layer.in_features // parts}: take the other style, or other output_layouts in the layer before"
        )


def check_static(layer: StatefulLayer, title: str) -> None:
    """Refuse a static recipe if one of its statistics is missing: not positive and finite."""
    for name, value in layer.static_values().items():
        value = local_part(value)
        if type(value) not in ORDINARY or value.is_meta:
            continue
        if not bool(((value > 0) & value.isfinite()).all()):
            raise RuntimeError(
                f"{title}: its recipe is static, and {name} is {value.tolist()}: fill it by lpq.calibrate, or "
                "load a checkpoint of a calibrated model"
            )


def check_memories(layer: WeightedLayer, memories: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Refuse a DistributedDataParallel that overwrites the state of all ranks with one rank's state: the others would
    clamp larger values. Statistics of the weight are the same on all ranks. Refuse one that goes on without a rank."""
    if torch.is_grad_enabled() and outlasts_ranks():
        raise RuntimeError(
            f"{layer.title}: its recipe remembers statistics (delayed scaling), which ranks reduce after each step, "
            "and inside of join() a rank without a batch does not: give each rank as many batches, and call "
            "join(throw_on_early_termination=True), or give the layer a recipe that remembers nothing"
        )
    memories = {tensor: memory for tensor, memory in memories.items() if tensor != "w"}
    if not memories or not _copies_buffers():
        return
    if torch.compiler.is_compiling() or _copied_by_replicas(memories):  # a tracer cannot compare the buffers
        raise RuntimeError(
            f"{layer.title}: DistributedDataParallel copies rank 0's states of delayed scaling to all ranks before "
            "each forward, and larger values on the other ranks would be clamped: make it with broadcast_buffers=False "
            "(from PyTorch 2.13 on forward_sync_buffers=False)"
        )


@once_when_traced
def _copies_buffers() -> bool:
    """Whether this runs inside of a DistributedDataParallel that copies buffers from rank to rank."""
    replica = active_replica()
    return replica is not None and bool(replica.will_sync_module_buffers()) and replica.process_group.size() > 1


def _copied_by_replicas(memories: Mapping[str, Mapping[str, Tensor]]) -> bool:
    """Whether the active DistributedDataParallel copies some of these buffers."""
    own = {id(memory) for of_tensor in memories.values() for memory in of_tensor.values()}
    replica = active_replica()
    return any(id(buffer) in own for buffer in replica.modules_buffers)


def check_accumulation(layer: StatefulLayer, weight: Tensor) -> None:
    """Raise if backward cannot add the gradient of this weight in place."""
    accumulate = layer.model.accumulate
    gathered = getattr(layer, "gather", None) is not None
    if gathered or torch.compiler.is_compiling():
        where = "a weight that FSDP2 gathers quantized" if gathered else "torch.compile(fullgraph=True)"
        raise RuntimeError(f"{layer.title}: accumulate={accumulate!r} does not work with {where}; leave it None")
    if accumulate == "main_grad" and weight.requires_grad and torch.is_grad_enabled():
        into: Any = getattr(weight, "main_grad", None)
        fits = isinstance(into, Tensor) and into.is_floating_point() and into.device == weight.device
        if not fits or into.shape != weight.shape or not weight.is_leaf:
            of = [getattr(into, name, None) for name in ("dtype", "shape", "device")]
            raise RuntimeError(
                f"{layer.title}: accumulate='main_grad', and its weight has {'none' if into is None else of}: set "
                "weight.main_grad to zeros of the weight's shape, floating, on its device, before the first forward; "
                "where a hook or a parametrization computes the weight, or ranks share it out, leave accumulate None"
            )
