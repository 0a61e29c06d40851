"""A gradient that arrives encoded is multiplied as it is: to the bit what a layer makes that encodes it. It is encoded
by no layer again: what a layer cannot take it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from counting import encodings
from support.comparing import equal
from support.modes import Watched
from torch import Tensor, nn

import lpq

ROWS = "x=fp8(scaling=row), w=fp8(scaling=row), dy=hybrid(row=mxfp8, col=mxfp8, col_source=row)"


def backward(y: Tensor, quantizer: Any, **how: Any) -> None:
    if quantizer is not None:
        y.register_hook(partial(quantizer.quantize, **how))
    draw = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=draw).to(y))


MADE_OF_ROW = "x=mxfp8, w=mxfp8, dy=hybrid(row=mxfp8, col=nvfp4, col_source=row)"
OTHER_BLOCKS = "x=bf16, w=bf16, dy=nvfp4(block=16x16)"
RECIPES = (
    "fp8-current", "fp8-row", "mxfp8", "fp8-block", "nvfp4()", "bf16", "fprop=mxfp8, dgrad=nvfp4(), wgrad=bf16",
    "x=mxfp8, w=mxfp8, dy=mxfp8, x.save=input, w.save=weight", MADE_OF_ROW, OTHER_BLOCKS,
)  # fmt: skip


def layer(recipe: str, bias: bool = False) -> Any:
    torch.manual_seed(0)
    made: Any = lpq.convert(nn.Sequential(nn.Linear(64, 96, bias=bias)), recipe)[0]
    return made


def step(module: Any, quantizer: Any = None, scale: float = 1.0, **how: Any) -> list[Tensor | None]:
    """y, dx and dw."""
    module.zero_grad()
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(2, 32, 64, generator=draw).requires_grad_(how.pop("needs_dx", True))
    y = module(x)
    backward(y * scale if quantizer is None else Scaled.apply(y, quantizer, scale, how), None)
    return [y.detach(), x.grad, module.weight.grad]


class Scaled(torch.autograd.Function):
    """Encodes the gradient, scaled."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, quantizer: Any, scale: float, how: Any) -> Tensor:
        ctx.encode = lambda dy: quantizer.quantize(dy * scale, **how)
        return y * scale

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.encode(dy), None, None, None


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_multiplies_it_as_it_is(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound, by way of operators, under autocast and with a frozen weight or input."""
    module = layer(recipe)
    dy, expected = module.recipe.dy, step(module)
    assert equal(step(module, dy), expected)
    assert not equal(step(module, dy, 2.0), expected)
    assert equal(step(module, dy, 2.0), step(module, None, 2.0))
    with Watched():
        assert equal(step(module, dy), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert equal(step(module, dy), step(module))
    assert equal(step(module, dy, needs_dx=False), step(module, needs_dx=False))
    module.weight.requires_grad_(False)
    assert equal(step(module, dy), step(module))
    assert equal(step(module, dy, col=False), step(module))
    made = encodings(monkeypatch)
    module = layer(recipe)  # binds anew, what is noted
    step(module, dy)
    assert (64, 96) not in [encoded.shape for encoded in made]
    step(module)
    assert (64, 96) in [encoded.shape for encoded in made]


def test_its_column_operand_is_derived_where_that_of_the_layer_is() -> None:
    module = layer(MADE_OF_ROW)
    assert equal(step(module, module.recipe.dy, col=False), step(module))
    module = layer(OTHER_BLOCKS)
    for missing in ("row", "col"):
        assert equal(step(module, module.recipe.dy, **{missing: False}), step(module))


@pytest.mark.parametrize(
    ("recipe", "dy", "how", "words"),
    [
        ("mxfp8", "mxfp8", {"col": False}, r"the col operand of this .* is absent .* quantize with col=True"),
        ("mxfp8", "mxfp8", {"row": False}, r"the row operand of this .* is absent .* quantize with row=True"),
        ("mxfp8", "hybrid(row=mxfp8, col=nvfp4)", {}, "its recipe encodes gradients as mxfp8"),
        (MADE_OF_ROW, "hybrid(row=mxfp8, col=nvfp4)", {}, r"its recipe encodes gradients as hybrid\("),
        ("fp8-delayed", "fp8(dtype=e5m2)", {}, "remembers statistics of gradients across steps"),
        ("nvfp4", "nvfp4(rht=true)", {}, "rounds gradients with random bits"),
    ],
)
def test_a_layer_says_why_it_takes_it_not(recipe: str, dy: str, how: dict[str, bool], words: str) -> None:
    module = layer(recipe)
    for mode in (torch.enable_grad(), Watched()):
        with mode, pytest.raises(TypeError, match=rf"layer 0, .* arrived encoded as .*{words}.*as it was before, or"):
            step(module, lpq.quantizer(dy), **how)
        assert module.weight.grad is None
    module = layer("mxfp8", bias=True)
    with pytest.raises(TypeError, match="the gradient of its bias is a sum in high precision"):
        step(module, module.recipe.dy)
    module.bias.requires_grad_(False)
    assert equal(step(module, module.recipe.dy), step(module))


@pytest.mark.starts
def test_compiled_code_refuses_it() -> None:
    """A compiler traces backward for a gradient in high precision."""
    module = layer("mxfp8")
    module.compile(fullgraph=True, backend="aot_eager")
    with pytest.raises(TypeError, match=r"a gradient of \[2, 32, 96\] arrived encoded as mxfp8 at compiled code"):
        step(module, module.recipe.dy)
    assert module.weight.grad is None


@pytest.mark.parametrize("recipe", ["fp8-row", "nvfp4()", "bf16"])
@pytest.mark.parametrize("trains", ["weight", "bias"])
def test_a_layer_refuses_it_by_name(recipe: str, trains: str) -> None:
    """The gradient of the weight would be 4 % off in fp8-row, and 15 % in nvfp4."""
    torch.manual_seed(0)
    net: Any = lpq.convert(nn.Sequential(nn.Linear(64, 96)), recipe)
    net[0].weight.requires_grad_(trains == "weight")
    net[0].bias.requires_grad_(trains == "bias")
    words = r"layer 0, lpq.nn.Linear\(64, 96\): the gradient of its output, \[32, 96\], arrived encoded as .*dequantize"
    for mode in (torch.enable_grad(), Watched()):
        with mode, pytest.raises(TypeError, match=words):
            backward(net(torch.randn(32, 64)), lpq.quantizer("mxfp8"))
        assert net[0].weight.grad is None
        assert net[0].bias.grad is None
    backward(net(torch.randn(32, 64)), None)
    assert getattr(net[0], trains).grad is not None


def test_a_grouped_layer_takes_rows_as_its_recipe_has_them() -> None:
    """It makes the column operand of each group itself."""
    torch.manual_seed(0)
    layer = lpq.nn.GroupedLinear(2, 64, 96, bias=False, recipe=ROWS)
    x = torch.randn(32, 64)
    backward(layer(x, [20, 12]), None)
    expected = layer.weight.grad
    layer.weight.grad = None
    assert layer.recipe is not None
    assert expected is not None
    for dy in (layer.recipe.dy, lpq.quantizer("mxfp8")):
        backward(layer(x, [20, 12]), dy)
        assert layer.weight.grad is not None
        assert torch.equal(layer.weight.grad, expected)
        layer.weight.grad = None
    with pytest.raises(TypeError, match=r"GroupedLinear\(2, 64, 96\): the gradient of its output, .* as mxfp8\(dtype"):
        backward(layer(x, [20, 12]), lpq.quantizer("mxfp8(dtype=e5m2)"))
    with_bias = lpq.nn.GroupedLinear(2, 64, 96, recipe=ROWS)  # whose gradient is a sum in high precision
    with pytest.raises(TypeError, match=r"GroupedLinear\(2, 64, 96\): the gradient of its output"):
        backward(with_bias(x, [20, 12]), layer.recipe.dy)


class Encoded(torch.autograd.Function):
    """Returns its gradient encoded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return lpq.quantizer("mxfp8").quantize(dy)


@pytest.mark.parametrize("has_one", [False, True])
@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_no_leaf_gets_it(has_one: bool, differentiated: bool) -> None:
    leaf = torch.randn(32, 64, requires_grad=True)
    leaf.grad = torch.ones(32, 64) if has_one else None
    with pytest.raises(
        TypeError, match=r"of \[32, 64\] arrived encoded as mxfp8 where autograd keeps it as the \.grad"
    ):
        Encoded.apply(leaf).sum().backward(create_graph=differentiated)
    assert (leaf.grad is not None) == has_one
    assert leaf.grad is None or bool((leaf.grad == 1).all())


@pytest.mark.parametrize("uses", [(True, False), (False, True), (True, True)])
def test_it_is_added_to_no_other(uses: tuple[bool, bool]) -> None:
    h = torch.randn(32, 64, requires_grad=True) * 2
    with pytest.raises(TypeError, match="where autograd adds it to another one: return"):
        sum(Encoded.apply(h).sum() if encoded else h.sum() for encoded in uses).backward()


def test_code_that_knows_it_and_stored_weights_are_left_alone() -> None:
    """Code of a user in a backward may read and add what is encoded; weights may be stored so."""
    x = torch.randn(32, 64, requires_grad=True)
    h = x * 2
    h.register_hook(lambda dy: dy.detach() + 1)
    with pytest.warns(lpq.core.PrecisionWarning):
        Encoded.apply(h).sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 4).all())
    net: Any = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8", weights="quantized")
    found: list[Tensor] = []
    net[0].weight.register_post_accumulate_grad_hook(lambda weight: found.append(weight.detach()))
    net(torch.randn(32, 64)).sum().backward()
    assert len(found) == 1
