"""Norms on a GPU: a kernel finds what rows have in common, and another computes and encodes.

The kernels are in CUDA C++ and in Triton, each by themselves.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import as_bytes
from support.small_models import Behind, Stream
from test_producers import FAMILIES, both, check_third_party, family, inputs_of, outputs_of, poisoned
from torch import Tensor, nn

import lpq
from lpq.core import QuantizedTensor
from lpq.nn.norm_groups import groups_of
from lpq.nn.norms import bind_norm
from lpq.operations import norm_kernels, norm_programs
from lpq.operations.norm_choice import NormKernels, norm_kernels_of
from lpq.operations.norms import NormKind, norm_source
from lpq.tensor.with_value import WithValue

pytest.importorskip("cuda.core", reason="needs cuda-core")
__all__ = ["family", "poisoned"]

RMS = [NormKind(1e-6), NormKind(1e-6, rounds=True), NormKind(1e-6, offset=True)]
LAYER = NormKind(1e-5, centers=True)
EVERY = [*((norm, False) for norm in RMS), (LAYER, False), (LAYER, True)]
ROWS, IN, OUT = (2, 512), 1024, 768
LONGEST = norm_kernels.PIECE * max(norm_kernels.NORM_GRADIENTS)
"""The bytes of a row from which a CUDA kernel computes gradients; longer ones are left to torch."""


@pytest.fixture
def beside(family: str) -> NormKernels:
    """The kernels that run beside the one of elements."""
    kernels: dict[str, NormKernels] = {"cuda": norm_kernels, "triton": norm_programs}
    return kernels[family]


@FAMILIES
@pytest.mark.parametrize(("norm", "biased"), EVERY)
@pytest.mark.parametrize("text", ["fp8", "nvfp4"])
def test_operands_are_those_of_encoders(norm: NormKind, biased: bool, text: str) -> None:
    source = norm_source(norm, biased)
    for shape in ((256, 512), (131, 264)):
        dtype = torch.bfloat16 if shape[0] % 2 == 0 else torch.float16
        inputs = inputs_of(source, shape, dtype)
        both(source, outputs_of(source, text, shape, dtype), inputs, [()], lambda i: False)


@FAMILIES
@pytest.mark.parametrize(("norm", "biased"), EVERY)
def test_elements_in_fp32(norm: NormKind, biased: bool) -> None:
    """They are encoded without being rounded before, as layers encode inputs in fp32."""
    source = norm_source(norm, biased)
    for text in ("fp8", "mxfp8", "fp8(scaling=block)", "nvfp4", "fp8(scaling=row)"):
        for shape in ((256, 512), (131, 264), (1, 8)):
            inputs = inputs_of(source, shape, torch.float32)
            outputs = outputs_of(source, text, shape, torch.float32, measures=True)
            both(source, outputs, inputs, [()], lambda i: False)


@pytest.mark.parametrize("norm", [RMS[0], LAYER], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows(norm: NormKind, dtype: torch.dtype, beside: NormKernels) -> None:
    torch.manual_seed(0)
    for shape in ((9, 8), (1, 2048), (4096, 4104), (64, 8200)):
        x = (torch.randn(shape, device="cuda") + 1).to(dtype)
        assert norm_kernels_of(norm, shape, dtype, x.device) is beside
        found, expected = beside.bind_rows(norm, shape, dtype, x.device)(x), norm.rows(x)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b.float(), rtol=2e-6, atol=1e-6)


def step(model: Any, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    model.zero_grad()
    torch.manual_seed(3)
    y = model(x)
    y.backward(torch.sin(y.detach()))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@FAMILIES
@pytest.mark.parametrize("kind", [lpq.nn.RMSNorm, lpq.nn.LayerNorm], ids=["rms", "layer"])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8", "nvfp4", "fp8-row", "fp8-delayed"])
def test_beside_the_norm_and_the_layers_apart(kind: type[nn.Module], recipe: str) -> None:
    """The sums of rows are in another order, so a few elements differ by one step of their dtype."""
    torch.manual_seed(1)
    plain: Any = lpq.convert(Behind(kind, IN, OUT).to("cuda", torch.bfloat16), recipe)
    with torch.no_grad():
        plain.norm.weight.uniform_(0.5, 1.5)
    fused = copy.deepcopy(plain)
    fused.norm.consumers = (fused.q, fused.k, fused.v)
    x = torch.randn(*ROWS, IN, device="cuda", dtype=torch.bfloat16)
    assert isinstance(fused.norm(x), QuantizedTensor)
    for a, b in zip(step(fused, x), step(plain, x), strict=True):
        assert a.dtype == b.dtype
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 4e-3


@pytest.mark.parametrize(("norm", "biased"), EVERY)
def test_a_tile_of_a_third_party(norm: NormKind, biased: bool, tmp_path: Path) -> None:
    for shape, dtype in (((300, 256), torch.bfloat16), ((37, 136), torch.float16)):
        check_third_party(norm_source(norm, biased), shape, dtype, tmp_path)


@FAMILIES
@pytest.mark.parametrize("kind", [lpq.nn.RMSNorm, lpq.nn.LayerNorm], ids=["rms", "layer"])
@pytest.mark.parametrize(
    "recipes",
    [("fp8-current", "mxfp8", "bf16"), ("fp8-delayed", "nvfp4", "fp8-delayed"), ("fp8-row", "fp8-block", "skip")],
)
def test_layers_of_several_formats_have_a_run_each(kind: type[nn.Module], recipes: tuple[str, ...]) -> None:
    """All encode what the first run computes."""
    torch.manual_seed(1)
    plain: Any = nn.Sequential(Behind(kind, IN, OUT).to("cuda", torch.bfloat16))
    rules = [{"match": f"*.{name}", "recipe": recipe} for name, recipe in zip("qkv", recipes, strict=True)]
    lpq.convert(plain, {"rules": rules})
    fused = lpq.fuse(copy.deepcopy(plain))
    assert len(lpq.report(fused).fused) == 1
    x = torch.randn(*ROWS, IN, device="cuda", dtype=torch.bfloat16)
    for a, b in zip(step(fused, x), step(plain, x), strict=True):
        assert a.dtype == b.dtype
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 4e-3
    fused[0].norm.serves_others = True
    vars(fused[0].norm)["_calls"].clear()
    y = fused[0].norm(x)
    assert type(y) is WithValue
    assert len(y.beside) == len({*recipes} - {"bf16", "skip"}) - 1
    for encoded in (y, *y.beside):
        if "delayed" in encoded.quantizer.text:
            continue  # by a history
        for found, wanted in zip(encoded.buffers, encoded.quantizer.quantize(y.value).buffers, strict=True):
            assert torch.equal(as_bytes(found), as_bytes(wanted))


@FAMILIES
@pytest.mark.parametrize("kind", [lpq.nn.RMSNorm, lpq.nn.LayerNorm], ids=["rms", "layer"])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8", "nvfp4", "fp8-row", "fp8-delayed"])
def test_a_stream_in_fp32_under_autocast(kind: type[nn.Module], recipe: str) -> None:
    """The layers encode the output of the norm from fp32, and so does the norm."""
    torch.manual_seed(1)
    plain: Any = lpq.convert(Behind(kind, IN, OUT).to("cuda"), recipe)
    with torch.no_grad():
        plain.norm.weight.uniform_(0.5, 1.5)
    fused = copy.deepcopy(plain)
    fused.norm.consumers = (fused.q, fused.k, fused.v)
    x = torch.randn(*ROWS, IN, device="cuda")
    cast = torch.autocast("cuda", torch.bfloat16)
    with cast:
        made = fused.norm(x)
    assert isinstance(made, QuantizedTensor)
    assert made.dtype == torch.float32
    for model in (fused, plain):
        model.forward = cast(model.forward)
    for a, b in zip(step(fused, x), step(plain, x), strict=True):
        assert a.dtype == b.dtype
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 4e-3


@FAMILIES
@pytest.mark.parametrize("norm", [*RMS, LAYER], ids=["rms", "rounds", "offset", "layer"])
@pytest.mark.parametrize("text", ["fp8-current", "mxfp8"])
def test_the_output_is_what_the_source_computes_and_gradients_are_close(norm: NormKind, text: str) -> None:
    torch.manual_seed(2)
    x = torch.randn(*ROWS, IN, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(IN, device="cuda").to(torch.bfloat16)
    plan = lpq.convert(nn.Sequential(nn.Linear(8, 8)), text)[0].passes.plan
    bound = bind_norm(norm, groups_of([plan], [True]), x, False)
    made, _, rows = bound.encode(x, None, (weight,), [()])
    assert (bound.gradients is None) == norm.centers
    matrix = x.view(-1, IN)
    expected = plan.x.quantize(norm_source(norm).compute(matrix, *rows, weight)[0])
    for a, b in zip(made.buffers, expected.buffers, strict=True):
        assert torch.equal(as_bytes(a), as_bytes(b))
    dy = torch.randn_like(x)
    needed = (True, True)
    exact = norm.gradients(dy, (x, weight), (), needed)
    ways = [norm.gradients(dy, (x, weight), rows, needed)]
    if bound.gradients is not None:
        ways.append(bound.gradients(dy, x, weight, *rows, True, None))
        assert torch.equal(bound.gradients(dy, x, weight, *rows, False, None)[0], ways[1][0])  # type: ignore[arg-type]
    for way in ways:
        for g, h in zip(way, exact, strict=True):
            assert g is not None
            assert h is not None
            assert (g.dtype, g.shape) == (h.dtype, h.shape)
            assert float((g.float() - h.float()).norm() / h.float().norm()) < 5e-3


@pytest.mark.parametrize("norm", RMS, ids=["once", "rounds", "offset"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gradients_of_the_kernel(norm: NormKind, dtype: torch.dtype, beside: NormKernels) -> None:
    """They round where autograd's do: a bit differs here and there, as sums have another order."""
    torch.manual_seed(3)
    for shape in ((9, 8), (700, 2056), (3000, 4096), (64, 8192)):
        x, dy = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
        weight = torch.randn(shape[1], device="cuda").to(dtype)
        compute = beside.bind_gradients(norm, shape, dtype, x.device)
        if shape[1] * dtype.itemsize > LONGEST and beside is norm_kernels:  # left to torch
            assert compute is None
            continue
        assert compute is not None
        found = compute(dy, x, weight, norm.rows(x)[0], True, None)
        expected = norm.gradients(dy, (x, weight), (), (True, True))
        for a, b in zip(found, expected, strict=True):
            assert a is not None
            assert b is not None
            assert float((a.float() - b.float()).norm() / b.float().norm()) < 2e-3
            assert dtype == torch.float32 or float((a == b).float().mean()) > 0.9


