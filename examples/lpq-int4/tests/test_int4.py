"""The conformance kit of lpq on INT4, and the format against its formulas."""

from __future__ import annotations

import pytest
import torch

import lpq
from lpq.testing.conformance import *  # noqa: F403

lpq_formats = ["int4", "hybrid(row=int4, col=mxfp8)", "hybrid(row=nvfp4, col=int4)"]


@pytest.mark.parametrize("magnitude", [2.0**-100, 1e-3, 1.0, 448.0, 2.0**100])
def test_it_is_what_the_readme_says(magnitude: float) -> None:
    """Scales and integers in float64, but for those next to a tie of the two."""
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * magnitude
    x[:32, :16] /= 500  # blocks whose scale is small, even 0
    operand = lpq.quantizer("int4").quantize(x, col=False).row
    assert operand is not None
    unit = x.abs().max().double() / 3136
    wanted = (x.view(64, 3, 16).abs().amax(2).double() / 7 / unit).float()
    scale = wanted.to(torch.float8_e4m3fn)
    assert (operand.buffers()["scale"].float() != scale.float()).sum() <= 1
    step = (operand.buffers()["scale"].double() * unit)[:, :, None]
    exact = torch.where(step > 0, x.view(64, 3, 16).double() / step, 0.0).clamp(-7, 7)
    integers = torch.where(step > 0, operand.decode().view(64, 3, 16).double() / step, 0.0)
    assert (integers - integers.round()).abs().max() < 1e-5
    assert (integers - exact).abs().max() < 0.5 + 1e-5
    assert exact.abs().max() > 6.9


def test_two_values_share_a_byte() -> None:
    """The even column in the low nibble; an odd number of columns leaves half a byte."""
    x = torch.tensor([[7.0, -7.0, 1.0]])
    operand = lpq.quantizer("int4").quantize(x, col=False).row
    assert operand is not None
    assert operand.buffers()["data"].tolist() == [[0x7 | 0x9 << 4, 0x1]]
    assert torch.allclose(operand.decode(), x)


def test_named_recipes() -> None:
    """They are there by name, and a bare name in the grammar means the recipe."""
    recipe = lpq.recipe("fprop=int4, dgrad=mxfp8, wgrad=bf16")
    assert (str(recipe.x.side("row")), str(recipe.dy.side("row"))) == ("int4", "mxfp8")
    assert str(lpq.recipe("int4-fwd-mxfp8-bwd").w.side("row")) == "int4"


@pytest.mark.parametrize(
    ("values", "int4", "nvfp4"),
    [
        (torch.distributions.Normal(0.0, 1.0), 0.086, 0.095),
        (torch.distributions.StudentT(4.0), 0.107, 0.092),
        (torch.distributions.Uniform(-0.5, 0.5), 0.066, 0.102),
    ],
    ids=["normal", "student", "uniform"],
)
def test_what_equal_steps_cost(values: torch.distributions.Distribution, int4: float, nvfp4: float) -> None:
    """The table in the README: relative RMS errors of both grids."""
    torch.manual_seed(0)
    x = values.sample((2048, 1024))
    for name, expected in (("int4", int4), ("nvfp4", nvfp4)):
        error = lpq.quantizer(name).quantize(x, col=False).dequantize() - x
        assert (error.norm() / x.norm()).item() == pytest.approx(expected, abs=0.002), name


def test_it_trains_in_a_mixture() -> None:
    """INT4 forward, MXFP8 and bf16 in the gradients: the loss falls."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    model = lpq.convert(torch.nn.Sequential(*layers), "fprop=int4, dgrad=mxfp8, wgrad=bf16")
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
