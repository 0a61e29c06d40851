"""lpq.nn.GroupedLinear: to the bit what separate lpq.nn.Linear compute, each of its own rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate, cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.comparing import equal
from support.modes import Watched
from support.passes import Run, recomputed, reentrant, step
from torch import Tensor, nn

import lpq
from lpq.nn import GroupedLinear, Linear
from lpq.nn.functional import grouped_linear
from lpq.operations import groups

RECIPES = [
    "bf16", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "nvfp4-fwd-mxfp8-bwd",
    "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16",
]  # fmt: skip
"""A recipe of each kind; recipes that remember statistics across steps are refused."""
NAMED = {name for name in lpq.registry.recipes() if "delayed" not in name}
"""Those that experts take."""
K, N = 48, 32
BEHIND = 3
"""Rows behind the last group."""


def layer(recipe: str | None, groups: int, dtype: torch.dtype = torch.float32, **how: Any) -> GroupedLinear:
    torch.manual_seed(3)
    return GroupedLinear(groups, K, N, recipe=recipe, dtype=dtype, **how)


def data(counts: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The input and the gradient of the output. Groups differ in size by powers of ten; what is behind them is NaN."""
    torch.manual_seed(7)
    rows = sum(counts)
    scale = torch.cat([torch.full((n, 1), 10.0**i) for i, n in enumerate(counts)] or [torch.ones(0, 1)])
    tail = torch.full((BEHIND, 1), torch.nan)
    made = [torch.cat([torch.randn(rows, of) * scale, tail.expand(-1, of)]).to(dtype) for of in (K, N)]
    return made[0], made[1]


def ends(counts: Sequence[int]) -> Tensor:
    return torch.tensor([*accumulate(counts)], dtype=torch.int32)


def run(forward: Callable[..., Tensor], module: Any, x: Tensor, dy: Tensor, *rest: Any) -> Any:
    """y, dx and the gradients of the parameters."""
    found = step(module, x, lambda _, x: forward(x, *rest), dy)[: 2 + len([*module.parameters()])]
    return [t for t in found if t is not None]


def separately(module: GroupedLinear, x: Tensor, dy: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """The same of one Linear for each group, called one after another."""
    layers = []
    for i in range(module.num_groups):
        made = Linear(K, N, module.bias is not None, dtype=module.weight.dtype, recipe=module.recipe)
        made.weight = nn.Parameter(module.weight.detach()[i].clone())
        if module.bias is not None:
            made.bias = nn.Parameter(module.bias.detach()[i].clone())
        for name, value in made.static_values().items():
            value.copy_(module.static_values()[name][i])
        layers.append(made)
    torch.manual_seed(3)
    xs = [part.clone().requires_grad_() for part in x.split([*counts, BEHIND])[:-1]]
    ys = [each(part) for each, part in zip(layers, xs, strict=True)]
    for y, part in zip(ys, dy.split([*counts, BEHIND]), strict=False):
        y.backward(part)
    zero = [torch.zeros(BEHIND, of, dtype=x.dtype) for of in (N, K)]
    found = [torch.cat([*[y.detach() for y in ys], zero[0]]), torch.cat([*[part.grad for part in xs], zero[1]])]
    names = ["weight", "bias"] if module.bias is not None else ["weight"]
    return found + [torch.stack([getattr(each, name).grad for each in layers]) for name in names]


@pytest.mark.parametrize(
    ("recipe", "dtype"), [*zip(sorted(NAMED | {*RECIPES}), cycle((torch.float32, torch.bfloat16)))]
)
def test_it_is_separate_linears_bit_for_bit(recipe: str, dtype: torch.dtype) -> None:
    """With a bias in bf16, and without in fp32."""
    bias = dtype is torch.bfloat16
    counts = [0, 5, 40, 0, 17, 0]
    module = layer(recipe, len(counts), dtype, bias=bias)
    x, dy = data(counts, dtype)
    expected = separately(module, x, dy, counts)
    assert equal(run(module, module, x, dy, ends(counts)), expected)
    assert equal(run(module, module, x, dy, counts), expected), "counts in place of ends"
    assert expected[0].isfinite().all()
    assert not any(expected[2][empty].any() for empty in (0, 3, 5))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0, 0, 1, 15, 16, 33]), min_size=1, max_size=4))
@pytest.mark.parametrize("recipe", ["fp8-block", "nvfp4"])
def test_any_counts(recipe: str, counts: list[int]) -> None:
    module = layer(recipe, len(counts), bias=False)
    x, dy = data(counts)
    assert equal(run(module, module, x, dy, ends(counts)), separately(module, x, dy, counts))


