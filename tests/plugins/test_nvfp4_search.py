"""NVFP4's search for the scales of blocks: against all candidates one by one, and the same however a matrix is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lpq_nvfp4 import search
from nasty import normal
from torch import Tensor

import lpq
from lpq.core import Storage, decode, transpose
from lpq.operations.quantizing import quantize
from lpq.registry.errors import OptionError

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
"""The 126 positive finite scales."""


def encoded(x: Tensor, text: str, amax: Tensor | float | None = None) -> Storage:
    side = lpq.quantizer(text).side("row")
    stats = None if amax is None else [torch.as_tensor(amax, dtype=torch.float32), None]
    made = quantize(x, stats, side, None)[0]
    assert made is not None
    return made.row_major()


def errors(x: Tensor, amax: float) -> np.ndarray:
    """The error of each block of 16 for each of the 126 scales, in float64; a tie of two codes costs the same."""
    units = x.double().numpy().reshape(x.shape[0], -1, 16) * (2688 / amax)
    found = []
    for scale in E4M3:
        magnitudes = np.abs(units[..., None]) / scale
        nearest = GRID[np.abs(magnitudes - GRID).argmin(-1)] * scale
        found.append(((nearest - np.abs(units)) ** 2).sum(-1))
    return np.stack(found)


def test_mse_has_the_least_error_of_all_scales() -> None:
    """In each block; control: that of the amax has it in few."""
    x = normal(24, 64).bfloat16()
    amax = x.abs().max().item()
    every = errors(x, amax)
    least = every.min(0)

    def of(text: str) -> np.ndarray:
        codes = encoded(x, text).buffers()["scale"].view(torch.uint8).long().numpy()
        return np.take_along_axis(every, codes[None] - 1, 0)[0]

    assert (of("nvfp4(search=mse)") <= least * (1 + 1e-5) + 1e-9).all()
    assert (of("nvfp4") > least * 1.01).mean() > 0.5
    two = of("nvfp4(search=four_over_six)")
    assert (two <= of("nvfp4") * (1 + 1e-5)).all()
    assert two.sum() < 0.95 * of("nvfp4").sum()


@pytest.mark.parametrize("block", ["1x16", "16x16"])
def test_of_equally_good_scales_the_larger_one_is_taken(block: str) -> None:
    """Elements of one magnitude are exact with many scales; a block of zeros with all."""
    x = torch.zeros(16, 32)
    x[:, :16] = 64.0
    scales = encoded(x, f"nvfp4(block={block}, search=mse)", 2688.0).buffers()["scale"].float()
    assert scales[0].tolist() == [128.0, 448.0]  # 64 is half of 128, and of E2M1's numbers that is the smallest
    assert torch.equal(encoded(x, f"nvfp4(block={block}, search=mse)", 2688.0).decode(), x)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 40), cols=st.integers(1, 40), start=st.integers(0, 2),
    searching=st.sampled_from(["mse", "four_over_six"]),
    block=st.sampled_from(["1x16", "16x16"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_part_has_the_codes_of_the_whole(
    rows: int, cols: int, start: int, searching: str, block: str, seed: int
) -> None:
    """With the amax of the whole; control: with its own amax it has others, now and then (below)."""
    x, text = normal(rows, cols, seed=seed), f"nvfp4(block={block}, search={searching})"
    amax = x.abs().amax()
    whole = encoded(x, text, amax)
    top = min(16 * start, rows)
    part = encoded(x[top:], text, amax) if top < rows else None
    expected = whole.narrow(0, top, rows)
    if part is not None and expected is not None:
        for name, buffer in expected.buffers().items():
            found = part.buffers()[name]
            assert torch.equal(found.view(torch.uint8) if found.itemsize == 1 else found,
                               buffer.contiguous().view(torch.uint8) if buffer.itemsize == 1 else buffer)  # fmt: skip


def test_another_amax_gives_other_scales() -> None:
    x = normal(16, 64)
    one, other = (encoded(x, "nvfp4(search=mse)", amax).buffers()["scale"].float() for amax in (4.0, 5.0))
    assert not torch.equal(one, other)


def test_square_blocks_are_searched_alike_in_both_directions() -> None:
    x, text = normal(48, 80), "nvfp4(block=16x16, search=mse)"
    turned, again = transpose(encoded(x, text)), encoded(x.t().contiguous(), text)
    for name, buffer in again.buffers().items():
        found = turned.buffers()[name].contiguous()
        assert torch.equal(found.view(torch.uint8) if found.itemsize == 1 else found,
                           buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer), name  # fmt: skip


def test_a_block_that_is_not_finite_keeps_the_scale_of_its_amax() -> None:
    x = normal(4, 32)
    x[1, 3], x[2, 20] = torch.nan, torch.inf
    for searching in ("mse", "four_over_six"):
        ours, plain = encoded(x, f"nvfp4(search={searching})", 4.0), encoded(x, "nvfp4", 4.0)
        for row, block in ((1, 0), (2, 1)):
            assert (
                ours.buffers()["scale"].view(torch.uint8)[row, block]
                == plain.buffers()["scale"].view(torch.uint8)[row, block]
            )
        assert decode(ours, torch.float32)[0].isfinite().all()
    assert encoded(torch.empty(0, 32), "nvfp4(search=mse)").shape == (0, 32)


def test_kernels_leave_a_search_to_the_reference() -> None:
    searching = lpq.quantizer("nvfp4(search=mse)")
    assert "searches no scales" in str(search.why_not(searching))
    assert search.why_not(lpq.quantizer("nvfp4")) is None
    with pytest.raises(OptionError, match="'search' must be 'amax' or 'mse' or 'four_over_six'"):
        lpq.quantizer("nvfp4(search=msee)")
