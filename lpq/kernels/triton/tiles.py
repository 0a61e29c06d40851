"""A tile of a matrix in a Triton program: how it comes in and goes out, and the blocks that it is made of.

``row`` and ``col`` (64 bits) are the place of a tile's first element in a matrix ``[rows, cols]``. A block is ``HIGH``
x ``WIDE`` elements, or the whole dimension where that is 0; it divides a tile, or is divided by it. Elements outside of
the matrix are zero. ``apart``: how far apart in memory rows begin, if the matrix is a part of a wider one.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from lpq.kernels.triton.numbers import INF, NAN, narrow, size_of, value_of


@triton.jit
def place_of_tile(cols, HIGH: tl.constexpr, WIDE: tl.constexpr, first=0, across=None):
    """The place of this program's tile; there is one program for each tile, behind ``first`` of other matrices."""
    across = (cols - 1) // WIDE + 1 if across is None else across
    index = tl.program_id(0) - first
    down = index // across
    return down.to(tl.int64) * HIGH, (index - down * across).to(tl.int64) * WIDE


@triton.jit
def _elements(row, col, rows, cols, apart, HIGH: tl.constexpr, WIDE: tl.constexpr):
    r, c = row + tl.arange(0, HIGH)[:, None], col + tl.arange(0, WIDE)[None, :]
    return r * (cols if apart is None else apart) + c, (r < rows) & (c < cols)


@triton.jit
def load_tile(x, row, col, rows, cols, HIGH: tl.constexpr, WIDE: tl.constexpr, apart=None):
    """A tile as it lies in memory."""
    places, inside = _elements(row, col, rows, cols, apart, HIGH, WIDE)
    return tl.load(x + places, mask=inside, other=0)


@triton.jit
def store_tile(out, values, row, col, rows, cols, apart=None):
    places, inside = _elements(row, col, rows, cols, apart, values.shape[0], values.shape[1])
    tl.store(out + places, values, mask=inside)


@triton.jit
def store_values(out, values, row, col, rows, cols):
    """A tile of fp32 values, rounded to the dtype of the output."""
    store_tile(out, narrow(values, out.dtype.element_ty), row, col, rows, cols)


# ---------------------------------------------------------------------------------------------- blocks


@triton.jit
def block_grid(
    row, col, rows, cols, DOWN: tl.constexpr, ACROSS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    COLUMN_MAJOR: tl.constexpr = False,
):  # fmt: skip
    """Where the values of a tile's ``DOWN`` x ``ACROSS`` blocks lie among the values of the matrix, and which of them
    lie inside it."""
    i = tl.arange(0, DOWN)[:, None].to(tl.int64)
    j = tl.arange(0, ACROSS)[None, :].to(tl.int64)
    down = 1
    across = 1
    if HIGH:
        i += row // HIGH
        down = (rows - 1) // HIGH + 1
    if WIDE:
        j += col // WIDE
        across = (cols - 1) // WIDE + 1
    places = j * down + i if COLUMN_MAJOR else i * across + j
    return places, (i < down) & (j < across)


@triton.jit
def seen_first(row, col, DOWN: tl.constexpr, ACROSS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Which of a tile's blocks begin in it."""
    before = tl.zeros((DOWN, ACROSS), tl.int64)
    before += row % HIGH if HIGH else row
    before += col % WIDE if WIDE else col
    return before == 0


@triton.jit
def block_amax(x, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """The bits of the largest magnitude of each of a tile's blocks; one NaN for all."""
    high: tl.constexpr = x.shape[0]
    wide: tl.constexpr = x.shape[1]
    bits = size_of(x)
    if wide > ACROSS:
        bits = tl.max(tl.reshape(bits, (high, ACROSS, wide // ACROSS)), 2)
    if high > DOWN:
        bits = tl.max(tl.reshape(bits, (DOWN, high // DOWN, ACROSS)), 1)
    return tl.where(bits > INF, NAN, bits)


@triton.jit
def store_amax(out, bits, places, inside, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Write amaxes to memory as int32; a block of several tiles gets the largest amax of its tiles."""
    if HIGH and WIDE:
        tl.store(out + places, bits, mask=inside)
    else:
        tl.atomic_max(out + places, bits, mask=inside, sem="relaxed")


@triton.jit
def spread(values, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """One value for each block as one for each element of a tile."""
    DOWN: tl.constexpr = values.shape[0]
    ACROSS: tl.constexpr = values.shape[1]
    if DOWN < HIGH:
        values = tl.broadcast_to(values[:, None, :], (DOWN, HIGH // DOWN, ACROSS))
        values = tl.reshape(values, (HIGH, ACROSS))
    if ACROSS < WIDE:
        values = tl.broadcast_to(values[:, :, None], (HIGH, ACROSS, WIDE // ACROSS))
        values = tl.reshape(values, (HIGH, WIDE))
    return values


@triton.jit
def measure_tile(x, row, col, rows, cols, out, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Measure a tile's blocks into ``out``."""
    high: tl.constexpr = x.shape[0]
    wide: tl.constexpr = x.shape[1]
    DOWN: tl.constexpr = high // HIGH if HIGH else 1
    ACROSS: tl.constexpr = wide // WIDE if WIDE else 1
    places, inside = block_grid(row, col, rows, cols, DOWN, ACROSS, HIGH, WIDE)
    store_amax(out, block_amax(x, DOWN, ACROSS), places, inside, HIGH, WIDE)


@triton.jit
def known_amax(given, bits, places, inside):
    """The amaxes of blocks in fp32: those given, else those measured."""
    if given is not None:
        return tl.load(given + places, mask=inside, other=0.0)
    return value_of(bits)
