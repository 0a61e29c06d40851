"""MS-EDEN on a GPU: the bytes of the reference by each kernel, and products of a pass, which leave rotations as they
are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lpq
from lpq import operations, registry
from lpq.operations.references import quantize_reference
from lpq.testing.comparing import Poisoned, compare_multiplicands
from lpq.testing.expect import relative_error, same

EDEN = lpq.quantizer("nvfp4(stochastic=eden)")
SHAPES = [(256, 512), (128, 128), (130, 257), (33, 80), (1, 1000), (1000, 1), (16, 4096), (1, 1)]
SIDES = {"row": (EDEN, None), "col": (None, EDEN), "both": (EDEN, EDEN)}


def inputs(rows: int, cols: int, dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator("cuda").manual_seed(rows + cols)
    normal = torch.randn(rows, cols, device="cuda", generator=g)
    wide = normal * torch.exp2(torch.randint(-30, 30, (rows, cols), device="cuda", generator=g).float())
    odd = normal.clone()
    odd.view(-1)[3 % odd.numel()], odd.view(-1)[odd.numel() // 2] = torch.inf, torch.nan
    return [x.to(dtype) for x in (normal, wide, torch.zeros_like(normal), odd)]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sides", SIDES)
def test_operands_equal_the_reference(
    sides: str, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.core" if backend == "cuda" else "triton")
    monkeypatch.setenv("LPQ_KERNELS", backend)
    row, col = SIDES[sides]
    seed = torch.tensor(-(7 << 40) + 12345, device="cuda")
    for shape in SHAPES if backend == "cuda" else SHAPES[:3]:
        for x in inputs(*shape, dtype):
            for offset, measure in ((0, False), (128, True)):
                expected = quantize_reference(x.cpu(), [], row, col, seed.cpu(), offset, measure)
                with Poisoned():  # type: ignore[no-untyped-call]
                    of_row, of_col, found = operations.quantizing.quantized(
                        x, None, row, col, seed, offset, measure=measure
                    )
                for i, (got, wanted) in enumerate(zip([*of_row, *of_col, *found], expected, strict=True)):
                    same(got.cpu(), wanted, f"{sides}, {shape}, {dtype}, output {i}")


def test_exact_forms_are_those_of_encoded_operands() -> None:
    pytest.importorskip("cuda.core")
    for shape in ((128, 128), (256, 512)):
        for x in inputs(*shape, torch.bfloat16):
            for exact in ((True, False), (False, True), (True, True)):
                assert compare_multiplicands(EDEN, EDEN, x, exact)


def step(recipe: str, tokens: int, *, compiled: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    layer = lpq.nn.Linear(512, 384, bias=False, device="cuda", dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = (torch.compile(layer, fullgraph=True) if compiled else layer)(x)
    y.backward(torch.randn_like(y))
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("recipe", ["nvfp4-eden", "fprop=mxfp8, dgrad=nvfp4-eden, wgrad=nvfp4-eden"])
@pytest.mark.parametrize("tokens", [256, 200])
def test_a_step_by_kernels_is_the_step_of_the_reference(
    recipe: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the order of sums: both draw the same signs. Tokens that fill no group of 128 are multiplied apart."""
    pytest.importorskip("cuda.core")
    by_kernels, compiled = step(recipe, tokens), step(recipe, tokens, compiled=True)
    monkeypatch.setenv("LPQ_KERNELS", "reference")
    registry.refresh()
    wanted = step(recipe, tokens)
    for found in (by_kernels, compiled):
        for got, expected in zip(found, wanted, strict=True):
            assert relative_error(got.float(), expected.float()) < 4e-3


def test_experts_do_not_wait() -> None:
    pytest.importorskip("cuda.core")
    layer = lpq.nn.GroupedLinear(3, 256, 128, bias=False, device="cuda", dtype=torch.bfloat16, recipe="nvfp4-eden")
    offs = torch.tensor([100, 130, 300], dtype=torch.int32, device="cuda")
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16)
    layer(x, offs).backward(dy)
    x.grad = None
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, offs).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = torch.cat(
        [dy[a:b].float() @ layer.weight[i].float() for i, (a, b) in enumerate([(0, 100), (100, 130), (130, 300)])]
    )
    assert x.grad is not None
    assert relative_error(x.grad.float(), wanted) < 0.3
