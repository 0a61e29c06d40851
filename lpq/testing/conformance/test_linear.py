"""A linear layer of this format: its three products multiply the decoded operands, and it trains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lpq
from lpq.formats import Quantizer
from lpq.nn import Linear
from lpq.operations import gemm
from lpq.operations.derived_operands import rounds_stochastically
from lpq.operations.states import measures_fresh
from lpq.tensor import QuantizedTensor, quantize
from lpq.testing.expect import equal, relative_error, same, there
from lpq.testing.operands import normal, recipe_of
from lpq.testing.options import Family, only
from lpq.torch_private.compiling import mark_dynamic

M, K, N = 32, 64, 48


def layer_and_data(quantizer: Quantizer) -> tuple[Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = Linear(K, N, recipe=recipe_of(quantizer))
    x = normal(M, K, seed=1).requires_grad_()
    return layer, x, normal(M, N, seed=2)


def operands(quantizer: Quantizer, x: Tensor) -> QuantizedTensor:
    """Encode a tensor as a layer does in its first step."""
    state = None if measures_fresh(quantizer) else quantizer.new_state() or None
    return quantize(quantizer, x.detach(), state=state)


def test_three_gemms_are_products_of_operands(quantizer: Quantizer) -> None:
    """``y``, ``dx`` and ``dw`` are bit for bit the ``gemm`` of their operands: decoded and multiplied."""
    layer, x, dy = layer_and_data(quantizer)
    y = layer(x)
    y.backward(dy)
    gradients = x.grad, layer.weight.grad, layer.bias.grad
    dx, dw, db = (there(gradient, f"{quantizer}: a gradient of a linear layer") for gradient in gradients)
    if rounds_stochastically(quantizer):  # the layer draws its own seeds: compare with what is expected of them
        for name, result, exact in (
            ("y", y.detach() - layer.bias.detach(), x.detach() @ layer.weight.detach().t()),
            ("dx", dx, dy @ layer.weight.detach()),
            ("dw", dw, dy.t() @ x.detach()),
        ):
            error = relative_error(result, exact)
            assert error < 0.5, (
                f"{quantizer}: {name} of a linear layer is off by {error:.3f} of the product in fp32; below 0.5 is "
                "rounding: look at what one operand decodes to, in each direction"
            )
        return
    recipe = there(layer.recipe, "the recipe of a layer that was made with one")
    qx, qw, qdy = operands(recipe.x, x), operands(recipe.w, layer.weight), operands(recipe.dy, dy)
    products = {
        "y": (y.detach(), qx.row, qw.row, layer.bias.detach()),
        "dx": (dx, qdy.row, qw.col, None),
        "dw": (dw, qdy.col, qx.col, None),
    }
    for name, (result, first, second, bias) in products.items():
        a, b = (there(operand, f"{quantizer}: an operand of {name}") for operand in (first, second))
        same(result, gemm(a, b, bias=bias), f"{quantizer}: {name} of a linear layer")
        exact = a.decode().double() @ b.decode().double().t() + (0 if bias is None else bias)
        precision = a.tensors()[0].dtype if a.quantizer.plain and b.quantizer.plain else torch.float32
        allowed = 4 * max(torch.finfo(precision).eps, 1e-6)  # ordinary matrices multiply in their own dtype
        error = relative_error(result, exact)
        assert error < allowed, (
            f"{quantizer}: {name} is off by {error:.1e} of the product of its decoded operands; below {allowed:.1e} "
            "is the order of sums: let kernels for products multiply what decode returns"
        )
    torch.testing.assert_close(db, dy.sum(0), msg=lambda text: f"{quantizer}: the gradient of the bias: {text}")


@pytest.mark.parametrize("shape", [(5, 40, 24), (1, 1, 1), (0, 32, 16), (17, 33, 7)], ids=str)
def test_any_shape(quantizer: Quantizer, shape: tuple[int, int, int]) -> None:
    """Ragged shapes and empty batches go forward and backward, 3-D input too."""
    rows, cols, out = shape
    layer = Linear(cols, out, recipe=recipe_of(quantizer), dtype=torch.bfloat16)
    x = normal(rows, cols, torch.bfloat16).requires_grad_()
    y = layer(x)
    y.float().sum().backward()
    what = f"{quantizer}: a layer of {cols} by {out}, of {rows} rows"
    equal(tuple(y.shape), (rows, out), f"{what}: y")
    dx, dw = there(x.grad, f"{what}: dx"), there(layer.weight.grad, f"{what}: dw")
    equal((dx.shape, dx.dtype), (x.shape, x.dtype), f"{what}: dx")
    assert dw.isfinite().all(), (
        f"{what}: dw has NaN or infinity, of finite values; it must be finite: decode what pads an operand to zeros"
    )
    equal(tuple(layer(x.detach().expand(3, rows, cols)).shape), (3, rows, out), f"{what}: y of a 3-D input")


def test_it_trains(quantizer: Quantizer) -> None:
    """A few steps on a linear task bring the loss well down."""
    losses = train(Linear(K, N, recipe=recipe_of(quantizer)))
    assert losses[-1] < 0.6 * losses[0], (
        f"{quantizer}: the loss of a linear task went from {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} "
        "steps; it must fall below 0.6 of the first: compare y, dx and dw with y, dx and dw in fp32"
    )


def train(layer: Linear, steps: int = 8) -> list[float]:
    with torch.no_grad():
        layer.weight.copy_(normal(N, K) / K**0.5)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.03, weight_decay=0.0)
    x = normal(64, K, seed=1)
    target = x @ normal(K, N, seed=2) / K**0.5
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function'> should not be instantiated")  # Dynamo does
def test_compiled_layer_is_the_layer(family: Family) -> None:
    """Forward and backward in one graph each (``fullgraph=True``) for any number of rows, with the bits of eager
    execution."""
    quantizer = family.default
    results: list[list[Tensor | None]] = []
    for compiled in (False, True):
        layer, x, dy = layer_and_data(quantizer)
        torch.compiler.reset()
        mark_dynamic(x, 0)  # and an error if a number of rows in the graph equals the rows of x
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        torch.manual_seed(3)
        results.append([])
        for rows in (M, M - 8):
            batch = x if rows == M else x.detach()[:rows].requires_grad_()
            layer.zero_grad()
            y = run(batch)
            y.backward(dy[:rows])
            results[-1] += [y.detach(), batch.grad, layer.weight.grad]
    names = (f"{name} of a compiled layer, of {rows} rows" for rows in (M, M - 8) for name in ("y", "dx", "dw"))
    for eager, traced, name in zip(*results, names, strict=True):
        if not rounds_stochastically(quantizer):
            what = f"{quantizer}: {name}"
            same(there(traced, what), there(eager, what), what)


@only(lambda q: not rounds_stochastically(q) and not q.new_state(), "gives a weight the same bytes in any step")
def test_quantized_weights_work(quantizer: Quantizer) -> None:
    """A layer whose weight is stored quantized gives what the layer that encodes it gives."""
    layer, x, _ = layer_and_data(quantizer)
    expected = layer(x)
    recipe = there(layer.recipe, "the recipe of a layer that was made with one")
    weight = recipe.w.quantize(layer.weight.detach())
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    same(layer(x).detach(), expected.detach(), f"{quantizer}: y of a layer with a quantized weight")


def test_conversion_by_text(quantizer: Quantizer) -> None:
    """``lpq.convert`` takes the recipe's text, and a checkpoint of the model loads into the converted one."""
    model = torch.nn.Sequential(torch.nn.Linear(K, N))
    keys = set(model.state_dict())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    converted = lpq.convert(model, str(recipe_of(quantizer)))
    what = f"{quantizer}: a model converted by the text {str(recipe_of(quantizer))!r}"
    equal(converted is model, True, f"{what}: whether it is the same object")
    equal(
        isinstance(model[0], Linear), True, f"{what}: whether its layer, {type(model[0]).__name__}, is an lpq.nn.Linear"
    )
    equal(keys - set(model.state_dict()), set(), f"{what}: the keys that its state dict lost")
    model.load_state_dict(state)
    equal(len(lpq.report(model).converted), 1, f"{what}: how many layers the report has as converted")
