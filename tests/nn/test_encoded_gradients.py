"""A gradient that arrives encoded is multiplied as it is: to the bit what a layer makes that encodes it. It is encoded
by no layer again: what a layer cannot take it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from counting import encodings
from support.comparing import equal
from support.passes import Run, autocast, plainly, step, watched
from support.small_models import converted
from torch import Tensor

import lpq

MADE_OF_ROW = "x=mxfp8, w=mxfp8, dy=hybrid(row=mxfp8, col=nvfp4, col_source=row)"
OTHER_BLOCKS = "x=bf16, w=bf16, dy=nvfp4(block=16x16)"
ROWS = "x=fp8(scaling=row), w=fp8(scaling=row), dy=hybrid(row=mxfp8, col=mxfp8, col_source=row)"
RECIPES = (
    "fp8-current", "fp8-row", "mxfp8", "fp8-block", "nvfp4()", "bf16", "fprop=mxfp8, dgrad=nvfp4(), wgrad=bf16",
    "x=mxfp8, w=mxfp8, dy=mxfp8, x.save=input, w.save=weight", MADE_OF_ROW, OTHER_BLOCKS,
)  # fmt: skip
DY = torch.randn(2, 32, 96, generator=torch.Generator().manual_seed(1))


def layer(recipe: str, bias: bool = False) -> Any:
    return converted(recipe, 64, 96, bias=bias)[0]


class Encoded(torch.autograd.Function):
    """Encodes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Any, how: Any) -> Tensor:
        ctx.encode = partial(quantizer.quantize, **how)
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.encode(dy), None, None


