"""Transforms of torch.func, which a layer with a recipe refuses, and models that ``torch.export`` has taken: they run
as their layers do, and give no gradient that is not theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_models import converted, linears
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

import lpq


def test_transforms_of_torch_func_are_refused_in_words() -> None:
    model, x = lpq.convert(nn.Sequential(nn.Linear(48, 32)), "mxfp8"), torch.randn(3, 48)
    params = dict(model.named_parameters())

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(model, params, (x,)).square().sum()

    transforms: list[Callable[[], Any]] = [
        lambda: grad(loss)(params), lambda: vmap(model)(x[None]), lambda: jvp(model, (x,), (x,)),
        lambda: jacrev(model)(x), lambda: vmap(lambda row: model(row[None]))(x),
    ]  # fmt: skip
    words = r"^layer 0, lpq\.nn\.Linear\(48, 32\): torch\.func's transforms .* torch\.autograd, .*layer\.recipe = None"
    for recipe in ("mxfp8", "bf16"):
        model[0].recipe = recipe
        for transform in transforms:
            with pytest.raises(RuntimeError, match=words):
                transform()
        value = loss(params)  # by itself, functional_call is no transform
        assert torch.equal(value, model(x).square().sum())
        gradients = torch.autograd.grad(value, list(params.values()))
        assert all(torch.equal(g, p.grad) for g, p in zip(gradients, _trained(model, x), strict=True))
    model[0].recipe = None
    for transform in transforms:
        transform()


@pytest.mark.parametrize("groups", [None, 2])
def test_transforms_that_are_compiled_are_refused_too(groups: int | None) -> None:
    """The compiler traced them, and made other gradients without a word."""
    torch._dynamo.reset()
    layer: Any = nn.Linear(48, 32) if groups is None else lpq.nn.GroupedLinear(groups, 48, 32, recipe=None)
    layer, x = lpq.convert(layer, "mxfp8"), torch.randn(4, 48)
    rest = () if groups is None else (torch.tensor([1, 4], dtype=torch.int32),)

    def loss(weight: Tensor) -> Tensor:
        return functional_call(layer, {"weight": weight}, (x, *rest)).square().sum()

    with pytest.raises(RuntimeError, match=r"torch\.func's transforms"):
        torch.compile(grad(loss), backend="aot_eager")(layer.weight.detach())
    torch._dynamo.reset()  # or what was refused is compiled frame by frame
    torch.compile(loss, backend="aot_eager", fullgraph=True)(layer.weight).backward()  # control
    gradient, layer.weight.grad = layer.weight.grad, None
    loss(layer.weight).backward()
    assert torch.equal(gradient, layer.weight.grad)


@pytest.mark.parametrize("stored", [None, "quantized"])
def test_many_gradients_at_once_are_refused_in_words(stored: Any) -> None:
    experts = lpq.convert(lpq.nn.GroupedLinear(2, 48, 32, recipe=None), "mxfp8", weights=stored)
    model, x = lpq.convert(nn.Linear(48, 32), "mxfp8", weights=stored), torch.randn(32, 48, requires_grad=True)
    for layer in (model, lambda x: experts(x, [16, 16])):
        y = layer(x)
        dy = torch.randn(3, *y.shape)
        with pytest.raises(RuntimeError, match=r"is_grads_batched=True .*one gradient at a time"):
            torch.autograd.grad(y, x, dy, is_grads_batched=True)
        with pytest.raises(RuntimeError, match=r"vectorize=True.*one gradient at a time"):
            torch.autograd.functional.jacobian(layer, x, vectorize=True)
        assert torch.autograd.grad(y, x, dy[0])[0].any()


def test_a_trace_by_torch_jit_is_refused_in_words() -> None:
    """It would record what kernels return, and not that they ran; also where a pass of this kind ran before."""

    class Experts(lpq.nn.GroupedLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x, [16, 16])

    model, x = lpq.convert(nn.Sequential(nn.Linear(48, 32)), "mxfp8"), torch.randn(32, 48)
    for layer in (model, Experts(2, 48, 32, recipe="mxfp8")):
        y = layer(x)
        with pytest.raises(RuntimeError, match=r"Linear.*torch\.jit\.trace records neither .*torch\.export"):
            torch.jit.trace(layer, (x,), check_trace=False)
        assert torch.equal(layer(x), y)
    model[0].recipe = None
    assert torch.equal(torch.jit.trace(model, (x,))(x[:3]), model(x[:3]))


@pytest.mark.parametrize("recipe", ["mxfp8", None])
def test_a_script_of_torch_jit_is_refused_in_words(recipe: str | None) -> None:
    """Its compiler complained of the annotation of an attribute, and named no layer."""
    model = lpq.convert(nn.Sequential(nn.Linear(48, 32)), "mxfp8")
    model[0].recipe = recipe
    with pytest.raises(RuntimeError, match=r"^layer 0, lpq\.nn\.Linear\(48, 32\): torch\.jit\.script .*lpq\.restore"):
        torch.jit.script(model)
    x = torch.randn(3, 48)
    assert torch.equal(torch.jit.script(lpq.restore(model))(x), model(x))


def test_torch_fx_traces_a_model_before_its_conversion_or_takes_layers_as_leaves() -> None:
    """It traced into layers, whose error named no remedy."""
    model, x = lpq.convert(nn.Sequential(nn.Linear(48, 32)), "mxfp8"), torch.randn(3, 48)
    with pytest.raises(TypeError, match=r"^layer 0, .*the input is a Proxy, trace by torch\.fx before lpq\.convert"):
        torch.fx.symbolic_trace(model)
    before = lpq.convert(torch.fx.symbolic_trace(lpq.restore(copy.deepcopy(model))), "mxfp8")
    tracer = torch.fx.Tracer()
    tracer.is_leaf_module = lambda module, name: isinstance(module, lpq.nn.Linear)  # type: ignore[method-assign]
    for traced in (before, torch.fx.GraphModule(model, tracer.trace(model))):
        assert isinstance(traced.get_submodule("0"), lpq.nn.Linear)
        assert torch.equal(traced(x), model(x))


def _trained(model: nn.Module, x: torch.Tensor) -> list[nn.Parameter]:
    model.zero_grad()
    model(x).square().sum().backward()
    return list(model.parameters())


# ------------------------------------------------------------------------------------------ exported models


RECIPES = (
    "fp8-current", "fp8-delayed", "nvfp4", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16",
    "fprop=bf16, dgrad=mxfp8, wgrad=fp8-current", "bf16",
)  # fmt: skip
"""Statistics of the whole tensor, a state, random bits, and a mixture: each calls other operators."""
X = torch.randn(24, 48, generator=torch.Generator().manual_seed(0))
WORDS = r"no gradient flows through torch\.ops\.lpq\.\w+: .*has forward only"


def exported(recipe: str, strict: bool = False, **how: Any) -> tuple[nn.Module, nn.Module]:
    model = converted(recipe, 48, 32)
    return model, torch.export.export(model, (X,), strict=strict, **how).module()


def seeded(model: nn.Module, *given: Tensor) -> Tensor:
    torch.manual_seed(7)
    y: Tensor = model(*(given or (X,)))
    return y


@pytest.mark.parametrize(
    ("recipe", "strict"), [*((recipe, False) for recipe in RECIPES), *((recipe, True) for recipe in RECIPES[-3:])]
)
def test_it_runs_with_weights_that_require_a_gradient(recipe: str, strict: bool) -> None:
    """Forward is the layer's to the bit; backward is right where all is in high precision, and else an error in words:
    a gradient that is missing, or another recipe's, would train something else in silence."""
    model, module = exported(recipe, strict)
    y = seeded(module)
    assert torch.equal(y, seeded(model))
    dy = torch.randn_like(y)
    if recipe != "bf16":
        with pytest.raises(RuntimeError, match=WORDS):
            y.backward(dy)
        assert all(p.grad is None for p in module.parameters())
        return
    y.backward(dy)
    seeded(model).backward(dy)
    for mine, theirs in zip(module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("recipe", [None, "nvfp4"])
def test_a_grouped_layer_gives_no_gradient_either(recipe: str | None) -> None:
    layer, offs = lpq.nn.GroupedLinear(2, 48, 32, recipe=recipe), torch.tensor([9, 24]).int()
    y = seeded(torch.export.export(layer, (X, offs), strict=False).module(), X, offs)
    assert torch.equal(y, seeded(layer, X, offs))
    with pytest.raises(RuntimeError, match=WORDS):
        y.sum().backward()


@pytest.mark.parametrize("recipe", RECIPES[1:4])
def test_it_is_saved_and_loaded(recipe: str) -> None:
    model, file = converted(recipe, 48, 32), BytesIO()
    rows = torch.export.Dim("rows", min=2, max=1000)
    torch.export.save(torch.export.export(model, (X,), dynamic_shapes=({0: rows},)), file)
    file.seek(0)
    module = torch.export.load(file).module()
    for given in (X, X[:7]):
        assert torch.equal(seeded(module, given), seeded(model, given))


HASTY = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
"""One package is compiled sooner without an optimized runtime, and without a precompiled header for others."""


@pytest.mark.slow
@pytest.mark.starts
def test_a_package_of_aotinductor_runs(tmp_path: Path) -> None:
    """Its runtime, which is no Python, passes None for the empty list of statistics."""
    model = converted("mxfp8", 48, 32).eval()
    with torch.no_grad():
        made = torch.export.export(model, (X,))
        path = torch._inductor.aoti_compile_and_package(
            made, package_path=str(tmp_path / "model.pt2"), inductor_configs=HASTY
        )
        assert torch.equal(torch._inductor.aoti_load_package(path)(X), model(X))


def test_it_encodes_only_what_forward_multiplies() -> None:
    """An inference graph has nothing of backward: of each tensor its row operand."""
    _, module = exported("nvfp4")
    encoded = [node for node in module.graph.nodes if node.target is torch.ops.lpq.quantize.default]
    assert [node.args[3] for node in encoded] == [""] * 2


@pytest.mark.parametrize("strict", [False, True])
def test_a_weight_that_is_stored_quantized_is_refused(strict: bool, tmp_path: Path) -> None:
    """PyTorch finds buffers that are no parameters, and asks for an issue to be filed. The remedy is exported."""
    model, plain = converted("mxfp8", 48, 32, weights="quantized"), linears(48, 32)
    words = r"layer 0, lpq\.nn\.Linear\(48, 32\): torch\.export takes no weight that is stored quantized\. .*import"
    with pytest.raises(RuntimeError, match=words):
        torch.export.export(model, (X,), strict=strict)
    lpq.export(model, tmp_path / "model.pt", layout="lpq", decode=True)
    lpq.checkpoint.import_file(lpq.convert(plain, "mxfp8"), tmp_path / "model.pt")
    assert torch.equal(torch.export.export(plain, (X,), strict=strict).module()(X), model(X))


def codes(x: Tensor) -> list[Tensor]:
    made: list[Tensor] = torch.ops.lpq.quantize(x, [], "nvfp4", "", None, 0, False)
    return made


def test_an_operator_runs_by_itself_where_a_gradient_is_wanted() -> None:
    """Also a body that no autograd could record, as it writes into tensors that it was handed. torch warns."""
    x = torch.randn(16, 32, requires_grad=True)
    assert codes(x)[0].dtype == torch.uint8
    decoded = torch.ops.lpq.decode([t.clone() for t in codes(x)], "nvfp4", [16, 32], torch.float32, torch.float32)
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        decoded.sum().backward()
    assert x.grad is None
