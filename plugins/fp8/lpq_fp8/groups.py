"""FP8's products of rows in groups: torch's scaled grouped matmul, which has one scale for each row of each operand.

A scale of a whole matrix is given to all its rows. The matmul takes E4M3 alone, writes bf16, and leaves rows of no
group and matrices of empty groups as it found them: whoever calls this sets them to zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.core import Storage
from lpq.formats.sections import unit
from lpq.operations.binding import Operand
from lpq.operations.group_tiles import bind_padded_ends
from lpq.torch_private.operators import scaled_grouped_matmul
from lpq_fp8.quantizer import FP8Quantizer

ALIGNED = 16
"""All sizes but the number of rows must be multiples of this."""


def why_not(*quantizers: FP8Quantizer) -> str | None:
    """Both operands must be E4M3, with a scale of the whole or of rows."""
    for quantizer in quantizers:
        if quantizer.dtype != "e4m3":
            return "torch multiplies rows in groups in E4M3 alone, and not in E5M2"
        if quantizer.scaling == "block":
            return "torch has no grouped product for scales of blocks"
    if len({quantizer.scaling == "row" for quantizer in quantizers}) > 1:
        return "one operand has scales of rows, the other one of the whole"
    return None


def grouped_gemm(a: Operand, b: Storage | Operand, offs: Tensor, fast_accumulate: bool) -> Tensor | None:
    """Multiply the rows of each group of ``a`` by its matrix of the stack ``b``, or the columns of each group of both.
    Return None where torch does not take such sizes."""
    rows = a.shape[a.dim]
    if isinstance(b, Operand):
        return _columns(a, b, offs, fast_accumulate)
    groups, cols, inner = b.shape
    if cols % ALIGNED or inner % ALIGNED:
        return None
    data, scale = a.tensors
    of_a = scale.flatten() if scale.dim() == 2 else _of_rows(scale, offs, rows)
    matrices, scales = b.tensors()
    of_b = scales.squeeze(2) if scales.dim() == 3 else scales[:, None].expand(groups, cols)
    return scaled_grouped_matmul(
        data, matrices.transpose(-2, -1), of_a, of_b.contiguous(), offs, None, None, torch.bfloat16, fast_accumulate
    )


def _of_rows(scale: Tensor, offs: Tensor, rows: int) -> Tensor:
    """The scale of each row's group."""
    group = torch.searchsorted(offs, torch.arange(rows, device=offs.device, dtype=offs.dtype), right=True)
    return scale[group.clamp_(max=len(offs) - 1)]


def _columns(a: Operand, b: Operand, offs: Tensor, fast_accumulate: bool) -> Tensor | None:
    """Multiply the columns of each group; groups begin and end at multiples of the padding."""
    if a.shape[0] % ALIGNED or b.shape[0] % ALIGNED:
        return None
    ends = bind_padded_ends(unit(a.quantizer, 1), offs.device)(offs)
    scales = []
    for operand in (a, b):
        scale = operand.tensors[1]
        of_rows = scale.t() if scale.dim() == 2 else scale[:, None].expand(len(offs), operand.shape[0])
        scales.append(of_rows.reshape(-1).contiguous())  # one expanded group would have stride 0
    return scaled_grouped_matmul(
        a.tensors[0], b.tensors[0].t(), scales[0], scales[1], ends, None, None, torch.bfloat16, fast_accumulate
    )
