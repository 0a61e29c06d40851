"""An input that is encoded already is multiplied as it is: to the bit what a layer makes that encodes it."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from counting import encodings
from support.comparing import equal
from support.modes import Watched
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lpq
from lpq.core import QuantizedTensor

ROWS, IN, OUT = (2, 32), 64, 96
MIXED = "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"
KEEPS = "x=mxfp8, w=mxfp8, dy=mxfp8, x.save=input, w.save=weight"
RECIPES = ("fp8-current", "fp8-row", "mxfp8", "nvfp4", MIXED, KEEPS, "bf16")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Run = tuple[Tensor, ...]


def layer(recipe: Any) -> Any:
    torch.manual_seed(1)
    return lpq.convert(nn.Sequential(nn.Linear(IN, OUT)), recipe).to(DEVICE)[0]


def given(*shape: int) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(*(shape or (*ROWS, IN)), device=DEVICE)


def step(module: Any, x: Tensor, of: Any = None) -> Run:
    """y, dx, dw and db."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    torch.manual_seed(3)
    y = (module if of is None else of)(x)
    y.backward(torch.sin(y.detach()))
    grads = [x.grad, module.weight.grad, module.bias.grad]
    assert all(type(g) is Tensor for g in grads), "a gradient is an ordinary tensor"
    return y.detach(), *[g.clone() for g in grads if g is not None]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_multiplied_as_it_is(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound, by way of operators, under autocast, in evaluation, recomputed and for a stored weight."""
    module, x = layer(recipe), given()
    q = module.recipe.x
    expected = step(module, x)
    made = encodings(monkeypatch)
    module = layer(recipe)  # binds anew, what is noted
    assert equal(step(module, q.quantize(x)), expected)
    again = [OUT] if module.recipe.save_w == "weight" else []
    assert [w.shape[0] for w in made] == [OUT, 64, *again], "the weight, and the gradient that comes back"
    assert not equal(step(module, q.quantize(2 * x)), expected)
    with Watched():
        assert equal(step(module, q.quantize(x)), expected)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert equal(step(module, q.quantize(x)), step(module, x))
    assert equal(step(module, q.quantize(x), lambda t: checkpoint(module, t, use_reentrant=False)), expected)
    with torch.no_grad():
        assert torch.equal(module(q.quantize(x, col=False)), expected[0]), "backward alone needs the column operand"
        lpq.hold_weights(module).__enter__()
        assert torch.equal(module(q.quantize(x)), expected[0])


def test_a_stored_weight_and_an_encoded_input() -> None:
    torch.manual_seed(1)
    net: Any = lpq.convert(nn.Sequential(nn.Linear(IN, OUT)), "mxfp8", weights="quantized").to(DEVICE)
    x, module = given(), net[0]
    assert equal(step(module, module.recipe.x.quantize(x)), step(module, x))


def test_random_bits_of_the_weight_and_the_gradient_stay() -> None:
    """Those of the input were drawn when it was encoded."""
    module, x = layer("x=mxfp8, w=mxfp8, dy=nvfp4(stochastic=true)"), given()
    assert equal(step(module, module.recipe.x.quantize(x)), step(module, x))
    module = layer("x=nvfp4(stochastic=true), w=mxfp8, dy=mxfp8")
    t = module.recipe.x.quantize(x, seed=7)
    torch.manual_seed(4)
    y = module(t)
    assert torch.equal(y, module(t)), "nothing is drawn for it"


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8", MIXED])
def test_compiled(recipe: str) -> None:
    module, x = layer(recipe), given()
    whole = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert equal(step(module, module.recipe.x.quantize(x), whole), step(module, x))


def test_a_missing_operand_is_derived_where_the_format_can() -> None:
    x, module = given(64, IN), layer("x=nvfp4(block=16x16), w=nvfp4(block=16x16), dy=bf16")
    q, expected = module.recipe.x, step(module, x)
    for missing in ("row", "col"):
        assert equal(step(module, q.quantize(x, **{missing: False})), expected)
    module = layer("mxfp8")
    with pytest.raises(ValueError, match=r"layer 0, .*: its input is encoded already, .* quantize with col=True"):
        module(module.recipe.x.quantize(x, col=False))
    with pytest.raises(ValueError, match="quantize with row=True"):
        module(module.recipe.x.quantize(x, row=False))
    module.weight.requires_grad_(False)
    module(module.recipe.x.quantize(x, col=False))


@pytest.mark.parametrize("other", ["nvfp4", "mxfp8(dtype=e5m2)", "hybrid(row=mxfp8, col=nvfp4)"])
def test_another_format_is_refused(other: str) -> None:
    module, t = layer("mxfp8"), lpq.quantizer(other).quantize(given())
    side = "col" if "hybrid" in other else "row"
    words = f"layer 0, lpq.nn.Linear(64, 96): the {side} operand of the input is encoded as {other}"
    with pytest.raises(ValueError, match=re.escape(words) + ".*encodes inputs as mxfp8.*pass the tensor before"):
        module(t)
    with pytest.raises(ValueError, match="its last dimension must be 64"):
        module(lpq.quantizer("mxfp8").quantize(given(8, 32)))


def test_a_column_operand_of_another_source_is_refused() -> None:
    pair = "hybrid(row=nvfp4, col=mxfp8"
    module = layer(f"x={pair}, col_source=row), w=nvfp4, dy=mxfp8")
    with pytest.raises(ValueError, match="the col operand of the input is encoded as"):
        module(lpq.quantizer(pair + ")").quantize(given()))


def test_a_recipe_that_remembers_inputs_is_refused() -> None:
    module = layer("fp8-delayed")
    with pytest.raises(ValueError, match=r"layer 0, .*: the input is encoded .* remembers .*pass the tensor before"):
        module(lpq.quantizer("fp8").quantize(given()))


def test_a_write_between_forward_and_backward_is_refused() -> None:
    module = layer("mxfp8")
    t = module.recipe.x.quantize(given())
    y = module(t)
    t.copy_(given() + 1)
    with pytest.raises(RuntimeError, match=r"an input of \[2, 32, 64\] that is stored quantized was written to"):
        y.sum().backward()
    module.weight.requires_grad_(False)  # then nothing is needed of it
    z = module(t.requires_grad_())
    with torch.no_grad():
        t.copy_(given())
    z.sum().backward()


def test_views_and_a_layer_without_recipe() -> None:
    """A view on whole blocks is encoded; a layer in high precision takes what it decodes to."""
    module, x = layer("mxfp8"), given(64, IN)
    q = module.recipe.x
    flat = q.quantize(x)
    assert equal(step(module, flat.view(2, 32, IN)), step(module, x.view(2, 32, IN)))
    part = flat[:32]
    assert isinstance(part, QuantizedTensor)
    assert equal(step(module, part), step(module, x[:32]))
    plain = copy.deepcopy(module)
    plain.recipe = None
    with pytest.warns(lpq.core.PrecisionWarning):
        assert torch.equal(plain(flat), plain(flat.dequantize()))