STATIC = [
    "x=fp8(static=true), w=fp8(static=true), dy=fp8(dtype=e5m2)",
    "x=nvfp4(rht=true, static=true), w=nvfp4(block=16x16, static=true), dy=nvfp4(rht=true)",
    "fprop=nvfp4(static=true), dgrad=mxfp8, wgrad=fp8(static=true), x.save=input",
]


def static_layer(recipe: str, groups: int, **how: Any) -> GroupedLinear:
    """With other values for each group, from numbers that clamp to some that waste most of the range."""
    module = layer(recipe, groups, **how)
    for name, value in module.static_values().items():
        value.copy_((2.0 if name[0] == "x" else 0.1) * 3.0 ** torch.arange(groups))
    return module


@pytest.mark.parametrize("recipe", STATIC)
def test_static_scales_of_groups_are_those_of_separate_linears(recipe: str) -> None:
    """Compiled, too, and of held weights. Controls: the values of another group, and dynamic ones, change it."""
    counts = [0, 5, 40, 0, 17]
    module = static_layer(recipe, len(counts))
    x, dy = data(counts)
    expected = separately(module, x, dy, counts)
    assert equal(run(module, module, x, dy, counts), expected)
    if recipe == STATIC[2]:
        whole = torch.compile(module, backend="aot_eager", fullgraph=True)
        assert equal(run(whole, module, x, dy, ends(counts)), expected)
    with torch.no_grad(), lpq.hold_weights(module):
        assert torch.equal(module(x, counts), expected[0])
    for value in module.static_values().values():
        value.copy_(value.roll(1))
    module.passes.forget()
    assert not torch.equal(run(module, module, x, dy, counts)[0], expected[0])
    module.recipe = recipe.replace(", static=true", "").replace("(static=true)", "()")
    assert not torch.equal(run(module, module, x, dy, counts)[0], expected[0])
    assert not module.static_values()


def test_groups_that_shared_statistics_would_be_noticed() -> None:
    counts = [20, 20]
    module = layer("fp8-current", 2, bias=False)
    x, dy = data(counts)
    with torch.no_grad():
        module.weight[1] = module.weight[0]
    one = Linear(K, N, bias=False, recipe="fp8-current")
    one.weight = nn.Parameter(module.weight.detach()[0].clone())
    grouped, together = run(module, module, x, dy, counts)[0][:40], one(x[:40]).detach()
    assert torch.equal(grouped[20:], together[20:]), "the larger group has the amax of both"
    assert not torch.equal(grouped[:20], together[:20])


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-eden", RECIPES[-1]])
def test_compiled_in_one_graph_it_is_the_layer(recipe: str) -> None:
    torch._dynamo.reset()
    module, counts = layer(recipe, 3), [7, 0, 30]
    x, dy = data(counts)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found, expected = run(compiled, module, x, dy, ends(counts)), run(module, module, x, dy, ends(counts))
    assert equal(found, expected)
    assert not found[0][37:].any()


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4", "mxfp8-fwd-nvfp4-bwd"])
@pytest.mark.parametrize("again", [recomputed, reentrant])
def test_activation_checkpointing_computes_the_same(recipe: str, again: Run) -> None:
    module, counts = layer(recipe, 2), [9, 20]
    x, dy = data(counts)
    found = run(lambda x: again(lambda x: module(x, ends(counts)), x), module, x, dy)
    assert equal(found, run(module, module, x, dy, ends(counts)))


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
def test_saving_the_input_and_the_weight_computes_the_same(recipe: str) -> None:
    counts = [9, 20]
    usual = layer(recipe, 2)
    saving = layer(f"fprop={recipe}, dgrad={recipe}, wgrad={recipe}, x.save=input, w.save=weight", 2)
    x, dy = data(counts)
    assert equal(run(saving, saving, x, dy, counts), run(usual, usual, x, dy, counts))


