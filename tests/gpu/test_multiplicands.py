"""Operands that are multiplied at once are made for the product and not encoded first: nothing changes but time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import lpq
from lpq.operations.multiplicands import multiplicands
from lpq.testing.comparing import compare_multiplicands

pytest.importorskip("cuda.core", reason="needs cuda-core")
TEXTS = [
    "mxfp8", "mxfp8(dtype=e5m2)", "mxfp4", "mxfp4(scale=ceil, rht=true, stochastic=true)",
    "nvfp4", "nvfp4(block=16x16)", "nvfp4(stochastic=true)", "nvfp4(rht=true)",
    "nvfp4(rht=true, stochastic=true)", "nvfp4(rht=true, stochastic=unbiased)",
    "nvfp4(rht=true, search=four_over_six, norm=256)", "nvfp4(block=16x16, search=four_over_six)",
    "hybrid(row=mxfp8, col=nvfp4(rht=true))", "hybrid(row=nvfp4, col=mxfp8)",
]  # fmt: skip
SHAPES = [(128, 128), (256, 512), (16, 16), (48, 80), (272, 144), (16, 4096)]
RECIPES = [
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "nvfp4-four-over-six",
    "nvfp4-row-fwd-mxfp8-bwd",
    "mxfp8-fwd-nvfp4-bwd",
    "nvfp4-fwd-mxfp8-bwd",
    "nvfp4-fwd-bf16-bwd",
]


def inputs(rows: int, cols: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator("cuda").manual_seed(rows + cols)
    normal = torch.randn(rows, cols, device="cuda", generator=g)
    wide = normal * torch.exp2(torch.randint(-30, 30, (rows, cols), device="cuda", generator=g).float())
    odd = normal.clone()
    odd.view(-1)[:: max(odd.numel() // 7, 1)] = torch.nan
    infinite = normal.clone()
    infinite.view(-1)[3] = torch.inf
    return [x.to(dtype) for x in (normal, wide, torch.zeros_like(normal), -torch.zeros_like(normal), odd, infinite)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_they_are_the_exact_forms_of_encoded_operands(text: str, dtype: torch.dtype) -> None:
    quantizer = lpq.quantizer(text)
    row, col = quantizer.side("row"), quantizer.side("col")
    for shape in SHAPES:
        for x in inputs(*shape, dtype):
            for exact in ((True, False), (False, True), (True, True)):
                assert compare_multiplicands(row, col, x, exact)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (17, 32), (32, 40)])
def test_other_shapes_are_encoded(shape: tuple[int, int]) -> None:
    quantizer = lpq.quantizer("mxfp8")
    x = torch.randn(shape, device="cuda")
    with torch.no_grad():
        assert multiplicands(x, quantizer, quantizer, None, (True, True)) is None


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("tokens", "inner", "outer"), [(256, 512, 384), (128, 128, 128), (40, 64, 48)])
def test_a_step_is_the_same_bit_for_bit(recipe: str, tokens: int, inner: int, outer: int) -> None:
    found = []
    ways = ["made", "encoded", "compiled"] if tokens == 256 else ["made", "encoded"]
    for way in ways:
        torch.manual_seed(0)
        layer = lpq.nn.Linear(inner, outer, device="cuda", dtype=torch.bfloat16, recipe=recipe)
        assert layer.passes.plan is not None
        assert any((layer.passes.plan.fprop, layer.passes.plan.dgrad, layer.passes.plan.wgrad))
        if way == "encoded":
            layer.passes.plan = replace(layer.passes.plan, fprop=None, dgrad=None, wgrad=None)
        step = torch.compile(layer, fullgraph=True) if way == "compiled" else layer
        x = torch.randn(tokens, inner, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            y = step(x)
            y.backward(torch.randn_like(y))
            torch.cuda.synchronize()
        decoded = sum(event.name == "decode_tiles" for event in seen.events())
        found.append((y.detach(), x.grad, layer.weight.grad, decoded))
    for other in found[1:]:
        for a, b in zip(found[0][:3], other[:3], strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)
    counts = dict(zip(ways, (count for *_, count in found), strict=True))
    assert counts["made"] <= counts["encoded"]
    # A compiler decides what is kept: so x and the weight are encoded apart, and decoded for the product of forward. An
    # x with an amax for each row is so in any case.
    apart = 0 if recipe.endswith("bf16-bwd") else 1 if "row" in recipe else 2
    assert counts.get("compiled", counts["made"] + apart) == counts["made"] + apart
    if tokens % 16 == 0 and recipe in ("mxfp8", "nvfp4"):
        assert (counts["made"], counts["encoded"]) == (2, 6)  # of the weight and of x, which backward finds encoded


def test_what_is_kept_is_encoded() -> None:
    """Only operands that no one sees again are made so."""
    layer = lpq.nn.Linear(128, 128, device="cuda", recipe="nvfp4")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        seen: list[Tensor] = []
        layer(torch.randn(64, 128, device="cuda", requires_grad=True))
    assert {t.dtype for t in seen if t.dim() == 2} == {torch.uint8, torch.float8_e4m3fn}
