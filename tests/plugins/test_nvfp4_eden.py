"""MS-EDEN: its bytes against a golden file and a loop over groups, its mean, and the recipe in which a pass draws one
rotation for both operands of a product."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from imitated_gpu import imitated_gpu
from lpq_nvfp4 import eden
from lpq_nvfp4.gemm import exact
from nasty import normal, unsigned_zeros
from torch import Tensor

import lpq
from lpq.core import RandomBits, gemm
from lpq.formats.elements import decode_e2m1, decode_float8, unpack_nibbles
from lpq.operations.references import gemm_reference
from lpq.registry.errors import OptionError

LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCALES = decode_float8(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)).double().numpy()
EDEN = lpq.quantizer("nvfp4(stochastic=eden)")
SEED = torch.tensor((11 << 32) + 7)


@pytest.mark.parametrize("name", ["normal", "heavy"])
def test_golden_bytes(golden_eden, name: str) -> None:
    """Elements, and the numbers of E4M3 between which a scale is, to which c brings it."""
    y, before = golden_eden[f"{name}/y"], golden_eden[f"{name}/scale_before"]
    data, scale, amax = eden.encode(y, y.abs().amax() / eden.SPREAD, RandomBits(SEED, 0))
    assert torch.equal(unsigned_zeros(data), unsigned_zeros(golden_eden[f"{name}/data"]))
    assert torch.allclose(amax / 2688, golden_eden[f"{name}/d"], rtol=1e-6, atol=0)
    wanted = decode_float8(before.view(torch.float8_e4m3fn)).double()
    wanted *= golden_eden[f"{name}/correction"].double().repeat_interleave(8, 1)
    place = np.searchsorted(SCALES, wanted.numpy() * (1 - 1e-6), "right") - 1
    code = scale.view(torch.uint8).numpy()
    assert ((code == place) | (code == place + 1)).all()
    assert (code == place).any()
    assert (code == place + 1).any()


def rotated(x: Tensor, turn: int) -> np.ndarray:
    """The rotation from its definition."""
    words = _philox_words(turn)
    sigma = np.array([1 - 2 * (words[i // 32] >> i % 32 & 1) for i in range(128)])
    hadamard = np.array([[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)])
    padded = np.pad(x.double().numpy(), ((0, 0), (0, -x.shape[1] % 128)))
    return (padded.reshape(len(x), -1, 128) * sigma @ hadamard / math.sqrt(128)).reshape(len(x), -1)


def _philox_words(turn: int) -> list[int]:
    counter, key, low = [0, 0, 2, 0], [0, turn], 2**32 - 1
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [second >> 32 ^ counter[1] ^ key[0], second & low, first >> 32 ^ counter[3] ^ key[1], first & low]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    return counter


def nearest(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    return levels[np.abs(values[..., None] - levels).argmin(-1)]


def test_it_is_what_its_page_says() -> None:
    """But for elements and scales at a tie, which fp32 and fp64 take to other sides."""
    x = normal(24, 300) * torch.tensor([1.0, 2.0**-9, 3.0]).repeat(8)[:, None]
    made = EDEN.quantize(x, col=False, seed=SEED).row
    assert made.turn == 7
    y = rotated(x, 7)
    v = 6 / (0.93 * 17 / 16)
    d = 4 * float(x.abs().amax()) / 255.99 / v
    draws = RandomBits(SEED, 0).bytes(*y.shape).view(24, -1, 16)[:, :, :3].int().numpy()
    codes = decode_e2m1(unpack_nibbles(made.data)).double().numpy()
    found = decode_float8(made.scale).double().numpy()
    off = {"elements": 0, "scales": 0}
    for row in range(24):
        for group in range(y.shape[1] // 128):
            at, of = slice(128 * group, 128 * group + 128), slice(8 * group, 8 * group + 8)
            blocks = y[row, at].reshape(8, 16)
            b = nearest(np.abs(blocks).max(1) / (v * d), SCALES)
            b = np.where(b == 0, 1, b)
            z = (blocks / (b * d)[:, None]).ravel()
            q = np.sign(z) * nearest(np.abs(z), LEVELS)
            t = b * (z @ z / (z @ q) if z @ q else 1)
            lower = np.searchsorted(SCALES, t, "right") - 1
            share = (t - SCALES[lower]) / (SCALES[lower + 1] - SCALES[lower])
            chance = (draws[row, of] @ [1, 2**8, 2**16]) / 2**24
            off["elements"] += int((codes[row, at] != q).sum())
            off["scales"] += int((found[row, of] != SCALES[lower + (chance < share)]).sum())
    assert off["elements"] <= 3, off
    assert off["scales"] <= 3, off


def relative(error: Tensor, x: Tensor) -> float:
    return float(error.square().mean() / x.square().mean())


def test_the_mean_of_products_is_the_product() -> None:
    x, w = normal(16, 256), normal(24, 256, seed=1)
    wanted, mean, one = x @ w.t(), torch.zeros(16, 24), 0.0
    for seed in range(64):
        a, b = (EDEN.quantize(t, col=False, seed=seed + (part << 32)).row for part, t in enumerate((x, w)))
        product = gemm_reference(a, b, None, torch.float32)
        one += relative(product - wanted, wanted) / 64
        mean += product / 64
    assert relative(mean - wanted, wanted) < 1.25 * one / 64


def test_products_of_several_passes_undo_what_each_drew() -> None:
    """Control: as they are stored, operands of two turns have nothing to do with each other."""
    x, w = normal(16, 256), normal(24, 256, seed=1)
    a, b = EDEN.quantize(x, col=False, seed=1).row, EDEN.quantize(w, col=False, seed=2).row
    assert relative(gemm(a, b) - x @ w.t(), x @ w.t()) < 0.03
    assert relative(gemm_reference(a, b, None, torch.float32) - x @ w.t(), x @ w.t()) > 1


@pytest.mark.parametrize("cols", [256, 200])
def test_the_exact_form_leaves_a_ragged_group_apart(cols: int) -> None:
    operand = EDEN.quantize(normal(16, cols), col=False, seed=1).row
    form = exact(operand)
    assert form is not None
    assert form.factor is not None
    assert (form.rest is None) == (cols == 256)
    values, whole = form.matrix.float() * form.constant * form.factor, form.matrix.shape[1]
    assert torch.allclose(values, operand.decode_rotated()[:, :whole], rtol=1e-6)
    assert form.rest is None or torch.equal(form.rest, operand.decode()[:, whole:].float())


def expect_gradients(layer: torch.nn.Module, x: Tensor, dy: Tensor) -> None:
    """They are products of what the codes of forward decode to, rounded without a bias."""
    found = []
    forward = lpq.recipe("nvfp4-eden").x.side("row")
    decoded = [forward.quantize(t.detach(), col=False).row.decode() for t in (x, layer.weight)]
    for _ in range(8):
        x.grad = layer.weight.grad = None
        y = layer(x)
        y.backward(dy)
        found.append((x.grad, layer.weight.grad))
    assert torch.allclose(y, decoded[0] @ decoded[1].t(), atol=1e-3)
    for gradients, wanted in zip(zip(*found, strict=True), (dy @ decoded[1], dy.t() @ decoded[0]), strict=True):
        one = sum(relative(gradient - wanted, wanted) for gradient in gradients) / 8
        assert one < 0.025
        assert relative(sum(gradients) / 8 - wanted, wanted) < 1.3 * one / 8


def test_a_pass_draws_one_rotation_for_both_operands_of_a_product() -> None:
    recipe = lpq.recipe("nvfp4-eden")
    assert recipe.dgrad.a.side("row").basis == recipe.dgrad.b.side("col").basis is not None
    layer = lpq.convert(torch.nn.Linear(256, 128, bias=False), "nvfp4-eden")
    expect_gradients(layer, normal(384, 256).requires_grad_(), normal(384, 128, seed=1))


def test_a_weight_that_is_held_has_the_turn_of_its_passes() -> None:
    layer = lpq.convert(torch.nn.Linear(256, 128, bias=False), "nvfp4-eden")
    x, dy = normal(384, 256).requires_grad_(), normal(384, 128, seed=1)
    with lpq.hold_weights(layer):
        layer(x).backward(dy)
    decoded = [
        lpq.recipe("nvfp4-eden").x.side("row").quantize(t.detach(), col=False).row.decode() for t in (x, layer.weight)
    ]
    for got, wanted in ((x.grad, dy @ decoded[1]), (layer.weight.grad, dy.t() @ decoded[0])):
        assert relative(got - wanted, wanted) < 0.025


def test_experts_draw_a_rotation_for_each() -> None:
    layer = lpq.nn.GroupedLinear(3, 256, 128, bias=False, recipe="nvfp4-eden")
    x, offs = normal(300, 256).requires_grad_(), torch.tensor([100, 130, 300], dtype=torch.int32)
    y = layer(x, offs)
    dy = normal(*y.shape, seed=1)
    y.backward(dy)
    start = 0
    for expert, stop in enumerate(offs.tolist()):
        rows, weight = slice(start, stop), layer.weight[expert].detach()
        wanted = dy[rows] @ weight
        assert relative(x.grad[rows] - wanted, wanted) < 0.04
        wanted = dy[rows].t() @ x.detach()[rows]
        assert relative(layer.weight.grad[expert] - wanted, wanted) < 0.04
        start = stop


def test_an_input_that_is_encoded_already_is_refused() -> None:
    layer = lpq.convert(torch.nn.Linear(128, 128), "nvfp4-eden")
    x = lpq.recipe("nvfp4-eden").x.quantize(normal(16, 128))
    with pytest.raises(ValueError, match="each pass draws"):
        layer(x)


# ------------------------------------------------------------------------------ the amax of the step before

DELAYED = lpq.quantizer("nvfp4(stochastic=eden, scaling=delayed)")


def remembering(amax: float) -> dict[str, Tensor]:
    return {key: torch.tensor(amax) for key in DELAYED.new_state()}


def test_a_step_encodes_by_the_amax_of_the_step_before() -> None:
    first, second = normal(24, 256), 3 * normal(24, 256, seed=1)
    state = remembering(0.0)
    for x, amax in ((first, 0.0), (second, first.abs().amax()), (first, second.abs().amax())):
        made = DELAYED.quantize(x, state=state, seed=SEED).row
        data, scale, operand_amax = eden.encode(
            eden.DRAWN.apply(x, made.turn), torch.as_tensor(amax), RandomBits(SEED, 0)
        )
        assert torch.equal(made.data, data)
        assert torch.equal(made.scale.view(torch.uint8), scale.view(torch.uint8))
        assert torch.equal(made.amax, operand_amax)
    for value in (math.nan, math.inf, 0.0):
        DELAYED.quantize(torch.full((8, 128), value), state=state, seed=SEED)
        assert {*map(float, state.values())} == {float(first.abs().amax())}, "it is 0 or not finite, and not remembered"


def test_without_a_state_it_measures() -> None:
    one, other = (q.quantize(normal(24, 256), seed=SEED).row for q in (DELAYED, EDEN))
    assert torch.equal(one.data, other.data)
    assert torch.equal(one.amax, other.amax)


@pytest.mark.parametrize(("grown", "unbiased"), [(0.01, True), (1.0, True), (7.0, True), (40.0, False)])
def test_the_mean_is_the_matrix_while_scales_have_room(grown: float, unbiased: bool) -> None:
    x, before = normal(64, 256) * grown, float(normal(64, 256).abs().amax())
    several = [DELAYED.quantize(x, state=remembering(before), seed=seed).row.decode() for seed in range(32)]
    one = sum(relative(t - x, x) for t in several) / 32
    assert (relative(sum(several) / 32 - x, x) < 1.1 * one / 32) == unbiased


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_not_lost_beside_a_finite_amax(value: float) -> None:
    x = normal(4, 300)
    x[2, 270] = value
    decoded = DELAYED.quantize(x, state=remembering(4.0), seed=SEED).row.decode()
    assert not decoded[2, 256:].isfinite().any()
    assert decoded[[0, 1, 3]].isfinite().all()
    assert decoded[2, :256].isfinite().all(), "and leaves the other groups as they are"


def test_the_recipe_has_the_gradients_of_eden_from_the_first_step_on() -> None:
    layer = lpq.convert(torch.nn.Linear(256, 128, bias=False), "nvfp4-eden-delayed")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0)
    assert layer.passes.fresh == ("x", "dy")
    for _ in range(2):
        expect_gradients(layer, normal(384, 256).requires_grad_(), normal(384, 128, seed=1))
        assert float(layer.dy_row_amax) == float(normal(384, 128, seed=1).abs().amax())
        optimizer.step()
        assert layer.passes.fresh == ()


def test_kernels_that_make_operands_for_a_bf16_product_leave_the_first_step_what_it_remembers() -> None:
    """The exact form of an operand comes without statistics."""
    with imitated_gpu():
        layer = lpq.convert(torch.nn.Linear(128, 128, bias=False, dtype=torch.bfloat16), "nvfp4-eden-delayed")
        for fresh in (("x", "dy"), ()):
            assert layer.passes.fresh == fresh
            x = torch.zeros(128, 128, dtype=torch.bfloat16, requires_grad=True)
            layer(x).backward(torch.zeros(128, 128, dtype=torch.bfloat16))
            layer.passes.fresh = ()


def test_it_is_for_eden_alone() -> None:
    with pytest.raises(OptionError, match="scaling=delayed is for stochastic=eden"):
        lpq.quantizer("nvfp4(scaling=delayed)")


@pytest.mark.parametrize("value", [0.0, 2.0**-30, math.inf, math.nan])
def test_at_the_limits(value: float) -> None:
    x = torch.full((3, 40), value)
    decoded = EDEN.quantize(x, col=False, seed=1).row.decode()
    if math.isfinite(value):
        assert (decoded - x).abs().max() <= 0.25 * value
    else:
        assert not decoded.isfinite().all()
