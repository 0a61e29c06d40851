"""lpq.nn.Linear: what it multiplies, what it keeps, and that it is otherwise an nn.Linear."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from counting import encodings, kept_for_backward, products
from support.comparing import equal
from support.passes import autocast, compiled, plainly, recomputed, step
from torch import Tensor, nn

import lpq
from lpq.core import encode_operands, gemm
from lpq.operations.random_seeds import with_one_turn
from lpq.operations.references import gemm_reference

RECIPES = [
    "bf16", "fp8-current", "fp8-delayed", "fp8-row", "mxfp8", "nvfp4", "mxfp8-fwd-nvfp4-bwd", "mxfp8-fwd-bf16-bwd",
    "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16",
]  # fmt: skip
"""One of each kind: ordinary matrices, statistics of all, of rows and of blocks, states, random bits, and mixtures."""
EVERY = pytest.mark.parametrize("recipe", RECIPES)
NAMED = sorted({*lpq.registry.recipes(), *RECIPES})
COMPILED = ("fp8-delayed", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16")
"""With state, and with random bits and other formats in each product; the conformance kit compiles every format."""


def layer(recipe: str | None, *sizes: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    return lpq.nn.Linear(*(sizes or (48, 32)), dtype=dtype, recipe=recipe)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("recipe", NAMED)
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
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (3,), dtype=torch.int64)
    multiply = partial(gemm, dtype=dtype)
    if "eden" in recipe:  # a pass knows that its operands are rotated alike, and gemm does not
        seeds, multiply = with_one_turn(seeds, None), partial(gemm_reference, bias=None, dtype=dtype)
    measured = recipe == "nvfp4-eden-delayed"  # as it is in a first step
    states = [None if measured else q.new_state() or None for q in (r.x, r.w, r.dy)]
    tensors = zip((r.x, r.w, r.dy), (x, module.weight.detach(), dy), states, seeds, strict=True)
    ex, ew, edy = (encode_operands(q, t, state=state, seed=seed) for q, t, state, seed in tensors)
    assert torch.equal(y, gemm(ex.row, ew.row, bias=module.bias.detach(), dtype=dtype))
    assert torch.equal(leaf.grad, multiply(edy.row, ew.col))
    assert torch.equal(module.weight.grad, multiply(edy.col, ex.col))
    assert torch.equal(module.bias.grad, dy.sum(0))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("recipe", ["fp8-delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(
    ("sizes", "rows"),
    [((32, 0), (4,)), ((32, 0), (2, 3)), ((32, 0), ()), ((32, 0), (0,)), ((0, 32), (4,)), ((0, 0), (2, 3)),
     ((32, 32), (0,)), ((32, 32), (2, 0))],
)  # fmt: skip
def test_a_layer_without_elements_is_nn_linear(recipe: str, sizes: tuple[int, int], rows: tuple[int, ...]) -> None:
    """Nothing is rounded where the weight, or the input, has no elements. torch's reshape does not infer rows of 0."""
    plain, x = nn.Linear(*sizes), drawn(*rows, sizes[0])
    ours = lpq.convert(copy.deepcopy(plain), recipe, include="all")
    assert isinstance(ours, lpq.nn.Linear)
    assert equal(step(plain, x), step(ours, x)[:4])  # and not the states behind the gradients
    stored = lpq.convert(copy.deepcopy(plain), recipe, include="all", weights="quantized")
    assert 0 in rows or "0.00 of bf16" in str(lpq.report(stored))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_unquantized_recipe_is_nn_linear_bit_for_bit(dtype: torch.dtype, bias: bool) -> None:
    plain, x = nn.Linear(48, 32, bias=bias, dtype=dtype), drawn(2, 5, 48, dtype=dtype)
    ours = lpq.convert(copy.deepcopy(plain), "identity")
    assert isinstance(ours, lpq.nn.Linear)
    assert equal(step(plain, x), step(ours, x))
    assert not equal(step(plain, x), step(lpq.convert(ours, "mxfp8"), x))
    if dtype is torch.float32:
        found = step(lpq.convert(ours, "bf16"), x, autocast)
        assert found[0].dtype == torch.bfloat16
        assert equal(found, step(plain, x, autocast))


@EVERY
def test_autocast_gives_the_autocast_dtype_and_parameter_gradients(recipe: str) -> None:
    y, *gradients = step(layer(recipe), drawn(6, 48), autocast)[:4]
    assert y.dtype == torch.bfloat16
    assert [t.dtype for t in gradients] == [torch.float32] * 3
    assert y.shape == (6, 32)


@pytest.mark.parametrize(
    ("recipe", "x_bytes", "w_bytes"),
    [
        ("bf16", 2, 0), ("fp8-current", 1, 0), ("fp8-delayed", 1, 1), ("fp8-row", 1, 1), ("fp8-block", 1 + 4 / 128, 1),
        ("mxfp8", 1 + 1 / 32, 1 + 1 / 32), ("nvfp4", 0.5 + 1 / 16, 0.5 + 1 / 256),
        ("fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", 2, 0.5 + 1 / 256), ("mxfp8-fwd-bf16-bwd", 2, 0),
    ],
)  # fmt: skip
def test_backward_holds_the_encoded_operands_and_nothing_else(recipe: str, x_bytes: float, w_bytes: float) -> None:
    module, x = layer(recipe, 256, 512, dtype=torch.bfloat16), torch.randn(1024, 256).bfloat16().requires_grad_()
    _, held = kept_for_backward(lambda: module(x), module.parameters())
    expected = 1024 * 256 * x_bytes + 512 * 256 * w_bytes
    assert expected <= held <= expected + 4096 + 4 * 256  # a few scalars, and one scale a row for fp8-row


