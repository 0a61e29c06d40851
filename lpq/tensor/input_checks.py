"""Refusals of operators that would go on with other values than a stored tensor has."""

from __future__ import annotations

from typing import Any

import torch

from lpq.operations.cut import why_cut
from lpq.tensor.quantized_tensor import REMEDY, QuantizedTensor
from lpq.torch_private import autograd
from lpq.torch_private.callers import engine_calls
from lpq.torch_private.dispatch import schema_of
from lpq.torch_private.pytree import tree_iter

GIVE_RANKS = (
    "give lpq.convert(…, ranks=…) the number of ranks, and weights that cannot be cut so stay in high precision"
)


def check_received(func: Any, tensor: QuantizedTensor) -> None:
    """Refuse a tensor to which a collective would write: the broadcast of ZeroRedundancyOptimizer, or the scatter of
    tensor parallelism."""
    name = schema_of(func).name
    if func.namespace == "c10d" and name.endswith("_"):
        raise TypeError(
            f"{tensor.whose}{name} would receive into a decoded copy of a QuantizedTensor, and that would "
            f"be lost. ZeroRedundancyOptimizer and tensor parallelism do that with weights: {REMEDY}. Pass "
            "tensor.buffers of a tensor of your own"
        )


def check_flattened(tensor: QuantizedTensor) -> None:
    """Refuse a flattened tensor that ``torch.cat`` joins with others. FullyShardedDataParallel joins parameters into
    one, and DistributedDataParallel into a message, from which it writes them anew."""
    _, storage = tensor.operands[0]
    *_, rows, cols = storage.shape
    if tensor.dim() == 1 and rows > 1 and cols > 1:
        raise TypeError(
            f"{tensor.whose}a flattened weight that is stored as {tensor.quantizer} would be joined with others, as "
            "DistributedDataParallel, composable replicate and FullyShardedDataParallel (FSDP1) do it, which decode it "
            f"and encode it anew or not at all: {REMEDY}. To read it, join the results of dequantize()"
        )


def check_gradient(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse a gradient that arrives encoded where autograd, by ``func``, adds it to another one or keeps it for a
    leaf: a sum would be of rounded values without a word, and optimizers take ordinary gradients."""
    if autograd.graph_task() == -1:
        return
    keeps = autograd.runs_node("torch::autograd::AccumulateGrad")
    if not (keeps or func is ADD) or not engine_calls():
        return
    gradient = next(t for t in tree_iter(args) if isinstance(t, QuantizedTensor))
    what = "keeps it as the .grad of a leaf" if keeps else "adds it to another one"
    raise TypeError(
        f"a gradient of {list(gradient.shape)} arrived encoded as {gradient.quantizer} where autograd {what}: return "
        "gradient.dequantize() from the backward that encoded it. Where it is of the results of experts, use them "
        "once, or take dispatch='high_precision'"
    )


ADD = torch.ops.aten.add.Tensor
GRADIENTS = frozenset(
    (ADD, torch.ops.aten.add_.Tensor, torch.ops.aten.detach.default, torch.ops.aten.new_empty_strided.default)
)
"""The operators by which autograd adds gradients and keeps them."""


def check_shard(t: QuantizedTensor, rows: int) -> None:
    """Refuse shards that are uneven, or no parts of a tensor of this format. All ranks refuse alike, by global
    sizes."""
    matrix_rows = t.matrix_shape[0] // t.shape[0] * rows
    sides = [(s.quantizer, 0 if d == "row" else 1) for d, s in t.operands]
    why = why_cut(sides, matrix_rows, "rows") or ("it leaves a smaller one" if t.shape[0] % rows else None)
    if why is not None:
        raise ValueError(
            f"{t.whose}a {list(t.shape)} tensor that is stored as {t.quantizer} has no shard of {rows} rows: {why}; "
            f"{GIVE_RANKS}"
        )
