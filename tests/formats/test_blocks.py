"""Blocks of a matrix, against loops over the blocks; a ragged edge behaves as if padded with zeros."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lpq.formats.blocks import block_amax, expand_blocks, pad_blocks, scale_blocks
from lpq.formats.layout import Block, Stat

BLOCKS: list[Block] = [
    (1, 1), (1, 16), (1, 32), (16, 16), (3, 5), (1, None), (None, 1), (None, None), (4, None),
]  # fmt: skip
SIZES = st.integers(1, 70)
VIEWS = {
    "plain": lambda t: t.clone(),
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "a column of many": lambda t: t[:, None].repeat(1, 2, 1)[:, 0],
}


def matrix(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * 100 + cols)).to(dtype)


def each_block(x: Tensor, block: Block) -> list[list[Tensor]]:
    high, wide = block[0] or len(x), block[1] or x.shape[1]
    return [list(band.split(wide, 1)) for band in x.split(high, 0)]


@given(
    SIZES, SIZES, st.sampled_from(BLOCKS), st.sampled_from(sorted(VIEWS)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_amax_scaling_and_expansion(rows: int, cols: int, block: Block, view: str, dtype: torch.dtype) -> None:
    x = VIEWS[view](matrix(rows, cols, dtype))
    amax = block_amax(x, block)
    assert amax.is_contiguous()
    assert amax.dtype == torch.float32
    assert amax.shape == Stat("amax", block=block).grid(rows, cols)
    expected = torch.stack([torch.stack([b.abs().max() for b in band]) for band in each_block(x, block)]).float()
    assert torch.equal(amax.reshape(expected.shape), expected)
    of_each = torch.empty(rows, cols)
    for tiles, values in zip(each_block(of_each, block), expected, strict=True):
        for tile, value in zip(tiles, values, strict=True):
            tile.fill_(value)
    assert torch.equal(expand_blocks(amax, block, rows, cols), of_each)
    scaled = scale_blocks(x, amax, block)
    assert scaled.dtype == torch.float32
    assert torch.equal(scaled, x.float() * of_each)


@pytest.mark.parametrize("block", [(1, 16), (16, 16), (None, None)])
def test_nan_beats_infinity_beats_every_number_in_its_own_block_only(block: Block) -> None:
    x = matrix(32, 40)
    for view in VIEWS.values():
        y = view(x)
        y[17, 3] = -torch.inf
        clean, infinite = block_amax(x, block), block_amax(y, block)
        assert infinite.flatten()[(infinite != clean).flatten()].tolist() == [torch.inf]
        y[17, 4] = -torch.nan
        spoilt = block_amax(y, block)
        assert spoilt.isnan().sum() == 1
        assert torch.equal(spoilt.isnan(), infinite != clean)


def test_padding_adds_zeros_up_to_whole_blocks_and_nothing_to_whole_ones() -> None:
    x = matrix(5, 18)
    padded = pad_blocks(x, (4, 16))
    assert padded.shape == (8, 32)
    assert torch.equal(padded[:5, :18], x)
    assert padded.count_nonzero() == x.count_nonzero()
    assert pad_blocks(x, (5, None)) is x


@pytest.mark.parametrize("shape", [(0, 40), (0, 0), (40, 0)])
@pytest.mark.parametrize("block", [(1, 16), (16, 16), (None, None)])
def test_an_empty_matrix_scales_to_an_empty_matrix(shape: tuple[int, int], block: Block) -> None:
    x, values = torch.empty(shape), torch.ones(Stat("amax", block=block).grid(*shape))
    assert scale_blocks(x, values, block).shape == shape
    assert expand_blocks(values, block, *shape).shape == shape
    assert pad_blocks(x, block).numel() == 0