@FAMILIES
@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm], ids=["rms", "layer"])
@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8", "fp8-block", "fp8-row", "nvfp4"])
def test_backward_encodes_what_forward_would_have_and_the_operand_is_not_kept(
    kind: type[nn.Module], recipe: str
) -> None:
    """By ``x.save=input``, of eight norms: that operand is no part of what forward leaves for backward."""
    of, count = lpq.recipe(recipe), 8
    x = torch.randn(*ROWS, IN, device="cuda", dtype=torch.bfloat16)
    found, left, column = [], [], 0
    for option in ("encoded", "input"):
        torch.manual_seed(1)
        net: Any = nn.Sequential(*(Behind(kind, IN, IN) for _ in range(count))).to("cuda", torch.bfloat16)
        lpq.convert(net, f"x={of.x}, w={of.w}, dy={of.dy}, x.save={option}", include="all", fuse=True)
        assert len(lpq.report(net).fused) == count
        y = net[0].norm(x.clone().requires_grad_())
        assert (y.col is None) == (option == "input")
        column = column or sum(t.nbytes for t in y.col.tensors())
        del y
        found.append(step(net, x))  # kernels are bound
        with torch.no_grad():
            assert torch.equal(net(x), found[-1][0])
        before = torch.cuda.memory_allocated()
        y = net(x.clone().requires_grad_())
        left.append(torch.cuda.memory_allocated() - before)
        del y
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert left[0] - left[1] >= count // 2 * column, (left, column)


