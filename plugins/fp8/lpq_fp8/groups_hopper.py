"""FP8's products of rows in groups on Hopper: E4M3 and E5M2 with any scales, summed exactly (``csrc/fp8/grouped.cu``).

torch's own take E4M3 alone and no scales of blocks, and take longer to sum exactly. Sums in fewer bits, which a recipe
may allow, would save next to nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from lpq.formats.sections import capacity, unit
from lpq.kernels.cuda import CudaKernel
from lpq.kernels.fresh import allocator, fresh
from lpq.kernels.tiles import multiprocessors
from lpq.operations.binding import Product
from lpq.operations.group_products import Run, cached_by_shape, sections_of
from lpq.operations.group_tiles import bind_padded_ends
from lpq_fp8 import tensor_maps
from lpq_fp8.quantizer import FP8Quantizer

ALIGNED = 16
"""All sizes but the number of rows must be multiples of this."""
THREADS = 384
FEW = 256
"""Tiles are low for groups of at most this many rows."""
BLOCKS = {None: 0, "1x128": 1, "128x128": 128}
"""The lines that a scale is of, where it is of a block, by the blocks of the second operand."""
WIDE = DEEP = 128
"""Columns of a tile, and the elements of a step along the contraction."""
SHARED = {128: 6 * (128 + WIDE) * DEEP + 4096, 256: 4 * (256 + WIDE) * DEEP + 4096}
"""The shared memory of a block, in bytes, by the number of rows of a tile."""
LETTERS = f"{tensor_maps.LETTERS * 2}PP(Pqqq)(Pqqq)(qqqq)"
KERNELS = {
    tall: CudaKernel("fp8/grouped.cu", "grouped", LETTERS, threads=THREADS, shared=shared, waits=True)
    for tall, shared in SHARED.items()
}


def why_not(*quantizers: FP8Quantizer) -> str | None:
    """Scales must be of the whole or of rows, or of blocks in both operands, with 1x128 blocks in ``a``."""
    a, b = quantizers if len(quantizers) == 2 else quantizers * 2
    if (a.scaling == "block") != (b.scaling == "block"):
        return "one operand has scales of blocks, the other one has not"
    if a.scaling == "block" and a.block != "1x128":
        return "rows in groups have scales of 1x128 blocks"
    return None


def bind(p: Product) -> Run | None:
    """Bind the products of the rows of each group of ``a`` by its matrix of the stack ``b``, or of the columns of each
    group of both. Return None where tiles cannot be fetched from matrices of such sizes."""
    columns, of_a, of_b = bool(p.a.dim), p.a.quantizer, p.b.quantizer
    assert isinstance(of_a, FP8Quantizer)
    assert isinstance(of_b, FP8Quantizer)
    groups = sections_of(p).number
    step, tall, (*_, wide, deep) = unit(of_a, 1), p.a.shape[0], p.b.shape
    deep = capacity(deep, groups, step) if columns else deep
    if wide % ALIGNED or deep % ALIGNED or 0 in (groups, tall, wide, deep):
        return None
    blocks = BLOCKS[of_b.block if of_b.scaling == "block" else None]
    high = 128 if blocks == 1 or (tall if columns else tall // groups) <= FEW else 256
    size, lines = ((groups, tall, wide), wide) if columns else ((tall, wide), groups * wide)
    index, empty = p.device.index or 0, allocator(p.device, dispatched=p.dispatched)
    how = macros(high, columns, blocks, of_a.dtype == "e5m2", of_b.dtype == "e5m2")
    launch = KERNELS[high].bind(index, how, multiprocessors(index))
    pad = bind_padded_ends(step, p.device) if columns else None
    result, tail = fresh(size, torch.bfloat16), (groups, tall, wide, deep)
    left, right = _apart(of_a, columns=columns), _apart(of_b, stack=not columns, columns=columns)

    def run(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        data, scale, offs = a
        others, scales = b[0].contiguous(), b[1]
        ends, made = offs if pad is None else pad(offs), empty(*result)
        launch(
            *tensor_maps.of_bytes(data.data_ptr(), tall, deep, data.stride(0), high, DEEP),
            *tensor_maps.of_bytes(others.data_ptr(), lines, deep, others.stride(-2), WIDE, DEEP),
            made.data_ptr(), ends.data_ptr(), scale.data_ptr(), *left((*scale.stride(), 0)),
            scales.data_ptr(), *right((*scales.stride(), 0)), *tail,
        )  # fmt: skip
        return made

    return run


grouped_gemm = cached_by_shape(bind)


def _apart(
    quantizer: FP8Quantizer, *, stack: bool = False, columns: bool = False
) -> Callable[[Sequence[int]], tuple[int, int, int]]:
    """How far apart the scales of groups, of lines and of steps are, of the strides of the scales and a last one of 0.
    ``stack``: of a stack; ``columns``: of groups that lie along the contraction."""
    if quantizer.scaling == "block":
        return itemgetter(0, 1, 2) if stack else itemgetter(-1, 0, 1)
    if quantizer.scaling != "row":
        return itemgetter(0, -1, -1)
    if stack:
        return itemgetter(0, 1, -1)
    return itemgetter(1 if columns else -1, 0, -1)


def macros(high: int, columns: bool, blocks: int, a_e5m2: bool, b_e5m2: bool) -> tuple[str, ...]:
    """The kernel's macros, for tiles of ``high`` rows."""
    switches = {"LPQ_COLUMNS": columns, f"LPQ_BLOCKS={blocks}": blocks, "LPQ_A_E5M2": a_e5m2, "LPQ_B_E5M2": b_e5m2}
    return f"LPQ_TALL={high}", *(macro for macro, wanted in switches.items() if wanted)
