"""The report of MasterWeights: the formats of the weights, and the memory of their masters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from lpq.tensor import QuantizedTensor
from lpq.torch_private.tensors import local_part


def report(copies: Mapping[Tensor, Tensor], keep: bool, others: Sequence[Tensor]) -> str:
    """Tell what is stored quantized, and what its masters take.

    Args:
        copies: The fp32 copy of each quantized weight.
        keep: Whether copies are kept between steps.
        others: The parameters that have none.
    """
    lines: list[str] = []
    by_format: dict[str, list[QuantizedTensor]] = {}
    for weight in copies:
        stored = cast("QuantizedTensor", local_part(weight))
        by_format.setdefault(str(stored.quantizer), []).append(stored)
    for name, weights in by_format.items():
        elements, size = sum(w.numel() for w in weights), sum(w.held_bytes for w in weights)
        masters = f"fp32 masters in {4 * elements} bytes" if keep else "no masters, fp32 copies while a step runs"
        lines.append(f"{name}: {len(weights)} weights, {elements} elements in {size} bytes on this rank; {masters}")
    if others:
        elements, size = sum(local_part(p).numel() for p in others), sum(local_part(p).nbytes for p in others)
        lines.append(f"not quantized: {len(others)} parameters, {elements} elements in {size} bytes on this rank")
    return "\n".join(lines)
