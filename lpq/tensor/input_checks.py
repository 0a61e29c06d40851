"""What is refused of a stored tensor, because it would go on with other values than it has."""

from __future__ import annotations

from typing import Any

from lpq.tensor.quantized_tensor import REMEDY, QuantizedTensor
from lpq.torch_private.dispatch import schema_of


def check_received(func: Any, tensor: QuantizedTensor) -> None:
    """Of one that an operator has among its first arguments. A collective would write to it: the broadcast of
    ZeroRedundancyOptimizer, or the scatter of tensor parallelism."""
    name = schema_of(func).name
    if func.namespace == "c10d" and name.endswith("_"):
        raise TypeError(
            f"{tensor.whose}{name} would receive into a decoded copy of a QuantizedTensor, and that would "
            f"be lost. ZeroRedundancyOptimizer and tensor parallelism do that with weights: {REMEDY}. Of a tensor of "
            "your own pass its buffers, [t for _, operand in tensor.operands for t in operand.tensors()]"
        )


def check_flattened(tensor: QuantizedTensor) -> None:
    """Of one that ``torch.cat`` joins with others. So FullyShardedDataParallel makes one parameter of many that are
    flattened, and DistributedDataParallel a message from which it writes them anew."""
    direction, storage = tensor.sides[0]
    rows, cols = storage.shape if direction == "row" else storage.shape[::-1]
    if tensor.dim() == 1 and rows > 1 and cols > 1:
        raise TypeError(
            f"{tensor.whose}a flattened weight that is stored as {tensor.quantizer} would be joined with others, as "
            "DistributedDataParallel, composable replicate and FullyShardedDataParallel (FSDP1) do it, which decode it "
            f"and encode it anew or not at all: {REMEDY}. To read it, join what dequantize() gives"
        )
