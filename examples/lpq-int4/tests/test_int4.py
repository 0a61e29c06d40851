"""The conformance kit of lpq on MXFP4, and the format against the words of its specification."""

from __future__ import annotations

import math

import pytest
import torch
from lpq_mxfp4.format import BLOCK, shared_exponent

import lpq
from lpq.formats.blocks import block_amax, scale_blocks
from lpq.formats.elements import cast_e2m1, cast_e8m0, decode_e2m1, decode_e8m0, inverse_e8m0
from lpq.testing.conformance import *  # noqa: F403

lpq_formats = ["mxfp4"]

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def specified(block: list[float]) -> tuple[int, list[float]]:
    """The shared exponent and the values of one block, in floats, by section 6.3 of the specification."""
    amax = max(abs(v) for v in block)
    exponent = math.floor(math.log2(amax)) - 2 if amax else -127
    values = []
    for v in block:
        scaled = min(abs(v) / 2.0**exponent, 6.0)
        code = min(range(8), key=lambda c: (abs(GRID[c] - scaled), c % 2))  # to nearest, a tie to the even code
        values.append(math.copysign(GRID[code] * 2.0**exponent, v))
    return exponent + 127, values


@pytest.mark.parametrize("magnitude", [2.0**-100, 1e-3, 1.0, 448.0, 2.0**100])
def test_it_is_what_the_specification_says(magnitude: float) -> None:
    """Exponents and values of random blocks, also of values on and between the points of the grid."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * magnitude
    x[32:] = (torch.arange(32.0 * 32).view(32, 32) % 33 / 4 - 4) * magnitude
    operand = lpq.quantizer("mxfp4").quantize(x, col=False).row
    assert operand is not None
    decoded = operand.decode()
    for row in range(64):
        exponent, values = specified(x[row].tolist())
        assert operand.buffers()["scale"][row].item() == exponent
        assert decoded[row].tolist() == values


def test_the_scale_is_rounded_down() -> None:
    """An amax of 7.9 keeps the scale of 4 and saturates at 6; rounding up would decode it as 8."""
    x = torch.zeros(1, 32)
    x[0, 0] = 7.9
    assert lpq.quantizer("mxfp4").quantize(x).dequantize()[0, 0] == 6.0
    exponents = shared_exponent(torch.tensor([0.0, 1.0, 3.99, 4.0, 2.0**-126, 2.0**127, math.inf, math.nan]))
    assert exponents.tolist() == [0, 125, 126, 127, 0, 252, 255, 255]


def test_two_values_share_a_byte() -> None:
    """The even column in the low nibble; an odd number of columns leaves half a byte."""
    x = torch.tensor([[4.0, -6.0, 0.5]])
    operand = lpq.quantizer("mxfp4").quantize(x, col=False).row
    assert operand is not None
    assert operand.buffers()["data"].tolist() == [[0x6 | 0xF << 4, 0x1]]
    assert operand.decode().tolist() == x.tolist()


def test_named_recipes() -> None:
    """They are there by name, and a bare name in the grammar means the recipe."""
    recipe = lpq.recipe("fprop=mxfp4, dgrad=mxfp8, wgrad=bf16")
    assert (str(recipe.x.side("row")), str(recipe.dy.side("row"))) == ("mxfp4", "mxfp8")
    assert str(lpq.recipe("mxfp4-fwd-mxfp8-bwd").w.side("row")) == "mxfp4"


@pytest.mark.parametrize(
    ("values", "down", "up"),
    [
        (torch.distributions.Normal(0.0, 1.0), 0.115, 0.116),
        (torch.distributions.StudentT(4.0), 0.132, 0.139),
        (torch.distributions.Uniform(-0.5, 0.5), 0.144, 0.099),
    ],
    ids=["normal", "student", "uniform"],
)
def test_what_rounding_the_scale_down_costs(values: torch.distributions.Distribution, down: float, up: float) -> None:
    """The table in the README: relative RMS errors of both rules."""
    torch.manual_seed(0)
    x = values.sample((2048, 1024))
    amax = block_amax(x, BLOCK)
    for scale, expected in ((shared_exponent(amax), down), (cast_e8m0(amax / 6), up)):
        elements = decode_e2m1(cast_e2m1(scale_blocks(x, inverse_e8m0(scale), BLOCK)))
        error = scale_blocks(elements, decode_e8m0(scale), BLOCK) - x
        assert (error.norm() / x.norm()).item() == pytest.approx(expected, abs=0.002)


def test_it_trains_in_a_mixture() -> None:
    """MXFP4 forward, MXFP8 and bf16 in the gradients: the loss falls."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    model = lpq.convert(torch.nn.Sequential(*layers), "fprop=mxfp4, dgrad=mxfp8, wgrad=bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(64, 64)
    losses = []
    for _ in range(30):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