def dy_in(module: Any, q: Any, run: Run = plainly, scale: float = 1.0, needs_dx: bool = True, **how: Any) -> Any:
    """A step whose gradient arrives as this quantizer encodes it."""

    def encoding(module: Any, x: Tensor) -> Tensor:
        y = run(module, x)
        return y if q is None else Encoded.apply(y, q, how)

    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(2))
    y, *gradients = step(module, x, encoding, DY.bfloat16() if run is autocast else DY * scale, needs_dx=needs_dx)
    return [y, *gradients]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_multiplies_it_as_it_is(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound, by way of operators, under autocast and with a frozen weight or input."""
    module = layer(recipe)
    dy, expected = module.recipe.dy, dy_in(module, None)
    assert equal(dy_in(module, dy), expected)
    assert not equal(dy_in(module, dy, scale=2.0), expected)
    assert equal(dy_in(module, dy, scale=2.0), dy_in(module, None, scale=2.0))
    assert equal(dy_in(module, dy, watched), expected)
    assert equal(dy_in(module, dy, autocast), dy_in(module, None, autocast))
    assert equal(dy_in(module, dy, needs_dx=False), dy_in(module, None, needs_dx=False))
    module.weight.requires_grad_(False)
    assert equal(dy_in(module, dy), dy_in(module, None))
    assert equal(dy_in(module, dy, col=False), dy_in(module, None))
    made = encodings(monkeypatch)
    module = layer(recipe)  # binds anew, what is noted
    for quantizer in (dy, None):
        dy_in(module, quantizer)
        assert ((64, 96) in [encoded.shape for encoded in made]) == (quantizer is None)


def test_its_column_operand_is_derived_where_that_of_the_layer_is() -> None:
    for recipe, missing in ((MADE_OF_ROW, "col"), (OTHER_BLOCKS, "row"), (OTHER_BLOCKS, "col")):
        module = layer(recipe)
        assert equal(dy_in(module, module.recipe.dy, **{missing: False}), dy_in(module, None))


@pytest.mark.parametrize(
    ("recipe", "dy", "how", "words"), [
        ("mxfp8", "mxfp8", {"col": False}, r"the col operand of this .* is absent .* quantize with col=True"),
        ("mxfp8", "mxfp8", {"row": False}, r"the row operand of this .* is absent .* quantize with row=True"),
        ("mxfp8", "hybrid(row=mxfp8, col=nvfp4)", {}, "its recipe encodes gradients as mxfp8"),
        (MADE_OF_ROW, "hybrid(row=mxfp8, col=nvfp4)", {}, r"its recipe encodes gradients as hybrid\("),
        ("fp8-delayed", "fp8(dtype=e5m2)", {}, "remembers statistics of gradients across steps"),
        ("nvfp4", "nvfp4(rht=true)", {}, "rounds gradients with random bits"), ("fp8-row", "mxfp8", {}, "dequantize"),
        ("nvfp4()", "mxfp8", {}, "dequantize"), ("bf16", "mxfp8", {}, "dequantize"),
    ]
)  # fmt: skip
def test_a_layer_says_why_it_takes_it_not(recipe: str, dy: str, how: dict[str, bool], words: str) -> None:
    """The gradient of the weight would be 4 % off in fp8-row, and 15 % in nvfp4."""
    module = layer(recipe)
    words = rf"layer 0, lpq.nn.Linear\(64, 96\): .*\[2, 32, 96\], arrived encoded as .*{words}"
    for run in (plainly, watched):
        with pytest.raises(TypeError, match=words):
            dy_in(module, lpq.quantizer(dy), run, **how)
        assert module.weight.grad is None
    module = layer("mxfp8", bias=True)
    with pytest.raises(TypeError, match="the gradient of its bias is a sum in high precision"):
        dy_in(module, module.recipe.dy)
    module.bias.requires_grad_(False)
    assert equal(dy_in(module, module.recipe.dy), dy_in(module, None))


@pytest.mark.parametrize("recipe", ["fp8-row", "nvfp4()", "bf16"])
def test_a_layer_whose_bias_alone_trains_refuses_it_too(recipe: str) -> None:
    module = layer(recipe, bias=True)
    module.weight.requires_grad_(False)
    for run in (plainly, watched):
        with pytest.raises(TypeError, match=r"layer 0, .*, arrived encoded as .*dequantize"):
            dy_in(module, lpq.quantizer("mxfp8"), run)
        assert module.bias.grad is None
    dy_in(module, None)
    assert module.bias.grad is not None


@pytest.mark.starts
def test_compiled_code_refuses_it() -> None:
    """A compiler traces backward for a gradient in high precision."""
    module = layer("mxfp8")
    module.compile(fullgraph=True, backend="aot_eager")
    with pytest.raises(TypeError, match=r"a gradient of \[2, 32, 96\] arrived encoded as mxfp8 at compiled code"):
        dy_in(module, module.recipe.dy)
    assert module.weight.grad is None


def test_a_grouped_layer_takes_rows_as_its_recipe_has_them() -> None:
    """It makes the column operand of each group itself."""
    torch.manual_seed(0)
    layer: Any = lpq.nn.GroupedLinear(2, 64, 96, bias=False, recipe=ROWS)
    x = torch.randn(32, 64)

    def gradient(q: Any, module: Any = layer) -> Tensor:
        return step(module, x, lambda m, x: m(x, [20, 12]) if q is None else Encoded.apply(m(x, [20, 12]), q, {}))[2]

    for dy in (layer.recipe.dy, lpq.quantizer("mxfp8")):
        assert torch.equal(gradient(dy), gradient(None))
    words = r"GroupedLinear\(2, 64, 96\): the gradient of its output"
    with pytest.raises(TypeError, match=words + r", .* as mxfp8\(dtype"):
        gradient(lpq.quantizer("mxfp8(dtype=e5m2)"))
    with pytest.raises(TypeError, match=words):  # the gradient of a bias is a sum in high precision
        gradient(layer.recipe.dy, lpq.nn.GroupedLinear(2, 64, 96, recipe=ROWS))


@pytest.mark.parametrize("has_one", [False, True])
@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_no_leaf_gets_it(has_one: bool, differentiated: bool) -> None:
    leaf = torch.randn(32, 64, requires_grad=True)
    leaf.grad = torch.ones(32, 64) if has_one else None
    y = Encoded.apply(leaf, lpq.quantizer("mxfp8"), {}).sum()
    words = r"of \[32, 64\] arrived encoded as mxfp8 where autograd keeps it as the \.grad"
    with pytest.raises(TypeError, match=words):
        y.backward(create_graph=differentiated)
    assert (leaf.grad is not None) == has_one
    assert leaf.grad is None or bool((leaf.grad == 1).all())


@pytest.mark.parametrize("uses", [(True, False), (False, True), (True, True)])
def test_it_is_added_to_no_other(uses: tuple[bool, bool]) -> None:
    h = torch.randn(32, 64, requires_grad=True) * 2
    y = sum((Encoded.apply(h, lpq.quantizer("mxfp8"), {}) if encoded else h).sum() for encoded in uses)
    with pytest.raises(TypeError, match="where autograd adds it to another one: return"):
        y.backward()


def test_code_that_knows_it_and_stored_weights_are_left_alone() -> None:
    """Code of a user in a backward may read and add what is encoded; weights may be stored so."""
    x = torch.randn(32, 64, requires_grad=True)
    h = x * 2
    h.register_hook(lambda dy: dy.detach() + 1)
    with pytest.warns(lpq.core.PrecisionWarning):
        Encoded.apply(h, lpq.quantizer("mxfp8"), {}).sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 4).all())
    module = converted("mxfp8", 64, 64, weights="quantized")[0]
    found: list[Tensor] = []
    module.weight.register_post_accumulate_grad_hook(lambda weight: found.append(weight.detach()))
    module(torch.randn(32, 64)).sum().backward()
    assert len(found) == 1
