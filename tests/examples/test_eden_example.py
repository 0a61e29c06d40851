"""The example MS-EDEN: its bytes against a loop over groups, its mean over rotations, and the recipe that has it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import lpq
from lpq import registry
from lpq.formats.elements import decode_e2m1, decode_float8, unpack_nibbles
from lpq.formats.random_bits import RandomBits

LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCALES = decode_float8(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)).double().numpy()
SEED = torch.tensor(7)
EXAMPLE = Path(__file__).parents[2] / "examples" / "lpq-eden"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(EXAMPLE)
    import lpq_eden

    registry.register(lpq_eden, name="eden")
    yield
    registry.refresh()


def normal(rows: int, cols: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def rotated(x: Tensor, signs: int) -> np.ndarray:
    """The rotation from its definition, and with no code of lpq."""
    bits = random.Random(signs).getrandbits(128)
    sigma = np.array([1 - 2 * (bits >> i & 1) for i in range(128)])
    hadamard = np.array([[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)])
    padded = np.pad(x.double().numpy(), ((0, 0), (0, -x.shape[1] % 128)))
    return (padded.reshape(len(x), -1, 128) * sigma @ hadamard / math.sqrt(128)).reshape(len(x), -1)


def nearest(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    return levels[np.abs(values[..., None] - levels).argmin(-1)]


def test_it_is_what_its_page_says() -> None:
    """But for elements and scales at a tie, which fp32 and fp64 take to other sides."""
    x = normal(24, 300) * torch.tensor([1.0, 2.0**-9, 3.0]).repeat(8)[:, None]
    made = lpq.quantizer("eden(signs=3)").quantize(x, col=False, seed=SEED).row
    y = rotated(x, 3)
    v = 6 / (0.93 * 17 / 16)
    d = np.abs(y).max() / 255.99 / v
    draws = RandomBits(SEED, 0).bytes(*y.shape).view(24, -1, 16)[:, :, :2].int().numpy()
    off = {"elements": 0, "scales": 0}
    for row in range(24):
        for group in range(y.shape[1] // 128):
            at = slice(128 * group, 128 * group + 128)
            blocks = y[row, at].reshape(8, 16)
            b = nearest(np.abs(blocks).max(1) / (v * d), SCALES)
            z = (blocks / (np.where(b == 0, 1, b) * d)[:, None]).ravel()
            q = np.sign(z) * nearest(np.abs(z), LEVELS)
            t = np.where(b == 0, 1, b) * (z @ z / (z @ q) if z @ q else 1)
            lower = np.searchsorted(SCALES, t, "right") - 1
            share = (t - SCALES[lower]) / (SCALES[lower + 1] - SCALES[lower])
            chance = (draws[row, 8 * group : 8 * group + 8] @ [256, 1]) / 2**16
            scale = SCALES[lower + (chance < share)]
            codes = decode_e2m1(unpack_nibbles(made.data[row : row + 1]))[0, at].double().numpy()
            off["elements"] += int((codes != q).sum())
            off["scales"] += int(
                (decode_float8(made.scale)[row, 8 * group : 8 * group + 8].double().numpy() != scale).sum()
            )
    assert off["elements"] <= 3, off
    assert off["scales"] <= 3, off


def relative(error: Tensor, x: Tensor) -> float:
    return float(error.square().mean() / x.square().mean())


def test_the_mean_over_rotations_is_the_matrix() -> None:
    """The error of the mean of 32 draws is a 32nd of the error of one, as of draws without a bias. Draws by one
    rotation have a bias."""
    x = normal(64, 256)

    def drawn(signs: int, seed: int) -> Tensor:
        quantizer = lpq.quantizer("eden", signs=signs)
        return quantizer.quantize(x, col=False, seed=torch.tensor(seed)).row.decode()

    several = [drawn(n, n) for n in range(32)]
    one = sum(relative(t - x, x) for t in several) / 32
    assert 0.009 < one < 0.0105
    assert relative(sum(several) / 32 - x, x) < 1.1 * one / 32
    assert relative(sum(drawn(0, n) for n in range(32)) / 32 - x, x) > 8 * one / 32


def test_backward_multiplies_what_the_codes_of_forward_decode_to() -> None:
    recipe = lpq.recipe("eden")
    assert recipe.dgrad.a.side("row").basis == recipe.dgrad.b.side("col").basis is not None
    layer = lpq.convert(torch.nn.Linear(256, 128, bias=False), "eden")
    x, dy = normal(384, 256).requires_grad_(), normal(384, 128, seed=1)
    torch.manual_seed(0)
    y = layer(x)
    y.backward(dy)
    decoded = [lpq.quantizer("nvfp4").quantize(t.detach(), col=False).row.decode() for t in (x, layer.weight)]
    assert torch.allclose(y, decoded[0] @ decoded[1].t(), atol=1e-3)
    for got, wanted in ((x.grad, dy @ decoded[1]), (layer.weight.grad, dy.t() @ decoded[0])):
        assert relative(got - wanted, wanted) < 0.025


@pytest.mark.parametrize("value", [0.0, 2.0**-30, math.inf, math.nan])
def test_at_the_limits(value: float) -> None:
    x = torch.full((3, 40), value)
    decoded = lpq.quantizer("eden").quantize(x, col=False).row.decode()
    if math.isfinite(value):
        assert (decoded - x).abs().max() <= 0.2 * value
    else:
        assert not decoded.isfinite().all()
