"""A weight of which the row operand alone is stored or held: backward makes the column operand of it, with the seed of
the pass, to the bit as a layer does that encodes the weight itself."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.comparing import equal
from support.passes import compiled, plainly, recomputed, watched
from support.small_models import converted
from torch import Tensor

import lpq
from lpq.core import QuantizedTensor
from lpq.operations.derived_operands import made_at_use

EDEN = "nvfp4-eden"
ROUNDED = "x=mxfp8, w=hybrid(row=mxfp8, col=nvfp4(stochastic=true), col_source=row), dy=mxfp8"
"""With signs that the pass draws, and with random bits alone."""


def layer(recipe: str, weights: Any = None) -> Any:
    return converted(recipe, 128, 256, weights=weights)[0]


def x() -> Tensor:
    return torch.randn(128, 128, generator=torch.Generator().manual_seed(3))


def gradients(module: Any, run: Any = plainly, seed: int = 5) -> list[Tensor]:
    torch.manual_seed(seed)
    rows = x().requires_grad_()
    y = run(module, rows)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    assert rows.grad is not None
    return [y.detach(), rows.grad]


@pytest.mark.parametrize("recipe", [EDEN, ROUNDED])
@pytest.mark.parametrize("run", [plainly, watched, recomputed, compiled])
def test_a_stored_weight(recipe: str, run: Any) -> None:
    stored, plain = layer(recipe, "quantized"), layer(recipe)
    assert isinstance(stored.weight, QuantizedTensor)
    assert stored.weight.col is None
    with torch.no_grad():
        plain.weight.copy_(stored.weight.dequantize())
    own = stored.weight.quantizer.quantize(plain.weight.detach(), col=False)
    assert equal(own.row.decode(), stored.weight.row.decode()), "control: the two layers have one weight"
    expected = gradients(plain)
    assert equal(gradients(stored, run), expected)
    again = plainly if run is compiled else run  # each time a compiler takes a second
    assert not torch.equal(gradients(stored, again, seed=6)[1], expected[1]), "each pass draws for itself"


@pytest.mark.parametrize("recipe", [EDEN, ROUNDED])
def test_a_held_weight(recipe: str) -> None:
    """Each pass draws anew for it, as without being held, so that no error of one draw adds up."""
    module = layer(recipe)
    expected = [gradients(module, seed=seed) for seed in (5, 6)]
    with lpq.hold_weights(module):
        found = [gradients(module, seed=seed) for seed in (5, 6)]
    for one, other in zip(found, expected, strict=True):
        assert equal(one, other)
    assert not torch.equal(found[0][1], found[1][1])


def test_experts_that_are_held() -> None:
    torch.manual_seed(0)
    module = lpq.nn.GroupedLinear(3, 128, 256, bias=False, recipe=EDEN)
    found = []
    for hold in (False, True):
        torch.manual_seed(5)
        rows = x().requires_grad_()
        with lpq.hold_weights(module) if hold else nullcontext():
            y = module(rows, [40, 0, 88])
            y.square().sum().backward()
        found.append([y.detach(), rows.grad])
    assert equal(*found)


def test_a_compiler_traces_the_question_whether_a_column_is_made_at_use() -> None:
    """Layers that share out sequences ask it while they are traced: Dynamo took no ``not`` of a tuple of states."""
    torch._dynamo.reset()
    for recipe, expected in ((EDEN, 1), ("nvfp4-eden-delayed", 0)):
        quantizer = lpq.recipe(recipe).x
        asked = torch.compile(lambda x, q=quantizer: x * made_at_use(q), fullgraph=True, backend="eager")
        assert asked(torch.ones(())) == expected