@pytest.mark.parametrize(
    "recipe", ["fp8-current", "nvfp4", STATIC[2], "fprop=nvfp4, dgrad=nvfp4, wgrad=fp8(), x.save=input, w.save=weight"]
)
@pytest.mark.parametrize("forward_too", [False, True])
def test_where_a_mode_watches_it_computes_the_same(recipe: str, forward_too: bool) -> None:
    """Backward alone, too, whose step is bound anew. Control: in other groups the numbers are others."""
    counts, module = [0, 9, 20], static_layer(recipe, 3)
    x, dy = data(counts)
    expected = run(module, module, x, dy, ends(counts))

    def by_operators(counts: list[int]) -> list[Tensor]:
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        with Watched() if forward_too else nullcontext():
            y = module(leaf, ends(counts))
        with Watched():
            return [y.detach(), *torch.autograd.grad(y, (leaf, *module.parameters()), dy)]

    assert equal(by_operators(counts), expected)
    assert not equal(by_operators([0, 10, 19]), expected)


def test_gradients_accumulate() -> None:
    counts, into = [9, 20], layer("fp8-current", 2, torch.bfloat16)
    usual, (x, dy) = copy.deepcopy(into), data(counts, torch.bfloat16)
    into.model.accumulate = "main_grad"
    into.weight.main_grad = torch.zeros(into.weight.shape)
    for _ in range(2):
        usual(x, counts).backward(dy)
        into(x, counts).backward(dy)
    once = run(usual, usual, x, dy, counts)[2].float()
    assert into.weight.grad is None
    assert torch.allclose(into.weight.main_grad, 2 * once, rtol=1e-2)


def test_a_part_of_the_gradients() -> None:
    counts, module = [9, 20], layer("mxfp8", 2)
    x, dy = data(counts)
    full = [t.clone() for t in run(module, module, x, dy, counts)]
    module(x, counts).backward(dy)
    assert torch.equal(module.weight.grad, 2 * full[2])
    module.weight.requires_grad_(False)
    assert equal(run(module, module, x, dy, counts)[:2], full[:2])
    with torch.no_grad():
        assert torch.equal(module(x, counts), full[0])


