"""What kernels that are made of ``csrc/common`` have in common on the host: tiles, inputs, and the amax of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from lpq.ops.cuda import CudaKernel

TILE = 128
THREADS = 256
INPUTS = {
    torch.bfloat16: "LPQ_INPUT=LPQ_BF16",
    torch.float16: "LPQ_INPUT=LPQ_FP16",
    torch.float32: "LPQ_INPUT=LPQ_FP32",
}
"""The macro that says what the input holds."""
OUTPUTS = {
    torch.bfloat16: "LPQ_OUTPUT=LPQ_BF16",
    torch.float16: "LPQ_OUTPUT=LPQ_FP16",
    torch.float32: "LPQ_OUTPUT=LPQ_FP32",
}
"""The macro that says what is decoded to."""
PARTS = CudaKernel("common/amax.cu", "amax_parts", "PqP", threads=THREADS)
FINISH = CudaKernel("common/amax.cu", "amax_finish", "PqP", threads=1024)
BYTES = CudaKernel("common/transpose.cu", "transpose_bytes", "PPPPIqq", threads=THREADS)
UNTILE = CudaKernel("common/untile.cu", "untile", "PPPII", threads=THREADS)
NIBBLES = CudaKernel("common/transpose.cu", "transpose_nibbles", "PPPPPPqq", threads=THREADS)
PER_PART = 1 << 15
MAX_PARTS = 132 * 8
MANY_TILES = 512
SIDE_BY_SIDE = 32


def tiles(rows: int, cols: int) -> int:
    """How many tiles cover a matrix: the blocks of a kernel that takes a tile each."""
    return -(-rows // TILE) * -(-cols // TILE)


def flat(x: Tensor) -> tuple[int, int]:
    """Rows and columns of the matrix for a kernel that encodes it along its rows, in blocks that divide a tile.

    A matrix whose rows are whole tiles wide is one of rows of one tile, which is read and written in one piece.
    """
    rows, cols = x.shape
    return (rows * cols // TILE, TILE) if cols % TILE == 0 else (rows, cols)


def pointer(tensor: Tensor | None) -> int:
    """Where a tensor lies; 0 for none."""
    return tensor.data_ptr() if tensor is not None else 0


def amax_parts(x: Tensor) -> Tensor:
    """The largest magnitudes (fp32) of pieces of a contiguous matrix; that of the whole is the largest of them."""
    count = x.numel()
    parts = min(max(-(-count // PER_PART), 1), MAX_PARTS)
    out = x.new_empty((parts,), dtype=torch.float32)
    PARTS.launch(x.get_device(), (INPUTS[x.dtype],), parts, x.data_ptr(), count, out.data_ptr())
    return out


def amax_finish(parts: Tensor) -> Tensor:
    """The largest of some magnitudes, which order as their bits do: NaN above infinity."""
    out = parts.new_empty(())
    FINISH.launch(parts.get_device(), (), 1, parts.data_ptr(), parts.numel(), out.data_ptr())
    return out


def words_of_tiles(x: Tensor) -> Tensor | None:
    """Memory for the scales of both operands of a matrix, 128 words of each in every tile; None if it does not pay.

    A scale in its place shares a sector of memory with those of other tiles, which costs more than to go through this.
    """
    rows, cols = x.shape
    count = tiles(rows, cols)
    if count < MANY_TILES or rows % TILE or cols % TILE:
        return None
    return x.new_empty((count, 2 * TILE), dtype=torch.int32)


def untile(words: Tensor, row: Tensor, col: Tensor, rows: int, cols: int) -> None:
    """Bring the words of tiles to their places in the scales of the row and of the column operand."""
    down, across = rows // TILE, cols // TILE
    blocks = down * -(-across // SIDE_BY_SIDE) + across * -(-down // SIDE_BY_SIDE)
    UNTILE.launch(row.get_device(), (), blocks, words.data_ptr(), row.data_ptr(), col.data_ptr(), down, across)


def transpose_bytes(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The transpose of a matrix of 1-byte elements, and of its fp32 scales: one, or one for each 128x128."""
    x, scale = x.contiguous(), scale.contiguous()
    rows, cols = x.shape
    out, scale_out = x.new_empty((cols, rows)), scale.new_empty(scale.shape[::-1])
    blocks = -(-rows // (2 * TILE)) * -(-cols // TILE)
    BYTES.launch(
        x.get_device(), (), blocks, x.data_ptr(), out.data_ptr(), scale.data_ptr(), scale_out.data_ptr(),
        2 if scale.dim() else 1, rows, cols,
    )  # fmt: skip
    return out, scale_out


def transpose_nibbles(x: Tensor, scale: Tensor, amax: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """The transpose of a matrix of 4-bit elements, two in a byte, whose rows are padded to 16 elements with zeros; of
    its 1-byte scales, one for each 16x16; and a copy of its amax."""
    x, scale = x.contiguous(), scale.contiguous()
    out, scale_out = x.new_empty((cols, -(-rows // 16) * 8)), scale.new_empty(scale.shape[::-1])
    amax_out = torch.empty_like(amax)
    blocks = -(-rows // (2 * TILE)) * -(-cols // (2 * TILE))
    NIBBLES.launch(
        x.get_device(), (), blocks, x.data_ptr(), out.data_ptr(), scale.data_ptr(), scale_out.data_ptr(),
        amax.data_ptr(), amax_out.data_ptr(), rows, cols,
    )  # fmt: skip
    return out, scale_out, amax_out
