"""Kernels for INT8, of which most are wrong for some of what they are called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lpq.core import Quantizer, Storage
from lpq.kernels.launch_table import TableLaunch
from lpq.operations.decoding import decode_reference
from lpq.operations.exact_form import Exact
from lpq.operations.measuring import measure_reference
from lpq.operations.references import gemm_reference, quantize_reference
from lpq.operations.transposing import transpose_reference
from lpq.registry import KernelSpec

K = TypeVar("K", bound=Callable[..., Any])
MISTAKES: dict[str, tuple[str, str]] = {}
"""Kernels that are right for most of what they are called with: the operation of each, and what is said of it."""


def wrong(op: str, words: str) -> Callable[[K], K]:
    """Note the operation of a kernel that is wrong, and what the kit says of it."""

    def noted(kernel: K) -> K:
        MISTAKES[kernel.__name__] = op, words
        return kernel

    return noted


def cpu_kernel(name: str, op: str = "decode", **options: Any) -> KernelSpec:
    """A kernel of this module that runs on the CPU."""
    return KernelSpec(op=op, impl=f"{__name__}:{name}", backend="torch", device="cpu", **options)


def right_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    return decode_reference(operand, dtype)


@wrong("decode", "torch kernel broken_kernels:wrong_kernel on*elements differ")
def wrong_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Forgets the last row, where its output holds what was in that memory."""
    out = torch.empty(operand.shape, dtype=dtype)
    out[:-1] = decode_reference(operand, dtype)[:-1]
    return out


@wrong("decode", "turned_kernel on*has strides")
def turned_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right, but for how the result lies in memory."""
    return decode_reference(operand, dtype).t().contiguous().t()


def transposing_kernel(operand: Storage) -> Storage:
    return turned_transpose(operand).map(Tensor.contiguous)


def turned_transpose(operand: Storage) -> Storage:
    """Right, but for how the result lies in memory: as views that were copied as they were."""
    return transpose_reference(operand).map(Tensor.clone)


@wrong("decode", "keeping_kernel on*shares memory with another")
def keeping_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right, but the result lies in memory of the operand's."""
    values = decode_reference(operand, dtype)
    kept: Tensor = operand.scale
    kept.untyped_storage().resize_(8 * kept.numel() * dtype.itemsize + values.nbytes)
    inside = torch.empty(0, dtype=dtype).set_(kept.untyped_storage(), 8 * kept.numel(), values.shape)
    return inside.copy_(values)


@wrong("decode", "a part of an operand*elements differ")
def hasty_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right for operands whose buffers are whole: it reads their memory from the first byte to the last."""
    rows, cols = operand.shape
    data, scale = operand.data, operand.scale
    return (torch.as_strided(data, (rows, cols), (cols, 1)) * torch.as_strided(scale, (rows, 1), (1, 1))).to(dtype)


@wrong("decode", "it changed what it was given")
def writing_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right, but it leaves its operand scaled."""
    values = decode_reference(operand, dtype)
    operand.scale.mul_(2)
    return values


@wrong("decode", "normal values, to torch.float32, output 0: * elements differ")
def narrow_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right in bf16, through which it rounds whatever is asked for."""
    return decode_reference(operand, torch.bfloat16).to(dtype)


@wrong("decode", "to torch.float32, output 0: it is torch.bfloat16 and must be torch.float32")
def own_dtype_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right in the dtype of the operand, which it always gives."""
    return decode_reference(operand, operand.dtype)


@wrong("decode", "[[]5, 77[]] torch.bfloat16, normal values*elements differ")
def dense_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right where rows begin at multiples of 2: it takes two elements at a time, and of a row what is left not."""
    values = decode_reference(operand, dtype)
    if len(values) > 1 and values.shape[1] % 2:
        values[:, -1] = 0
    return values


@wrong("decode", "one inf*elements differ")
def losing_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right for finite values."""
    return decode_reference(operand, dtype).nan_to_num()


@wrong("decode", "numbers of all sizes*elements differ")
def clipping_kernel(operand: Storage, dtype: torch.dtype) -> Tensor:
    """Right for values of usual size: large ones are lost, and no infinity tells of it."""
    values = decode_reference(operand, dtype)
    return torch.where(values.isfinite(), values.clamp(-(2.0**60), 2.0**60), values)


def right_quantize(*arguments: Any) -> list[Tensor]:
    return quantize_reference(*arguments)


@wrong("quantize", "it returned 4 tensors and must return 6")
def forgetful_quantize(*arguments: Any) -> list[Tensor]:
    """Does not return the statistics that it is asked for."""
    return quantize_reference(*arguments[:-1], False)


@wrong("quantize", "another matrix's statistics given, output * elements differ")
def deaf_quantize(x: Tensor, stats: Any, *rest: Any) -> list[Tensor]:
    """Measures for itself, whatever it is given."""
    return quantize_reference(x, [None] * len(stats), *rest)


