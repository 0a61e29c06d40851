"""FP8's products of rows in groups on Hopper: E4M3 and E5M2 with any scales, summed exactly (``csrc/fp8/grouped.cu``).

torch's own take E4M3 alone and no scales of blocks, and take longer to sum exactly. Sums in fewer bits, which a recipe
may allow, would save next to nothing here.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from lpq.core import Storage
from lpq.formats.groups import Grouped, unit
from lpq.kernels import tensor_maps
from lpq.kernels.cuda import CudaKernel
from lpq.kernels.tiles import multiprocessors
from lpq.operations.group_tiles import padded_ends
from lpq_fp8.quantizer import FP8Quantizer

ALIGNED = 16
"""All sizes but the number of rows must be multiples of this."""
THREADS = 384
FEW = 256
"""For so many rows of a group or fewer, tiles are low."""
BLOCKS = {None: 0, "1x128": 1, "128x128": 128}
"""The lines that a scale is of, where it is of a block, by the blocks of the second operand."""
WIDE = DEEP = 128
"""Columns of a tile, and the elements of a step along the contraction."""
SHARED = {128: 6 * (128 + WIDE) * DEEP + 4096, 256: 4 * (256 + WIDE) * DEEP + 4096}
"""The shared memory of a block, in bytes, for tiles of so many rows."""
LETTERS = f"{tensor_maps.LETTERS * 2}PP(Pqqq)(Pqqq)(qqqq)"
KERNELS = {
    tall: CudaKernel("fp8/grouped.cu", "grouped", LETTERS, threads=THREADS, shared=shared, waits=True)
    for tall, shared in SHARED.items()
}


def why_not(*quantizers: FP8Quantizer) -> str | None:
    """Scales must be of the whole, of rows, or of blocks in both operands, of which those of ``a`` are 1x128."""
    a, b = quantizers if len(quantizers) == 2 else quantizers * 2
    if (a.scaling == "block") != (b.scaling == "block"):
        return "one operand has scales of blocks, the other one has not"
    if a.scaling == "block" and a.block != "1x128":
        return "rows in groups have scales of 1x128 blocks"
    return None


class _Operand(NamedTuple):
    """One operand, as the kernel takes it."""

    quantizer: FP8Quantizer
    data: Tensor
    scale: Tensor
    stack: bool = False
    columns: bool = False
    """Whether groups lie along the contraction."""

    @property
    def lines(self) -> Tensor:
        """All lines one below the other."""
        return self.data.view(-1, self.data.shape[-1])

    @property
    def scales(self) -> tuple[int, ...]:
        """Where the scales lie, and how far apart those of groups, of lines and of steps are."""
        strides, at = self.scale.stride(), self.scale.data_ptr()
        if self.quantizer.scaling == "block":
            return (at, *strides) if self.stack else (at, 0, *strides)
        if self.quantizer.scaling != "row":
            return at, strides[0], 0, 0
        group, line = strides[:2] if self.stack else (strides[1] if self.columns else 0, strides[0])
        return at, group, line, 0


def grouped_gemm(a: Grouped, b: Storage | Grouped, offs: Tensor, fast_accumulate: bool) -> Tensor | None:
    """The rows of each group of ``a`` times its matrix of the stack ``b``; or for each group the product of its columns
    of both. None where tiles cannot be fetched from matrices of such sizes."""
    columns = isinstance(b, Grouped)
    of_a, of_b = cast("FP8Quantizer", a.quantizer), cast("FP8Quantizer", b.quantizer)
    data, scale = a.tensors
    left = _Operand(of_a, data, scale, columns=columns)
    data, scale = b.tensors if isinstance(b, Grouped) else b.tensors()
    right = _Operand(of_b, data, scale, stack=not columns, columns=columns)
    tall, wide, deep = a.shape[0], right.data.shape[-2], left.data.shape[1]
    if wide % ALIGNED or deep % ALIGNED or 0 in (len(offs), tall, wide, deep):
        return None
    blocks = BLOCKS[of_b.block if of_b.scaling == "block" else None]
    high = 128 if blocks == 1 or (tall if columns else tall // len(offs)) <= FEW else 256
    ends = padded_ends(offs, unit(of_a, 1)) if columns else offs
    made = offs.new_empty((len(offs), tall, wide) if columns else (tall, wide), dtype=torch.bfloat16)
    device = made.get_device()
    KERNELS[high].launch(
        device, macros(high, columns, blocks, of_a.dtype == "e5m2", of_b.dtype == "e5m2"), multiprocessors(device),
        *tensor_maps.of_matrix(left.lines, high, DEEP), *tensor_maps.of_matrix(right.lines, WIDE, DEEP),
        made.data_ptr(), ends.data_ptr(), *left.scales, *right.scales, len(offs), tall, wide, deep,
    )  # fmt: skip
    return made


def macros(high: int, columns: bool, blocks: int, a_e5m2: bool, b_e5m2: bool) -> tuple[str, ...]:
    """The kernel's macros, for tiles of ``high`` rows."""
    switches = {"LPQ_COLUMNS": columns, f"LPQ_BLOCKS={blocks}": blocks, "LPQ_A_E5M2": a_e5m2, "LPQ_B_E5M2": b_e5m2}
    return f"LPQ_TALL={high}", *(macro for macro, wanted in switches.items() if wanted)