@FAMILIES
@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
def test_the_value_beside_the_operands(recipe: str) -> None:
    """The kernel writes the tensor that it encodes, for a residual."""

    class Residual(Behind):
        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            y: Tensor = self.q(normed) + self.k(normed) + normed @ self.v.weight.t()
            return y

    torch.manual_seed(0)
    net: Any = lpq.convert(Residual(nn.RMSNorm, IN, OUT).cuda().bfloat16(), recipe)
    lpq.fuse(net)
    assert len(lpq.report(net).fused) == 1
    x = torch.randn(*ROWS, IN, device="cuda", dtype=torch.bfloat16)
    y = net.norm(x)
    assert type(y) is WithValue
    expected = lpq.recipe(recipe).x.quantize(y.value)
    for found, wanted in zip(y.buffers, expected.buffers, strict=True):
        assert torch.equal(as_bytes(found), as_bytes(wanted))
    net(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def bits(t: Tensor) -> Tensor:
    return t.view(torch.int32 if t.dtype is torch.float32 else torch.int16)


@FAMILIES
@pytest.mark.parametrize("norm", [*RMS, LAYER], ids=["rms", "rounds", "offset", "layer"])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "adds"])
def test_the_output_for_no_group_is_the_value_beside_an_encoding(norm: NormKind, adds: bool) -> None:
    torch.manual_seed(2)
    x, residual = (torch.randn(*ROWS, IN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(IN, device="cuda").to(torch.bfloat16)
    plans = [lpq.convert(nn.Sequential(nn.Linear(8, 8)), recipe)[0].passes.plan for recipe in ("mxfp8", "nvfp4")]
    found = []
    for groups in ([], *(groups_of([plan], [trained]) for plan in plans for trained in (True, False))):
        bound = bind_norm(norm, groups, x, False, others=True, adds=adds)
        assert (bound.gradients is None) == norm.centers
        y, total, rows = bound.encode(x, residual if adds else None, (weight,), [()] * len(groups))
        assert isinstance(y, WithValue) == bool(groups)
        found.append([y.value if isinstance(y, WithValue) else y, total, *rows])
    expected, *others = found
    assert expected[0].shape == x.shape
    for other in others:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(expected, other, strict=True))


@pytest.mark.parametrize("norm", [RMS[0], LAYER], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_sum_is_torch_s_and_its_rows_are_those_of_the_sum(
    norm: NormKind, dtype: torch.dtype, beside: NormKernels
) -> None:
    torch.manual_seed(5)
    for shape in ((9, 8), (700, 2056), (4096, 4096), (33, 8192)):
        x, residual = (torch.randn(shape, device="cuda").mul(3).to(dtype) for _ in range(2))
        x[0, :4] = torch.tensor([torch.inf, torch.nan, -0.0, 60000.0])
        residual[0, :4] = torch.tensor([-torch.inf, 1.0, -0.0, 60000.0])
        total, rows = beside.bind_sum_rows(norm, shape, dtype, x.device)(x, residual)
        expected = x + residual
        assert torch.equal(bits(total)[:, 2:], bits(expected)[:, 2:])  # NaNs have any bits
        assert torch.equal(total[:, :2].isnan(), expected[:, :2].isnan())
        for a, b in zip(rows, beside.bind_rows(norm, shape, dtype, x.device)(expected), strict=True):
            assert torch.equal(bits(a)[1:], bits(b)[1:])
        assert not torch.equal(rows[-1], beside.bind_rows(norm, shape, dtype, x.device)(x)[-1])


@pytest.mark.parametrize("norm", RMS, ids=["once", "rounds", "offset"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gradient_from_elsewhere_is_added_as_autograd_adds_it(
    norm: NormKind, dtype: torch.dtype, beside: NormKernels
) -> None:
    torch.manual_seed(6)
    for shape in ((9, 8), (700, 2056), (3000, 4096), (64, 8192)):
        x, dy, other = (torch.randn(shape, device="cuda").to(dtype) for _ in range(3))
        weight = torch.randn(shape[1], device="cuda").to(dtype)
        compute = beside.bind_gradients(norm, shape, dtype, x.device)
        assert compute is not None
        factor = beside.bind_rows(norm, shape, dtype, x.device)(x)[0]
        alone, of_weight = compute(dy, x, weight, factor, True, None)
        dx, same = compute(dy, x, weight, factor, True, other)
        assert torch.equal(bits(dx), bits(alone + other))
        assert of_weight is not None
        assert same is not None
        assert torch.equal(bits(same), bits(of_weight))


@FAMILIES
@pytest.mark.parametrize("kind", [lpq.nn.RMSNorm, lpq.nn.LayerNorm], ids=["rms", "layer"])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "mxfp8", "fp8-row", "nvfp4"])
def test_a_residual_stream_by_norms_is_the_same_to_the_bit(kind: type[nn.Module], recipe: str) -> None:
    found = []
    x = torch.randn(*ROWS, IN, device="cuda", dtype=torch.bfloat16)
    for by_norms in (False, True):
        torch.manual_seed(1)
        model: Any = lpq.convert(Stream(kind, IN, by_norms, bias=False).to("cuda", torch.bfloat16), recipe)
        model.first.consumers, model.second.consumers = (model.a,), (model.b,)
        found.append([t for _ in range(3) for t in step(model, x)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize(("norm", "biased"), EVERY)
@pytest.mark.parametrize("text", ["fp8", "mxfp8", "nvfp4"])
def test_programs_take_odd_sizes(norm: NormKind, biased: bool, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPQ_KERNELS", "triton,torch,reference")
    source = norm_source(norm, biased)
    for shape in ((131, 77), (1, 1), (3, 4099)):
        of = norm, shape, torch.bfloat16, torch.device("cuda", 0)
        x, dy = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        rows = norm_programs.bind_rows(*of)(x)
        for a, b in zip(rows, norm.rows(x), strict=True):
            torch.testing.assert_close(a, b.float(), rtol=2e-6, atol=1e-6)
        weight = torch.rand(shape[1], device="cuda").bfloat16()
        inputs = [x, *rows, *[weight] * (1 + biased)]
        both(source, outputs_of(source, text, shape, torch.bfloat16, measures=True), inputs, [()], lambda i: False)
        compute = norm_programs.bind_gradients(*of)
        if compute is not None:
            exact = norm.gradients(dy, (x, weight), (), (True, True))
            for g, h in zip(compute(dy, x, weight, rows[-1], True, None), exact, strict=True):
                assert g is not None
                assert h is not None
                torch.testing.assert_close(g, h, rtol=2e-2, atol=2e-2)