@wrong("quantize", "IndexError*")
def demanding_quantize(x: Tensor, stats: Any, row: Quantizer | None, col: Quantizer | None, *rest: Any) -> list[Tensor]:
    """Right where each operand has a place among the statistics."""
    needed = [stats[i] for i, side in enumerate(s for s in (row, col) if s is not None)]
    return quantize_reference(x, needed, row, col, *rest)


@wrong("quantize", "'NoneType' object has no attribute 'data_ptr'")
def seeded_quantize(x: Tensor, stats: Any, row: Any, col: Any, seed: Any, *rest: Any) -> list[Tensor]:
    """Right where there is a seed, which it does not need."""
    seed.data_ptr()
    return quantize_reference(x, stats, row, col, seed, *rest)


class RightSeveral:
    """Encodes several matrices, each by the reference."""

    skipped = 0
    """Matrices at the end that are not written."""
    rounds = True

    def __call__(self, side: Quantizer, shapes: Any, dtype: torch.dtype, device: torch.device, /) -> Any:
        def at(values: Any, stats: Any, buffers: Any) -> TableLaunch:
            def run() -> None:
                for x, known, into in [*zip(values, stats, buffers, strict=True)][: len(values) - self.skipped]:
                    rounded = x.to(dtype) if self.rounds else x
                    for to, made in zip(
                        into, quantize_reference(rounded, known, side, None, None, 0, False), strict=True
                    ):
                        to.copy_(made)

            return TableLaunch(run, torch.empty(0))

        return at


class ForgetfulSeveral(RightSeveral):
    skipped = 1


class PreciseSeveral(RightSeveral):
    rounds = False


right_several, forgetful_several, precise_several = RightSeveral(), ForgetfulSeveral(), PreciseSeveral()


def rounding_quantize(x: Tensor, *rest: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
    return quantize_reference(x.to(dtype or x.dtype), *rest)


def half_rounding_quantize(x: Tensor, *rest: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Rounds what it encodes, and measures what it did not round."""
    made = rounding_quantize(x, *rest, dtype=dtype)
    _, row, col, *_, measure = rest
    if not measure:
        return made
    measured = measure_reference(x, row, col)
    return made[: len(made) - len(measured)] + measured


@wrong("quantize", "a transposed matrix*elements differ")
def flat_quantize(x: Tensor, *rest: Any) -> list[Tensor]:
    """Right for matrices whose rows lie one after the other."""
    return quantize_reference(torch.as_strided(x, x.shape, (x.shape[1], 1)), *rest)


def right_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    return gemm_reference(a, b, bias, dtype)


@wrong("gemm", "normal values, as torch.float32, bias True, fast_accumulate True: it is not the same")
def unbiased_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Adds a bias of an even number of elements only."""
    return gemm_reference(a, b, bias if b.shape[0] % 2 == 0 else None, dtype)


@wrong("gemm", "bias True, fast_accumulate False: it is not the same, by")
def half_biased_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Adds a bias where sums may be fast."""
    return gemm_reference(a, b, bias if fast_accumulate else None, dtype)


@wrong("gemm", "[[]512, 256[]], not [[]256, 512[]]")
def swapped_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Right for products that are symmetric."""
    return gemm_reference(b, a, None, dtype)


@wrong("gemm", "[[]64, 0[]] torch.bfloat16, normal values*: it must be zero")
def hasty_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Writes nothing where there is nothing to sum."""
    if not a.shape[1]:
        return torch.empty(a.shape[0], b.shape[0], dtype=dtype)
    return gemm_reference(a, b, bias, dtype)


@wrong("gemm", "as torch.float32, bias False, fast_accumulate False: it is not the same, by")
def rounded_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Right in bf16, through which it rounds whatever is asked for."""
    return gemm_reference(a, b, bias, torch.bfloat16).to(dtype)


@wrong("gemm", "it is torch.float32 and must be torch.bfloat16")
def wide_gemm(a: Storage, b: Storage, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Whatever is asked for, it returns fp32."""
    return gemm_reference(a, b, bias, torch.float32)


def right_exact(operand: Storage) -> Exact:
    return Exact(operand.data.to(torch.bfloat16).contiguous(), operand.scale.contiguous())


@wrong("exact", "one inf: what is not finite in one is finite in the other")
def losing_exact(operand: Storage) -> Exact:
    """Right for finite values."""
    return Exact(operand.data.to(torch.bfloat16).contiguous(), operand.scale.nan_to_num().contiguous())


def choosy_exact(operand: Storage) -> Exact | None:
    """Serves an even number of rows."""
    return right_exact(operand) if operand.shape[0] % 2 == 0 else None


def idle_exact(operand: Storage) -> Exact | None:
    """Serves no shape."""
    return None


def idle_tile(quantizer: Quantizer, direction: str) -> None:
    """It describes the tiles of no operand."""


def idle_measure(x: Tensor, row: Quantizer | None, col: Quantizer | None) -> list[Tensor]:
    """Right for what has no statistics."""
    return []
