"""The layout is the truth: ``encode`` and ``measure`` return the declared tensors, for every shape."""

from __future__ import annotations

import math

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lpq.formats import Quantizer, Storage
from lpq.formats.blocks import block_amax, pad_blocks
from lpq.testing.expect import same
from lpq.testing.operands import encode, few, normal, unit
from lpq.testing.options import only
from lpq.testing.table import LARGE, cases

shapes = st.tuples(st.integers(0, 70), st.integers(1, 140))


@few
@given(shape=shapes)
@example(shape=(0, 32))
@example(shape=(1, 1))
@example(shape=(5, 40))
@example(shape=(40, 0))
@example(shape=LARGE)
def test_encode_fills_the_declared_buffers(side: Quantizer, shape: tuple[int, int]) -> None:
    """Names, dtypes and shapes of all buffers; ``[40, 0]`` is the column operand of a tensor of 0 rows."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_buffers(side, encode(side, normal(*shape, dtype=dtype)), shape, dtype)


def check_buffers(side: Quantizer, operand: Storage, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Check that the buffers of an operand are the buffers of its layout."""
    storage = side.storage
    name, layout = storage.__name__, storage.layout_for(side)
    assert isinstance(operand, storage), (
        f"{type(side).__name__}.encode returned a {type(operand).__name__}; the spec names {name}"
    )
    tensors = {n: t for n, t in vars(operand).items() if isinstance(t, torch.Tensor)}
    declared = [buffer.name for buffer in layout]
    assert set(tensors) == set(declared), f"{name}.layout declares {declared}; encode set {list(tensors)}"
    for buffer in layout:
        tensor, buffer_dtype, grid = tensors[buffer.name], buffer.dtype or dtype, buffer.grid(*shape)
        assert tensor.dtype == buffer_dtype, (
            f"{name}.layout: {buffer.name} is {buffer_dtype}; encode returned {tensor.dtype}"
        )
        assert tuple(tensor.shape) == grid, (
            f"{name}.layout declares that {buffer.name} covers {buffer.block}, so for {list(shape)} it must be "
            f"{grid}; encode returned {tuple(tensor.shape)}"
        )


def padded_to(side: Quantizer) -> tuple[int, int]:
    """The rows and columns of whole blocks; 1 along a dimension whose elements a buffer may count, as a mean does."""
    counted = [any(b.block[dim] is None and not b.from_stats for b in side.layout) for dim in (0, 1)]
    return 1 if counted[0] else unit(side, 0), 1 if counted[1] else unit(side, 1)


@only(lambda side: padded_to(side) != (1, 1), "has blocks of several elements")
def test_a_ragged_edge_is_padded_with_zeros(side: Quantizer) -> None:
    """Padding has the codes of zeros around the matrix, up to whole blocks: a product may read whole blocks."""
    for shape in ((1, 1), (5, 40), (33, 17)):
        x = normal(*shape)
        padded = encode(side, pad_blocks(x, padded_to(side))).buffers()
        for name, tensor in encode(side, x).buffers().items():
            what = f"{side}: buffer {name!r} of {list(shape)}, beside zeros around the matrix (pad x, not its codes)"
            same(tensor, padded[name][tuple(map(slice, tensor.shape))], what)


def test_storage_empty_matches(side: Quantizer) -> None:
    """``Storage.empty`` has exactly the buffers that ``encode`` returns."""
    for shape in ((0, 32), (1, 1), (5, 40), (64, 128)):
        check_buffers(side, side.storage.empty(side, shape, torch.float16, torch.device("cpu")), shape, torch.float16)


@few
@given(shape=st.tuples(st.integers(1, 70), st.integers(1, 140)))
@example(shape=(1, 1))
@example(shape=(5, 40))
@only(lambda side: bool(side.stats), "measures statistics")
def test_measure_returns_the_declared_statistics(side: Quantizer, shape: tuple[int, int]) -> None:
    """Names and shapes of all statistics; fp32, or int64 counts, and not negative, since they are combined as such."""
    name = type(side).__name__
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = side.rotated(normal(*shape, dtype=dtype))
        measured = dict(side.measure(x) or {})
        again = side.measure_again(x, measured) if any(stat.round == 2 for stat in side.stats) else {}
        for number, method, stats in ((1, "measure", measured), (2, "measure_again", again)):
            declared = [stat.name for stat in side.stats if stat.round == number]
            assert set(stats) == set(declared), (
                f"{name}.stats declares {declared} in round {number}; {method} returned {list(stats)}"
            )
        measured |= again
        for stat in side.stats:
            tensor, grid = measured[stat.name], stat.grid(*shape)
            assert tuple(tensor.shape) == grid, (
                f"{name}.stats declares that {stat.name} covers {stat.block}, so for {list(shape)} it must be {grid}; "
                f"measure returned {tuple(tensor.shape)}"
            )
            dtype = torch.float32 if stat.name in side.counts_in_fp32 else stat.dtype
            assert tensor.dtype == dtype, f"{name}.measure: {stat.name} is {tensor.dtype}; it must be {dtype}"
            assert not (tensor < 0).any(), f"{name}.measure: {stat.name} is negative, and MAX over ranks would lose it"


@only(lambda side: any(stat.largest for stat in side.stats), "has a statistic that is declared to be an amax")
def test_a_declared_amax_is_that_of_every_matrix(side: Quantizer) -> None:
    """Wherever the largest number lies, and however small it is."""
    for case in cases(side):
        _check_amax(side, case.matrix(), f" of {case}")


@few
@given(shape=st.tuples(st.integers(1, 70), st.integers(1, 140)), special=st.sampled_from([0.0, math.inf, math.nan]))
@only(lambda side: any(stat.largest for stat in side.stats), "has a statistic that is declared to be an amax")
def test_a_declared_amax_is_one(side: Quantizer, shape: tuple[int, int], special: float) -> None:
    """With ``largest``, a compiler measures in the format's place."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = normal(*shape, dtype=dtype)
        x[shape[0] // 2, shape[1] // 2] = special
        _check_amax(side, x)


def _check_amax(side: Quantizer, x: torch.Tensor, which: str = "") -> None:
    measured = side.measure(side.rotated(x)) or {}
    for stat in (stat for stat in side.stats if stat.largest):
        amax, reference = measured[stat.name], block_amax(x, stat.block)
        assert ((amax == reference) | (amax.isnan() & reference.isnan())).all(), (
            f"{type(side).__name__}.stats declares {stat.name} with largest=True, and measure{which} returned another "
            "value than the largest magnitude of each block: leave largest out"
        )


@few
@given(shape=shapes)
@example(shape=(0, 32))
@example(shape=(1, 1))
@example(shape=LARGE)
def test_decode_has_the_logical_shape(side: Quantizer, shape: tuple[int, int]) -> None:
    """``decode`` drops the padding and gives fp32, from the declared buffers alone."""
    x = normal(*shape, dtype=torch.bfloat16)
    operand = encode(side, x)
    again = side.storage.from_tensors(operand.tensors(), side, shape, x.dtype)
    decoded, what = again.decode(), f"{side.storage.__name__}.decode"
    assert tuple(decoded.shape) == shape, f"{what} returned {list(decoded.shape)} for a matrix {list(shape)}"
    assert decoded.dtype == torch.float32, f"{what} returned {decoded.dtype}; it must be float32"
    assert torch.equal(decoded, operand.decode()), f"{what} depends on something that is not in the layout"
