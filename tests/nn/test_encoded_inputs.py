"""An input that is encoded already is multiplied as it is: to the bit what a layer makes that encodes it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from counting import encodings
from support.comparing import equal
from support.passes import autocast, compiled, recomputed, step, watched
from support.small_models import converted
from torch import Tensor

import lpq
from lpq.core import QuantizedTensor

IN, OUT = 64, 96
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED = "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"
KEEPS = "x=mxfp8, w=mxfp8, dy=mxfp8, x.save=input, w.save=weight"
RECIPES = ("fp8-current", "fp8-row", "mxfp8", "nvfp4", MIXED, KEEPS, "bf16")


def layer(recipe: str, **how: Any) -> Any:
    return converted(recipe, IN, OUT, **how).to(DEVICE)[0]


def given(*shape: int) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(shape or (2, 32, IN), device=DEVICE)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_multiplied_as_it_is(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound, by way of operators, under autocast, in evaluation, recomputed and for a held weight."""
    module, x = layer(recipe), given()
    q, expected = module.recipe.x, step(module, x)
    made = encodings(monkeypatch)
    module = layer(recipe)  # binds anew, what is noted
    found = step(module, q.quantize(x))
    assert all(type(t) is Tensor for t in found), "a gradient is an ordinary tensor"
    assert equal(found, expected)
    again = [OUT] if module.recipe.save_w == "weight" else []
    assert [w.shape[0] for w in made] == [OUT, 64, *again], "the weight, and the gradient that comes back"
    assert not equal(step(module, q.quantize(2 * x)), expected)
    for run in (watched, recomputed):
        assert equal(step(module, q.quantize(x), run), expected)
    assert equal(step(module, q.quantize(x), autocast), step(module, x, autocast))
    with torch.no_grad():
        assert equal([module(q.quantize(x, col=False))], expected[:1]), "backward alone needs the column operand"
        with lpq.hold_weights(module):
            assert equal([module(q.quantize(x))], expected[:1])


@pytest.mark.parametrize("recipe", ["fp8-current", MIXED])
def test_compiled(recipe: str) -> None:
    module, x = layer(recipe), given()
    assert equal(step(module, module.recipe.x.quantize(x), compiled), step(module, x))


def test_compiled_code_names_the_quantizer_that_it_refuses() -> None:
    module = layer("fp8-delayed")
    with pytest.raises(
        (ValueError, RuntimeError), match=r"layer 0, .* with x=fp8\(scaling=delayed\), remembers statistics"
    ):
        step(module, module.recipe.x.quantize(given()), compiled)


def test_random_bits_of_the_weight_and_the_gradient_stay() -> None:
    """Those of the input were drawn when it was encoded. A stored weight is no matter."""
    for module in (layer("x=mxfp8, w=mxfp8, dy=nvfp4(stochastic=true)"), layer("mxfp8", weights="quantized")):
        assert equal(step(module, module.recipe.x.quantize(given())), step(module, given()))
    module = layer("x=nvfp4(stochastic=true), w=mxfp8, dy=mxfp8")
    t = module.recipe.x.quantize(given(), seed=7)
    assert torch.equal(module(t), module(t)), "nothing is drawn for it"


def test_a_missing_operand_is_derived_where_the_format_can() -> None:
    x, module = given(64, IN), layer("x=nvfp4(block=16x16), w=nvfp4(block=16x16), dy=bf16")
    expected = step(module, x)
    for missing in ("row", "col"):
        assert equal(step(module, module.recipe.x.quantize(x, **{missing: False})), expected)
    module = layer("mxfp8")
    for missing in ("row", "col"):
        words = rf"layer 0, .*: its input is encoded already, .* quantize with {missing}=True"
        with pytest.raises(ValueError, match=words):
            module(module.recipe.x.quantize(x, **{missing: False}))
    module.weight.requires_grad_(False)
    module(module.recipe.x.quantize(x, col=False))


PAIR = "hybrid(row=nvfp4, col=mxfp8"


@pytest.mark.parametrize(
    ("recipe", "other", "words"),
    [
        ("mxfp8", "nvfp4", "the row operand of the input is encoded as nvfp4"),
        ("mxfp8", "mxfp8(dtype=e5m2)", "the row operand of the input is encoded as mxfp8(dtype=e5m2)"),
        ("mxfp8", "hybrid(row=mxfp8, col=nvfp4)", "the col operand of the input is encoded as hybrid(row=mxfp8, col="),
        (f"x={PAIR}, col_source=row), w=nvfp4, dy=mxfp8", PAIR + ")", "the col operand of the input is encoded as"),
    ],
)
def test_another_format_is_refused(recipe: str, other: str, words: str) -> None:
    module, t = layer(recipe), lpq.quantizer(other).quantize(given())
    words = re.escape(f"layer 0, lpq.nn.Linear(64, 96): {words}")
    with pytest.raises(ValueError, match=words + ".*encodes inputs as .*pass the tensor before"):
        module(t)
    with pytest.raises(ValueError, match="its last dimension must be 64"):
        module(lpq.quantizer("mxfp8").quantize(given(8, 32)))
    with pytest.raises(ValueError, match=r"layer 0, .*: the input is encoded .* remembers .*pass the tensor before"):
        layer("fp8-delayed")(t)


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
    flat = module.recipe.x.quantize(x)
    assert equal(step(module, flat.view(2, 32, IN)), step(module, x.view(2, 32, IN)))
    assert isinstance(flat[:32], QuantizedTensor)
    assert equal(step(module, flat[:32]), step(module, x[:32]))
    module.recipe = None
    with pytest.warns(lpq.core.PrecisionWarning):
        assert torch.equal(module(flat), module(flat.dequantize()))
