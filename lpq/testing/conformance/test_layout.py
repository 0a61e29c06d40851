"""The layout is the truth: ``encode`` and ``measure`` return the declared tensors, for every shape."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lpq.formats import Quantizer, Storage
from lpq.formats.blocks import block_amax, pad_blocks
from lpq.operations.format_calls import unfit_matrix, unfit_stats, unfit_storage
from lpq.testing.expect import one_nan, same
from lpq.testing.operands import encode, few, measure, normal, unit
from lpq.testing.options import only
from lpq.testing.table import DTYPES, LARGE, cases

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
    for dtype in DTYPES:
        check_buffers(side, encode(side, x := normal(*shape, dtype=dtype)), x)


def check_buffers(side: Quantizer, operand: Storage, x: torch.Tensor) -> None:
    """Check that the buffers of an operand are the buffers of its layout."""
    fault = unfit_storage(operand, x)
    assert fault is None, f"{side}, a matrix {list(x.shape)} in {x.dtype}: encode {': '.join(fault or ())}"


def padded_to(side: Quantizer) -> tuple[int, int]:
    """The rows and columns of whole blocks; 1 along a dimension whose elements a buffer may count, as a mean does."""
    sums = any(stat.reduce == "sum" for stat in side.stats)
    spanned = [any(b.block[dim] is None and not b.from_stats for b in side.layout) for dim in (0, 1)]
    counted = [spanned[dim] and (sums or side.why_no_parts(dim) is not None) for dim in (0, 1)]
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


@few
@given(shape=st.tuples(st.integers(1, 70), st.integers(1, 140)))
@example(shape=(1, 1))
@example(shape=(5, 40))
@only(lambda side: bool(side.stats), "measures statistics")
def test_measure_returns_the_declared_statistics(side: Quantizer, shape: tuple[int, int]) -> None:
    """Names and shapes of all statistics; fp32, or int64 counts, and not below +0, since they are combined as such."""
    for dtype in DTYPES:
        x = normal(*shape, dtype=dtype)
        for matrix in (x, x * 0):  # with zeros of both signs
            measured = measure(side, matrix)
            method, fault = unfit_stats(side, "measure_again", measured, matrix)
            what = f"{side}, a matrix {list(shape)} in {dtype}"
            assert fault is None, f"{what}: {type(side).__name__}.{method} {': '.join(fault or ())}"
            for name, tensor in measured.items():
                assert not (tensor.signbit() & (tensor == 0)).any(), (
                    f"{what} of zeros: {type(side).__name__}.measure returned {name} as -0.0, and ranks combine the "
                    "bits of statistics, which order so from +0 on: add 0.0 to what clamp(min=0) returns"
                )


@only(lambda side: any(stat.largest for stat in side.stats), "has a statistic that is declared to be an amax")
def test_a_declared_amax_is_one(side: Quantizer) -> None:
    """With ``largest``, a compiler measures in the format's place: wherever the largest number lies, however small it
    is, and beside what is odd."""
    for case, special in itertools.product(cases(side), (0.0, math.inf, math.nan)):
        x = case.matrix()
        x[len(x) // 2, x.shape[1] // 2] = special
        measured, holds = measure(side, x), f"{case}, with {special} in it"
        for stat in (stat for stat in side.stats if stat.largest):
            what = f"{side}.stats declares {stat.name} with largest=True, and measure returned another value of {holds}"
            same(one_nan(measured[stat.name]), block_amax(x, stat.block), f"{what} (leave largest out)")


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
    fault = unfit_matrix(again, decoded)
    assert fault is None, f"{what} {': '.join(fault or ())}"
    assert torch.equal(decoded, operand.decode()), f"{what} depends on something that is not in the layout"
