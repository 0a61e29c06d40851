"""lpq.nn.Linear: what it multiplies, what it keeps, and that it is otherwise an nn.Linear."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from counting import encodings, products
from support.comparing import equal
from torch import nn
from torch.utils.checkpoint import checkpoint

import lpq
from lpq.core import encode_operands, gemm

RECIPES = [
    "bf16", "fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "nvfp4", "mxfp8-fwd-nvfp4-bwd",
    "nvfp4-fwd-mxfp8-bwd", "mxfp8-fwd-bf16-bwd", "nvfp4-fwd-bf16-bwd", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16",
]  # fmt: skip
EVERY = pytest.mark.parametrize("recipe", RECIPES)
COMPILED = ("fp8-delayed", "nvfp4", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16")
"""With state, with random bits, and with other formats in each product; the conformance kit compiles every format."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Every test compiles the same few functions anew, and the compiler counts."""
    torch._dynamo.reset()


def layer(recipe: str | None, fan_in: int = 48, fan_out: int = 32, dtype: torch.dtype = torch.float32) -> lpq.nn.Linear:
    torch.manual_seed(3)
    return lpq.nn.Linear(fan_in, fan_out, dtype=dtype, recipe=recipe)


def run(module: nn.Module, x: torch.Tensor, seed: int = 5) -> tuple[torch.Tensor, ...]:
    """Output and every gradient, from a fixed state of the generator."""
    torch.manual_seed(seed)
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    (y.float().square().sum() / 7).backward()
    return (y.detach(), x.grad, *(p.grad.clone() for p in module.parameters()))