@pytest.mark.parametrize("at_once", [False, True], ids=["group by group", "at once"])
@pytest.mark.parametrize(
    "x", ["row=fp8(scaling=row), col=nvfp4(rht=true, stochastic=true)", "row=mxfp8, col=fp8", "row=mxfp8, col=identity"]
)
def test_rows_that_are_encoded_already(x: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself; the column operand of a group is made of the rows that are in it. A GPU does it at once."""
    monkeypatch.setattr(groups, "at_once", lambda rows, offs: at_once)
    counts, col = [0, 5, 40, 0, 17], x.partition("col=")[2]
    recipe = f"x=hybrid({x}, col_source=row), w=mxfp8(), dy=hybrid(row=mxfp8, col={col})"
    module, (rows, dy) = layer(recipe, len(counts), torch.bfloat16), data(counts, torch.bfloat16)
    expected = run(module, module, rows, dy, ends(counts))
    torch.manual_seed(3)
    found = run(module, module, module.recipe.x.quantize(rows, col=False), dy, ends(counts))
    assert type(found[1]) is Tensor
    assert equal(found, expected)


def test_the_function_is_the_module() -> None:
    counts, module = [9, 20], layer("mxfp8", 2)
    x, _ = data(counts)
    assert torch.equal(grouped_linear(x, module.weight, counts, "mxfp8", module.bias), module(x, counts))
    stored = lpq.quantizer("mxfp8").quantize(module.weight.detach(), stack=True)
    assert torch.equal(grouped_linear(x, stored, ends(counts), "mxfp8", module.bias), module(x, counts))


def test_autocast_gives_its_dtype() -> None:
    counts, module = [9, 20], layer("mxfp8", 2)
    x, _ = data(counts)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, counts)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, module(x, counts).bfloat16())


def test_without_a_recipe_it_is_in_high_precision() -> None:
    counts, module = [0, 9, 20], layer(None, 3)
    x, dy = data(counts)
    found = run(module, module, x, dy, counts)
    module.recipe = "identity"
    assert equal(found, run(module, module, x, dy, counts))
    wanted = torch.cat([x[:9] @ module.weight[1].t() + module.bias[1], x[9:29] @ module.weight[2].t() + module.bias[2]])
    torch.testing.assert_close(found[0][:29], wanted.detach())


def test_the_state_dict_is_the_parameters() -> None:
    module = layer("mxfp8", 2)
    assert {name: [*p.shape] for name, p in module.state_dict().items()} == {"weight": [2, N, K], "bias": [2, N]}
    other = GroupedLinear(2, K, N, recipe="nvfp4")
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.weight, module.weight)
    assert repr(module) == "GroupedLinear(num_groups=2, in_features=48, out_features=32, bias=True, recipe=mxfp8)"


@pytest.mark.parametrize(
    ("counts", "error", "words"), [
        (torch.tensor([3, 5]), TypeError, "int32"), (torch.tensor([3], dtype=torch.int32), ValueError, "2 groups"),
        (torch.tensor([5, 3], dtype=torch.int32), ValueError, "grow"),
        (torch.tensor([3, 99], dtype=torch.int32), ValueError, "99"), ([3, 99], ValueError, "102"),
        ([3, -1], ValueError, "-1"), ([3], ValueError, "2 groups"), ([3.0, 5.0], ValueError, "as an int"),
        (8, TypeError, "offs is a int: pass where each group ends"), (None, TypeError, "offs is a NoneType"),
    ]
)  # fmt: skip
def test_offsets_that_make_no_sense_are_refused(counts: Any, error: type[Exception], words: str) -> None:
    module = layer("mxfp8", 2)
    with pytest.raises(error, match=words):
        module(torch.randn(8, K), counts)


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8-current"])
def test_without_groups_all_rows_are_zero(recipe: str | None) -> None:
    module = GroupedLinear(0, K, N, recipe=recipe)
    y, dx, *gradients = run(module, module, torch.randn(3, K), torch.randn(3, N), torch.zeros(0, dtype=torch.int32))
    assert not y.any()
    assert not dx.any()
    assert [list(g.shape) for g in gradients] == [[0, N, K], [0, N]]


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8-current"])
def test_shapes_are_inferred_on_the_meta_device(recipe: str | None) -> None:
    with torch.device("meta"):
        module, x = layer(recipe, 2), torch.randn(8, K, requires_grad=True)
        y = module(x, torch.empty(2, dtype=torch.int32))
        y.sum().backward()
    assert [*y.shape] == [8, N]
    assert module.weight.grad.shape == module.weight.shape


def test_converting_a_model_gives_it_a_recipe_and_counts_it() -> None:
    model = nn.Sequential(nn.Linear(64, 64), GroupedLinear(4, 64, 64, recipe=None))
    report = lpq.report(lpq.convert(model, "mxfp8"))
    assert [entry.kind for entry in report.converted] == ["Linear", "GroupedLinear"]
    assert model[1].recipe == lpq.recipe("mxfp8")
    assert report.coverage.share == report.coverage.work == 1.0
    assert report.coverage.total == 5 * 64 * 64, "the bias, [4, 64], is no matrix"
    with pytest.raises(lpq.recipes.RecipeError, match="1 cannot have the recipe fp8-delayed: it remembers"):
        lpq.convert(model, "fp8-delayed")
    assert model[0].recipe == lpq.recipe("mxfp8"), "nothing is changed"


ENCODED = "its input is encoded already, .* made of its row"
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a recipe that remembers": (lambda: layer("fp8-delayed", 2), r"\(2, 48, 32\).*remembers statistics across steps"),
    "three dimensions": (lambda: layer("mxfp8", 2)(torch.randn(2, 4, K), [4, 4]), r"the input is \[2, 4, 48\]"),
    "a bias that is none": (
        lambda: grouped_linear(torch.randn(8, K), torch.randn(2, N, K), [4, 4], "mxfp8", True),
        r"grouped_linear: bias is a bool: pass a tensor \[groups, N\]",
    ),
    "a transform": (
        lambda: torch.func.grad(lambda x: layer("mxfp8", 2)(x, [4, 4]).sum())(torch.randn(8, K)),
        r"GroupedLinear\(2, 48, 32\): torch.func's transforms",
    ),
    "encoded, of two sources": (lambda: layer("mxfp8", 2)(encoded_rows(), [4, 4]), rf"\(2, 48, 32\): {ENCODED}"),
    "encoded, a static column operand": (
        lambda: static_layer("x=hybrid(row=mxfp8, col=fp8(static=true), col_source=row), w=mxfp8(), dy=mxfp8()", 2)(
            encoded_rows(), [4, 4]
        ),
        r"fp8\(static=true\) is scaled by what is known of the experts of each rank",
    ),
    "encoded in another format": (
        lambda: layer("x=hybrid(row=fp8(scaling=row), col=fp8, col_source=row), w=fp8(), dy=fp8()", 2)(
            encoded_rows(), [4, 4]
        ),
        "the row operand of the input is encoded as mxfp8, and its recipe encodes",
    ),
}


def encoded_rows() -> Tensor:
    return lpq.quantizer("mxfp8").quantize(torch.randn(8, K))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_built_is_refused_in_words(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        call()
