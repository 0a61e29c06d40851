"""NVFP4's products: torch's scaled matmul on Blackwell, and elsewhere bf16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from lpq.core import decode
from lpq.emulation.bf16_gemm import gemm, in_its_basis
from lpq.kernels.blackwell_scales import swizzled
from lpq.operations.binding import Operand
from lpq.operations.exact_form import BoundExact, Exact, Form, ToExact
from lpq_nvfp4 import views
from lpq_nvfp4.eden import ROTATED
from lpq_nvfp4.quantizer import NVFP4Quantizer
from lpq_nvfp4.reference import E2M1_MAX, E4M3_MAX, GROUP
from lpq_nvfp4.storage import NVFP4Storage

POWER = 2.0**-11
"""An element times its block's scale has at most 6 bits, and is at most 2688. This power of two brings it to about 1,
so that the factor is about the amax, and a product of two factors is in range if the results are."""
UNIT = E2M1_MAX * E4M3_MAX * POWER
"""The amax with which an element decodes to itself times its block's scale and ``POWER``."""
CONSTANT = 1 / UNIT
ALIGNED = 16
"""The scaled matmul takes a multiple of this many rows of the second operand, and of twice as many columns."""


def exact(operand: NVFP4Storage) -> Exact | None:
    """Elements times block scales, and the amax as a factor. A rotation is left where it is."""
    return _exact(operand, _matrix)


def exact_in_cuda(operand: NVFP4Storage) -> Exact | None:
    """As ``exact``, without an amax that has to be written first."""
    return _exact(operand, lambda whole: views.decode(whole, torch.bfloat16, unit=True))


def bind_exact(operand: Operand, device: torch.device) -> BoundExact | ToExact | None:
    """``exact_in_cuda`` for operands of one shape."""
    if not operand.quantizer.whole(operand.shape[1]):
        return None

    def exact_of(buffers: Sequence[Tensor]) -> Exact:
        whole: Any = operand.storage(buffers)
        return Exact(views.decode(whole, torch.bfloat16, unit=True), whole.amax, CONSTANT)

    make = views.bind_unit(operand, device, CONSTANT, exact_of)
    return make if operand.quantizer.scaling == "row" else BoundExact(Form(factor=True, constant=CONSTANT), make)


def _matrix(operand: NVFP4Storage) -> Tensor:
    stored = NVFP4Storage(data=operand.data, scale=operand.scale, amax=torch.full_like(operand.amax, UNIT))
    stored.bind(operand.quantizer.unrotated, operand.shape, operand.dtype)
    return decode(stored, torch.bfloat16)


def _exact(operand: NVFP4Storage, matrix: Callable[[NVFP4Storage], Tensor]) -> Exact | None:
    return in_its_basis(operand, lambda whole: Exact(matrix(whole), operand.amax, CONSTANT))


def why_not(a: NVFP4Quantizer, b: NVFP4Quantizer) -> str | None:
    """A rotation drops out if both operands have it; and the scaled matmul takes one amax of a whole operand."""
    if "row" in (a.scaling, b.scaling):
        return "takes operands with one amax, and not with one for each row"
    return None if a.basis == b.basis else f"{a} and {b} are stored in different bases"


def native(a: NVFP4Storage, b: NVFP4Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Multiply as the reference does. Shapes that the scaled matmul refuses are multiplied in bf16."""
    (rows, inner), cols = a.shape, b.shape[0]
    aligned = ROTATED if a.quantizer.stochastic == "eden" else 2 * ALIGNED  # else it would multiply what pads groups
    if inner % aligned or cols % ALIGNED or 0 in (rows, inner, cols):
        return gemm(a, b, bias, dtype)
    narrow = dtype == torch.bfloat16
    levels = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    orders = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    out = scaled_mm(
        a.data.contiguous().view(torch.float4_e2m1fn_x2),
        b.data.contiguous().view(torch.float4_e2m1fn_x2).t(),
        [_scales(a), _overall(a)], levels,
        [_scales(b), _overall(b)], levels,
        swizzle_a=orders,
        swizzle_b=orders,
        bias=bias.to(dtype) if bias is not None and narrow else None,
        output_dtype=dtype if narrow else torch.float32,
    )  # fmt: skip
    return out if narrow else (out if bias is None else out.add_(bias)).to(dtype)


def _scales(operand: NVFP4Storage) -> Tensor:
    """The scale of each 16 elements of a row: the scale of a square block serves each of its rows."""
    scale = operand.scale
    if operand.quantizer.block == "16x16":
        each = scale.unsqueeze(1).expand(-1, GROUP, -1).reshape(-1, scale.shape[1])
        scale = each.narrow(0, 0, operand.shape[0])
    return swizzled(scale)


def _overall(operand: NVFP4Storage) -> Tensor:
    return operand.amax * (1 / (E2M1_MAX * E4M3_MAX))