@EVERY
def test_checkpointing_gives_the_same_gradients(recipe: str) -> None:
    plain = nn.Sequential(layer(recipe), nn.ReLU(), layer(recipe, 32, 16))
    again = copy.deepcopy(plain)
    for number in range(3):
        x = drawn(24, 48) * (1 + number)
        assert equal(step(again, x, recomputed), step(plain, x))


def test_compiled_without_a_break_is_bitwise_eager_for_any_batch_and_with_held_weights() -> None:
    torch._dynamo.reset()
    sizes = itertools.pairwise((48, 32, 24))
    eager = nn.Sequential(*(layer(recipe, *size) for recipe, size in zip(COMPILED, sizes, strict=True)))
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for tokens in (24, 8, 7):  # the second is another size: from there on it may be any
        assert equal(step(module, drawn(tokens, 48), lambda _, x: compiled(x)), step(eager, drawn(tokens, 48)))
    with lpq.hold_weights(eager), lpq.hold_weights(module):
        found = []
        for run in (eager, compiled):
            torch.manual_seed(0)
            found.append(run(drawn(7, 48)))
        assert torch.equal(*found)


def test_compiled_where_the_number_of_rows_is_in_the_data() -> None:
    """As of experts, which take the tokens that are routed to them: with scales of blocks alone, and with scales of the
    whole, rotated and rounded with random bits."""
    torch._dynamo.reset()
    eager = nn.ModuleList(map(layer, ("fp8-block", "nvfp4")))

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
    a, b = step(layer(recipe), drawn(4, 6, 48)), step(layer(recipe), drawn(24, 48))
    assert a[0].shape == (4, 6, 32)
    assert equal([a[0].flatten(0, 1), a[1].flatten(0, 1), *a[2:]], b)
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


def test_a_weight_stored_quantized_gives_the_same_products_compiled_too() -> None:
    recipe = "fprop=mxfp8, dgrad=fp8(), wgrad=bf16"
    eager, stored, x = layer(recipe), layer(recipe), drawn(24, 48)
    stored.weight = nn.Parameter(stored.recipe.w.quantize(stored.weight.detach()))
    expected = step(eager, x)
    for run in (plainly, compiled):
        assert equal(step(stored, x, run), expected)
    other = layer("fp8-row")
    other.weight = stored.weight
    with pytest.raises(ValueError, match=r"and the recipe wants .*: use one with w="):
        other(x)


def test_autocast_does_not_reach_into_the_products() -> None:
    for recipe in COMPILED:
        assert torch.equal(
            step(layer(recipe), drawn(24, 48), autocast)[0], step(layer(recipe), drawn(24, 48))[0].bfloat16()
        )
    eager = layer(COMPILED[-1])
    again = copy.deepcopy(eager)
    found = step(again, drawn(24, 48), lambda module, x: autocast(partial(compiled, module), x))
    assert equal(step(eager, drawn(24, 48), autocast), found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["bf16", "identity", "fprop=mxfp8, dgrad=identity, wgrad=bf16", "nvfp4"])
def test_autocast_does_not_reach_into_the_products_of_backward(recipe: str, dtype: torch.dtype) -> None:
    """It is on where backward is called inside of it, and would round operands that are ordinary matrices."""
    modules = layer(recipe), layer(recipe)
    for module, casts in zip(modules, (True, False), strict=True):
        x = drawn(24, 48).requires_grad_()
        torch.manual_seed(3)
        y = module(x)
        with torch.autocast("cpu", dtype, enabled=casts):
            y.backward(torch.full_like(y, 1 / 3))
        module.of_x = x.grad
    mine, theirs = ([module.of_x, *(p.grad for p in module.parameters())] for module in modules)
    assert equal(mine, theirs)


def test_a_product_of_ordinary_matrices_is_not_rounded_by_autocast() -> None:
    a, b = (lpq.quantizer("identity").quantize(drawn(rows, 48)).row for rows in (24, 32))
    product = lpq.gemm(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lpq.gemm(a, b), product)
        assert not torch.equal(a.data @ b.data.t(), product)  # control


def test_a_checkpoint_without_the_state_starts_it_afresh() -> None:
    module = layer("fp8-delayed")
    module(torch.randn(8, 48)).sum().backward()
    assert module.x_amax_history.any()
    module.load_state_dict(nn.Linear(48, 32).state_dict())
    assert not any(b.any() for b in module.buffers())


def test_a_checkpoint_in_several_files_loads_the_states_of_all_layers() -> None:
    """One by one, as Hugging Face's Trainer does. A layer that a file does not name stays as it is, its states too."""
    first, second = (nn.Sequential(layer("fp8-delayed"), nn.ReLU(), layer("fp8-delayed", 32, 48)) for _ in range(2))
    first(torch.randn(8, 48)).sum().backward()
    saved = first.state_dict()
    for place in ("0.", "2.", "1."):
        second.load_state_dict({key: value for key, value in saved.items() if key.startswith(place)}, strict=False)
    assert all(torch.equal(value, saved[key]) for key, value in second.state_dict().items())
    assert all(value.any() for key, value in saved.items() if key.endswith("amax_history"))
    second.load_state_dict({"0.bias": saved["0.bias"]}, strict=False)
    assert not second[0].x_amax_history.any(), "an ordinary model's"


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
