"""Swizzled scales against their definition, which is that of cuBLAS's 1D block scaling factors."""

from __future__ import annotations

import pytest
import torch

from lpq.kernels.blackwell_scales import swizzled

SHAPES = [(128, 4), (256, 8), (384, 4), (128, 16), (1, 1), (127, 3), (129, 5), (130, 9), (300, 7), (32, 4), (0, 4)]


def place(row: int, col: int, cols: int) -> int:
    """Where the scale at this place of a matrix lies."""
    tile = row // 128 * -(-cols // 4) + col // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu], ids=str)
def test_every_scale_lies_where_the_definition_puts_it_and_zeros_elsewhere(
    rows: int, cols: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows + cols)
    scale = torch.randint(1, 256, (rows, cols), generator=generator, dtype=torch.uint8)
    got = swizzled(scale.view(dtype))
    assert got.dtype == dtype
    assert got.is_contiguous()
    expected = torch.zeros(-(-rows // 128) * 128 * -(-cols // 4) * 4, dtype=torch.uint8)
    for row in range(rows):
        for col in range(cols):
            expected[place(row, col, cols)] = scale[row, col]
    assert torch.equal(got.view(torch.uint8), expected)


def test_a_transposed_view_is_swizzled_as_the_matrix_that_it_is() -> None:
    scale = torch.randint(0, 256, (8, 200), dtype=torch.uint8)
    assert torch.equal(swizzled(scale.t()), swizzled(scale.t().contiguous()))


def test_the_definition_tells_orders_apart() -> None:
    """Negative control: neither the plain order nor rows that stay together would pass."""
    scale = torch.arange(512).to(torch.uint8).view(128, 4)
    assert not torch.equal(swizzled(scale), scale.flatten())
    assert not torch.equal(swizzled(scale), scale.view(4, 32, 4).flatten())
    assert place(1, 0, 4) == 16
    assert place(32, 0, 4) == 4
    assert place(0, 4, 8) == 512
    assert place(128, 0, 8) == 1024
