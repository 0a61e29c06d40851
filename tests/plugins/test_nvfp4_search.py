"""NVFP4's search for the scales of blocks: against all candidates one by one, against the golden file, and the same for
any part of a matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lpq_nvfp4 import search
from lpq_nvfp4.engines import SCHEMES
from nasty import normal, unsigned_zeros
from support.comparing import equal_bytes
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


VARIANTS = [(block, error, norm) for block in ("1x16", "16x16") for error in ("mae", "mse") for norm in (256, 448)]


@pytest.mark.parametrize(("block", "error", "norm"), VARIANTS)
@pytest.mark.parametrize("name", ["normal", "tiny", "huge", "ties"])
def test_golden_bytes_of_four_over_six(golden, golden_variants, name: str, block: str, error: str, norm: int) -> None:
    """The amax of the operand says what the norm is."""
    text = f"nvfp4(block={block}, search=four_over_six, error={error}, norm={norm})"
    found, expected = encoded(golden[f"{name}/x"], text), golden_variants.buffers(name, f"46_{error}_{norm}_{block}")
    assert torch.equal(unsigned_zeros(found.buffers()["data"]), unsigned_zeros(expected["data"]))
    scale = found.buffers()["scale"].view(torch.uint8)
    assert torch.equal(scale.repeat_interleave(16 if block == "16x16" else 1, 0), expected["scale"])
    assert torch.equal(found.buffers()["amax"], expected["amax"].squeeze() * (448 / norm))


ROWS = {"": "rowscaled_1x16"} | {
    f"search=four_over_six, error={error}, norm=256": f"46_{error}_256_rowscaled_1x16" for error in ("mae", "mse")
}


@pytest.mark.parametrize("name", ["normal", "tiny", "huge", "ties"])
@pytest.mark.parametrize("options", ROWS)
def test_golden_bytes_of_rows(golden, golden_variants, name: str, options: str) -> None:
    found = encoded(golden[f"{name}/x"], f"nvfp4(scaling=row{options and ', ' + options})").buffers()
    expected = golden_variants.buffers(name, ROWS[options])
    assert torch.equal(unsigned_zeros(found["data"]), unsigned_zeros(expected["data"]))
    assert torch.equal(found["scale"].view(torch.uint8), expected["scale"])
    assert torch.equal(found["amax"], expected["amax"] * (448 / 256 if options else 1))


def test_golden_bytes_tell_variants_apart(golden_variants) -> None:
    scales = [golden_variants[f"normal/46_{error}_{norm}_{block}/scale"] for block, error, norm in VARIANTS]
    assert all(not torch.equal(a, b) for i, a in enumerate(scales) for b in scales[:i])


@pytest.mark.parametrize("norm", [256, 448])
def test_the_norm_is_in_the_scale_of_exported_weights(norm: int) -> None:
    x = normal(32, 64, dtype=torch.bfloat16)
    *_, divisor = SCHEMES[0].write(encoded(x, f"nvfp4(search=four_over_six, norm={norm})"))  # type: ignore[arg-type]
    assert divisor.item() == (torch.tensor(6.0 * norm) / x.abs().amax().float()).item()


@pytest.mark.parametrize("norm", [256, 448])
def test_four_over_six_of_an_operand_whose_amax_has_no_room(norm: int) -> None:
    """As large as fp32 goes, the amax of the operand is what it can be."""
    x = torch.full((2, 16), torch.finfo(torch.float32).max)
    found = encoded(x, f"nvfp4(search=four_over_six, norm={norm})").buffers()["amax"]
    assert found == torch.finfo(torch.float32).max


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
    norm = ", error=mae, norm=256" if searching == "four_over_six" and seed % 2 else ""
    x, text = normal(rows, cols, seed=seed), f"nvfp4(block={block}, search={searching}{norm})"
    amax = x.abs().amax()
    whole = encoded(x, text, amax)
    top = min(16 * start, rows)
    part = encoded(x[top:], text, amax) if top < rows else None
    expected = whole.narrow(0, top, rows)
    if part is not None and expected is not None:
        assert equal_bytes(part.tensors(), expected.tensors())


def test_another_amax_gives_other_scales() -> None:
    x = normal(16, 64)
    one, other = (encoded(x, "nvfp4(search=mse)", amax).buffers()["scale"].float() for amax in (4.0, 5.0))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("searching", ["mse", "four_over_six", "four_over_six, error=mae, norm=256"])
def test_square_blocks_are_searched_alike_in_both_directions(searching: str) -> None:
    for seed in range(8):  # a sum of errors in another order differs in the last bit
        x, text = normal(48, 80, seed=seed), f"nvfp4(block=16x16, search={searching})"
        assert equal_bytes(transpose(encoded(x, text)).tensors(), encoded(x.t().contiguous(), text).tensors())


def test_errors_of_a_square_and_of_its_transpose_have_one_sum() -> None:
    """Control: row after row they have not."""
    errors = normal(512, 512).abs()
    assert torch.equal(search._in_squares(errors), search._in_squares(errors.t()).t())
    assert not torch.equal(*(search._in_rows(search._in_rows(x).t()) for x in (errors, errors.t())))


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
    assert "does not search all scales: nvfp4(search=mse) does" in str(search.why_not(searching))
    chance = lpq.quantizer("nvfp4(stochastic=true, search=four_over_six)")
    assert "nor any that are rounded stochastically" in str(search.why_not(chance))
    for text in ("nvfp4", "nvfp4(search=four_over_six, norm=256)", "nvfp4(stochastic=true)"):
        assert search.why_not(lpq.quantizer(text)) is None
    with pytest.raises(OptionError, match="'search' must be 'amax' or 'mse' or 'four_over_six'"):
        lpq.quantizer("nvfp4(search=msee)")
    with pytest.raises(OptionError, match="'norm' must be 256 or 448"):
        lpq.quantizer("nvfp4(search=four_over_six, norm=384)")
    with pytest.raises(OptionError, match="options of search=four_over_six: set that, or leave them out"):
        lpq.quantizer("nvfp4(norm=256)")
    with pytest.raises(OptionError, match="with scaling=row leave out block, rht and static"):
        lpq.quantizer("nvfp4(scaling=row, rht=true)")
    for kind in ("mse", "four_over_six"):  # whose scales cut elements, so the mean of roundings would be too small
        with pytest.raises(OptionError, match="a search may choose others: leave search out"):
            lpq.quantizer(f"nvfp4(stochastic=unbiased, search={kind})")
        assert (
            str(lpq.quantizer("nvfp4(stochastic=unbiased)").frozen(kind)) == "nvfp4(stochastic=unbiased, static=true)"
        )
    with pytest.raises(OptionError, match="leave stochastic out"):
        lpq.quantizer("nvfp4(search=four_over_six, norm=256, stochastic=true)")