def run_outside(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As without autocast."""
    with torch.autocast("cpu", enabled=False):
        return run(module, x)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_three_gemms_multiply_the_encoded_operands(recipe: str, dtype: torch.dtype) -> None:
    module = layer(recipe, dtype=dtype)
    r = module.recipe
    x, dy = torch.randn(40, 48, dtype=dtype), torch.randn(40, 32, dtype=dtype)
    torch.manual_seed(9)
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    y.backward(dy)
    torch.manual_seed(9)
    seed = torch.randint(-(1 << 63), (1 << 63) - 1, (3,), dtype=torch.int64)[2]
    states = {t: getattr(r, t).new_state() or None for t in ("x", "w", "dy")}
    ex = encode_operands(r.x, x, state=states["x"])
    ew = encode_operands(r.w, module.weight.detach(), state=states["w"])
    edy = encode_operands(r.dy, dy, state=states["dy"], seed=seed)
    assert torch.equal(y, gemm(ex.row, ew.row, bias=module.bias.detach(), dtype=dtype))
    assert torch.equal(leaf.grad, gemm(edy.row, ew.col, dtype=dtype))
    assert torch.equal(module.weight.grad, gemm(edy.col, ex.col, dtype=dtype))
    assert torch.equal(module.bias.grad, dy.sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_unquantized_recipe_is_nn_linear_bit_for_bit(dtype: torch.dtype, bias: bool) -> None:
    plain = nn.Linear(48, 32, bias=bias, dtype=dtype)
    ours = lpq.convert(copy.deepcopy(plain), "identity")
    assert isinstance(ours, lpq.nn.Linear)
    x = torch.randn(2, 5, 48, dtype=dtype)
    assert equal(run(plain, x), run(ours, x))
    assert not equal(run(plain, x), run(lpq.convert(ours, "mxfp8"), x))


def test_bf16_under_autocast_is_nn_linear_bit_for_bit() -> None:
    plain = nn.Linear(48, 32)
    ours = lpq.convert(copy.deepcopy(plain), "bf16")
    x = torch.randn(6, 48)
    with torch.autocast("cpu", torch.bfloat16):
        a, b = run(plain, x), run(ours, x)
    assert equal(a, b)
    assert a[0].dtype == b[0].dtype == torch.bfloat16


@EVERY
def test_autocast_gives_the_autocast_dtype_and_parameter_gradients(recipe: str) -> None:
    module = layer(recipe)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx, dw, db = run(module, torch.randn(6, 48))
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (torch.bfloat16, *[torch.float32] * 3)
    reference = layer(None)
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(reference, torch.randn(6, 48, generator=torch.Generator().manual_seed(0)))
    assert expected[0].shape == y.shape


def saved_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes that autograd holds for backward, parameters and their views aside."""
    own = {p.untyped_storage()._cdata for p in module.parameters()}
    held: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage()._cdata not in own:
            held[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x.requires_grad_())
    return sum(held.values())


@pytest.mark.parametrize(
    ("recipe", "x_bytes", "w_bytes"),
    [
        ("bf16", 2, 0), ("fp8-current", 1, 0), ("fp8-delayed", 1, 1), ("fp8-row", 1, 1), ("fp8-block", 1 + 4 / 128, 1),
        ("mxfp8", 1 + 1 / 32, 1 + 1 / 32), ("nvfp4", 0.5 + 1 / 16, 0.5 + 1 / 256),
        ("fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", 2, 0.5 + 1 / 256), ("mxfp8-fwd-bf16-bwd", 2, 0),
    ],
)  # fmt: skip
def test_backward_holds_the_encoded_operands_and_nothing_else(recipe: str, x_bytes: float, w_bytes: float) -> None:
    module = layer(recipe, 256, 512, torch.bfloat16)
    held = saved_bytes(module, torch.randn(1024, 256, dtype=torch.bfloat16))
    expected = 1024 * 256 * x_bytes + 512 * 256 * w_bytes
    assert expected <= held <= expected + 4096 + 4 * 256  # a few scalars, and one scale a row for fp8-row


def test_every_recipe_is_counted() -> None:
    counted = {"bf16", "fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "nvfp4"}
    assert counted <= set(lpq.registry.recipes())


@EVERY
def test_checkpointing_gives_the_same_gradients(recipe: str) -> None:
    x = torch.randn(24, 48)
    plain = nn.Sequential(layer(recipe), nn.ReLU(), layer(recipe, 32, 16))
    wrapped = copy.deepcopy(plain)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wrapped

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    again = Checkpointed()
    for step in range(3):
        assert equal(run(plain, x, step), run(again, x, step))
    assert equal(plain.buffers(), wrapped.buffers())


def test_compiled_without_a_break_is_bitwise_eager_for_any_batch_and_with_held_weights() -> None:
    sizes = itertools.pairwise((48, 32, 24, 16))
    eager = nn.Sequential(*(layer(recipe, *size) for recipe, size in zip(COMPILED, sizes, strict=True)))
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for step, tokens in enumerate((24, 24, 8, 7)):  # the third is another size: from there on it may be any
        x = torch.randn(tokens, 48)
        a = run(eager, x, step)
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        torch.manual_seed(step)
        y = compiled(leaf)
        (y.float().square().sum() / 7).backward()
        assert equal(a, (y.detach(), leaf.grad, *(p.grad for p in module.parameters())))
    assert equal(eager.buffers(), module.buffers())
    with lpq.hold_weights(eager), lpq.hold_weights(module):
        torch.manual_seed(0)
        expected = eager(x)
        torch.manual_seed(0)
        assert torch.equal(compiled(x), expected)


def test_layers_side_by_side_draw_the_same_seeds_compiled() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (layer("nvfp4", 48, 32) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) * self.k(x) + self.v(x)

    eager = Fork()
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend="aot_eager")
    x = torch.randn(24, 48)
    assert equal(run(eager, x, 1), run(compiled, x, 1))
    assert not equal(run(eager, x, 1), run(compiled, x, 2))


def test_compiled_where_the_number_of_rows_is_in_the_data() -> None:
    """As of experts, which take the tokens that are routed to them."""
    eager = nn.ModuleList(map(layer, ("fp8-current", "fp8-block", "mxfp8", "nvfp4")))

    def routed(modules: nn.ModuleList, x: torch.Tensor, chosen: torch.Tensor) -> list[torch.Tensor]:
        rows = x[chosen.nonzero().squeeze(1)]
        return [module(rows) for module in modules]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(routed, fullgraph=True, backend="aot_eager")
        x = torch.randn(24, 48)
        for count in (16, 24):
            chosen = torch.arange(24) < count
            for one, other in zip(compiled(eager, x, chosen), routed(eager, x, chosen), strict=True):
                torch.testing.assert_close(one, other)


@EVERY
def test_frozen_tensors_cost_no_gemm(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = products(monkeypatch)

    def count(x_grad: bool, w_grad: bool) -> int:
        calls.clear()
        module = layer(recipe)
        module.weight.requires_grad_(w_grad)
        x = torch.randn(8, 48, requires_grad=x_grad)
        module(x).sum().backward()
        assert (x.grad is not None) == x_grad
        assert (module.weight.grad is not None) == w_grad
        return len(calls)

    assert count(True, True) == 3
    assert count(True, False) == 2
    assert count(False, True) == 2
    assert count(False, False) == 1  # the bias alone
    with torch.no_grad():
        calls.clear()
        layer(recipe)(torch.randn(8, 48))
        assert len(calls) == 1


@EVERY
def test_leading_dimensions_are_rows(recipe: str) -> None:
    x = torch.randn(4, 6, 48)
    a, b = run(layer(recipe), x), run(layer(recipe), x.reshape(24, 48))
    assert a[0].shape == (4, 6, 32)
    assert torch.equal(a[0].reshape(24, 32), b[0])
    assert torch.equal(a[1].reshape(24, 48), b[1])
    assert equal(a[2:], b[2:])
    assert layer(recipe)(torch.randn(48)).shape == (32,)


@EVERY
def test_held_weights_change_nothing_and_are_encoded_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lpq.nn import linear

    x = torch.randn(3, 8, 48)
    plain, held = layer(recipe), layer(recipe)

    def accumulate(module: lpq.nn.Linear) -> list[torch.Tensor]:
        torch.manual_seed(1)
        for micro in x:
            module(micro).square().sum().backward()
        return [p.grad for p in module.parameters()]

    expected = accumulate(plain)
    encoded, calls = encodings(monkeypatch), []
    original = linear.encode_operands
    monkeypatch.setattr(linear, "encode_operands", lambda *a, **k: calls.append(1) or original(*a, **k))

    def passes() -> None:
        with lpq.hold_weights(held):
            got = accumulate(held)
            assert len(calls) == 1
            assert len(encoded) == 2 * len(x), "of x and dy alone"
            if recipe != "fp8-delayed":  # whose history counts a held weight once
                assert equal(expected, got)
            with torch.no_grad():
                held.weight.mul_(2)
            held(x[0])
            pytest.fail("the pass must say it")

    with pytest.raises(RuntimeError, match="changed while its encoded form is held"):
        passes()
    encoded.clear()
    held(x[0])
    assert [wanted.shape for wanted in encoded] == [(8, 48), (32, 48)]


@EVERY
def test_state_dict_keys_are_those_of_nn_linear(recipe: str) -> None:
    module = layer(recipe)
    keys = set(module.state_dict())
    state = {k for k in keys if k.startswith(("x_", "w_", "dy_"))}
    assert keys - state == set(nn.Linear(2, 2).state_dict())
    assert bool(state) == (recipe == "fp8-delayed")
    module.load_state_dict(nn.Linear(48, 32).state_dict())


def test_switching_the_recipe_keeps_weights_and_optimizer_state() -> None:
    module = layer("mxfp8")
    optimizer = torch.optim.AdamW(module.parameters())
    weight = module.weight
    for recipe in ("mxfp8", "fp8-delayed", "nvfp4", None):
        module.recipe = recipe
        module(torch.randn(8, 48)).sum().backward()
        optimizer.step()
    assert module.weight is weight
    assert optimizer.state[weight]["step"] == 4
    assert set(module.state_dict()) == {"weight", "bias"}


def test_the_recipe_says_which_sums_may_be_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = products(monkeypatch)  # fprop, then dgrad, then wgrad
    for recipe, expected in (
        ("mxfp8", [True, False, False]),
        ("fprop=mxfp8, dgrad=mxfp8, wgrad=mxfp8, fprop.fast_accumulate=false", [False, False, False]),
        ("fprop=mxfp8, dgrad=mxfp8, wgrad=mxfp8, wgrad.fast_accumulate=true", [True, False, True]),
    ):
        seen.clear()
        layer(recipe)(torch.randn(4, 48, requires_grad=True)).sum().backward()
        assert [product.fast_accumulate for product in seen] == expected


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8", "nvfp4", "fprop=mxfp8, dgrad=fp8(), wgrad=bf16"])
def test_a_weight_stored_quantized_gives_the_same_products_compiled_too(recipe: str) -> None:
    eager, stored = layer(recipe), layer(recipe)
    quantized = stored.recipe.w.quantize(stored.weight.detach())
    stored.weight = nn.Parameter(quantized)
    compiled = torch.compile(stored, fullgraph=True, backend="aot_eager")
    x = torch.randn(24, 48)

    def step(module: nn.Module) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.square().sum().backward()
        return y.detach(), leaf.grad

    expected = step(eager)
    assert equal(step(stored), expected)
    stored.weight.grad = None
    assert equal(step(compiled), expected)
    assert torch.equal(stored.weight.grad, eager.weight.grad)
    other = layer("mxfp8" if recipe != "mxfp8" else "fp8-row")
    other.weight = nn.Parameter(quantized)
    with pytest.raises(ValueError, match=r"and the recipe wants .*: use one with w="):
        other(x.clone().requires_grad_())


def test_autocast_does_not_reach_into_the_products() -> None:
    x = torch.randn(24, 48)
    with torch.autocast("cpu", torch.bfloat16):
        for recipe in COMPILED:
            assert torch.equal(run(layer(recipe), x)[0], run_outside(layer(recipe), x)[0].bfloat16())
        eager = nn.Sequential(*map(layer, COMPILED, (48, 32, 32)))
        compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend="aot_eager")
        assert equal(run(eager, x), run(compiled, x))


def test_a_checkpoint_without_the_state_starts_it_afresh() -> None:
    module = layer("fp8-delayed")
    module(torch.randn(8, 48)).sum().backward()
    assert module.x_amax_history.any()
    module.load_state_dict(nn.Linear(48, 32).state_dict())
    assert not any(b.any() for b in module.buffers())


def test_the_state_of_another_recipe_is_left_out() -> None:
    delayed = layer("fp8-delayed")
    delayed(torch.randn(8, 48)).sum().backward()
    other = layer("mxfp8")
    other.load_state_dict(delayed.state_dict())
    assert torch.equal(other.weight, delayed.weight)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**delayed.state_dict(), "stray": torch.zeros(())})
    with pytest.raises(RuntimeError, match=r"x_proj\.weight"):
        other.load_state_dict({**delayed.state_dict(), "x_proj.weight": torch.zeros(())})


def test_a_meta_model_can_be_run_and_materialised() -> None:
    for recipe in RECIPES:
        with torch.device("meta"):
            module = lpq.convert(nn.Sequential(nn.Linear(48, 64)), recipe)
        assert module(torch.empty(3, 48, device="meta")).shape == (3, 64)
        module.to_empty(device="cpu")
        assert all(b.device.type == "cpu" and not b.any() for b in module.buffers())


def test_what_was_bound_under_other_kernels_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another layer of the same recipe and shapes is bound under the setting that holds now."""
    layer("mxfp8")(torch.randn(8, 48))
    monkeypatch.setenv("LPQ_KERNELS", "triton")
    with pytest.raises(lpq.registry.LpqError, match="LPQ_KERNELS=triton leaves no kernel"):
        layer("mxfp8")(torch.randn(8, 48))
