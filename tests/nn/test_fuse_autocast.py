"""lpq.fuse under autocast, as with weights and a residual stream in fp32: bits stay, and the report says what is not
fused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.comparing import equal
from support.passes import Run, autocast, plainly, recomputed
from support.passes import step as step_of
from support.small_models import Behind
from test_fuse_families import model as of_family
from test_fuse_families import step
from torch import Tensor

import lpq
from lpq.nn import halves, norms
from lpq.nn.adopted_norms import norm_of


def nets(family: str, recipe: str = "mxfp8") -> tuple[Any, Any]:
    """A model with weights in fp32, plain and fused."""
    plain, net = of_family(family, recipe).float(), of_family(family, recipe).float()
    return plain, lpq.fuse(net)


def cast_step(net: Any) -> list[Tensor | None]:
    with torch.autocast("cpu", torch.bfloat16):
        return step(net)


@pytest.fixture
def high_powers() -> Iterator[None]:
    """Autocast computes powers in fp32, as it does on a GPU."""
    library, key = torch.library.Library("aten", "IMPL"), torch._C.DispatchKey.AutocastCPU

    def power(x: Tensor, exponent: float) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return torch.pow(x.float(), exponent)

    library.impl("pow.Tensor_Scalar", power, "AutocastCPU")
    yield
    library._destroy()


def alike(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    """Equal, but for the gradient of the residual stream, which autograd gets from a norm in fp32 in one piece. The
    embedding shows it, which comes behind the loss."""
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)
    return equal([found[0], *found[2:]], [expected[0], *expected[2:]])


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
def test_norms_in_fp32_encode_under_autocast_and_without_it(
    recipe: str, fused_passes: list[int], encoded: list[torch.dtype]
) -> None:
    """In one model, as each call finds it. Where autocast may change what a norm computes, the report says so."""
    plain, net = nets("Llama", recipe)
    for run in (cast_step, step, cast_step):
        assert alike(run(net), run(plain))
        assert len(lpq.report(net).fused) == 3
        assert not lpq.report(net).apart
    assert (len(fused_passes), encoded) == (3, [torch.float32] * 6)
    net.bfloat16(), plain.bfloat16()
    assert equal(cast_step(net), cast_step(plain))
    assert len(encoded) == 6
    report = lpq.report(net)
    assert len(report.fused) == 1
    assert {entry.note for entry in report.apart} == {"in its last pass: autocast is on"}
    assert equal(step(net), step(plain))
    assert encoded[6:] == [torch.bfloat16] * 2
    assert len(lpq.report(net).fused) == 3
    lpq.unfuse(net)
    assert [vars(m).keys() for m in net.modules()] == [vars(m).keys() for m in plain.modules()]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of the inputs of norms that encode."""
    dtypes: list[torch.dtype] = []
    own = norms.EncodedNorm.forward

    def forward(ctx: Any, x: Tensor, *others: Any) -> Any:
        dtypes.append(x.dtype)
        return own(ctx, x, *others)

    monkeypatch.setattr(norms.EncodedNorm, "forward", staticmethod(forward))
    return dtypes


class Routed(torch.nn.Module):
    """A norm of a stream, whose output goes to two layers of lpq and to a router, which is none."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.norm, self.router = kind(64), torch.nn.Linear(64, 8)
        self.q, self.k = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.q(y) * self.k(y) * self.router(y).sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", [torch.nn.RMSNorm, torch.nn.LayerNorm, lpq.nn.RMSNorm], ids=["rms", "layer", "own"])
def test_others_get_the_output_in_fp32(kind: Any, encoded: list[torch.dtype]) -> None:
    """The gradients of all who take the output are added in fp32, in which it is."""
    torch.manual_seed(0)
    plain: Any = torch.nn.Sequential(*(Routed(kind) for _ in range(2)))
    net = copy.deepcopy(plain)
    for model in (plain, net):
        lpq.convert(model, "mxfp8")
    lpq.fuse(net)
    x = torch.randn(4, 64)
    found: list[list[Any]] = []
    for model in (plain, net):
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x.requires_grad_())
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
        assert y.dtype is x.grad.dtype is torch.float32  # type: ignore[union-attr]
    assert encoded == [torch.float32] * 2
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0][0], found[1][0])


def cast_and_recomputed(module: Any, x: Tensor) -> Tensor:
    return autocast(partial(recomputed, module), x)


@pytest.mark.parametrize("kind", [lpq.nn.RMSNorm, lpq.nn.LayerNorm], ids=["rms", "layer"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8-current", "fp8-delayed"])
@pytest.mark.parametrize("run", [autocast, cast_and_recomputed, plainly])
def test_a_stream_in_fp32(kind: Any, recipe: str, run: Run, encoded: list[torch.dtype]) -> None:
    """Before layers whose weights are in bf16, too; the gradient of the stream is in fp32, and has equal bits."""
    for dtype in (torch.float32, torch.bfloat16):
        encoded.clear()
        torch.manual_seed(0)
        plain: Any = lpq.convert(Behind(kind, 128, 96), recipe)
        for layer in (plain.q, plain.k, plain.v):
            layer.to(dtype)
        fused = copy.deepcopy(plain)
        fused.norm.consumers = (fused.q, fused.k, fused.v)
        for number in range(2):
            x = torch.randn(2, 32, 128) * (number + 1)
            found = step_of(fused, x, run)
            assert equal(found, step_of(plain, x, run))
            assert found[1].dtype is torch.float32
        assert encoded == [torch.float32] * (4 if run is cast_and_recomputed else 2)


def test_the_function_and_other_calls(encoded: list[torch.dtype]) -> None:
    torch.manual_seed(0)
    norm, layer = lpq.nn.RMSNorm(64), lpq.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "mxfp8")[0]
    norm.consumers = (layer,)
    x = torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(F.rms_norm(x, (64,), norm.weight))
        assert torch.equal(layer(lpq.nn.rms_norm(x, (64,), norm.weight, layers=[layer])), expected)
        assert torch.equal(layer(norm(x)), expected)
        assert len(encoded) == 2
        assert torch.equal(layer(norm(x=x)), expected)
        low, summed = norm(x.bfloat16(), residual=x)
        assert low.dtype is summed.dtype is torch.float32
        assert torch.equal(summed, x.bfloat16() + x)
        assert norm(x.bfloat16()).dtype == F.rms_norm(x.bfloat16(), (64,), norm.weight).dtype
    assert len(encoded) == 3


def test_a_norm_that_autocast_changes_is_none_that_lpq_knows() -> None:
    class ByProduct(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(64)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(x @ torch.eye(64, dtype=x.dtype), (64,), self.weight, self.eps).to(x.dtype)

    assert norm_of(ByProduct()) is None
    module = ByProduct()
    x = torch.randn(3, 64)
    assert torch.equal(module(x), F.rms_norm(x, (64,), module.weight, 1e-6))


def test_an_input_of_another_dtype_than_the_weight_s() -> None:
    net = lpq.convert(torch.nn.Sequential(lpq.nn.RMSNorm(64), torch.nn.Linear(64, 64)), "mxfp8", include="all")
    lpq.fuse(net)
    net[1].bfloat16()
    net[0](torch.randn(4, 64, dtype=torch.bfloat16))
    assert [e.note for e in lpq.report(net).apart] == [
        "in its last pass: its input is torch.bfloat16 and its weight torch.float32"
    ]


@pytest.mark.parametrize("family", ["Mixtral", "Phi3"])
def test_one_kernel_computes_an_activation_that_autocast_has_no_part_in(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[torch.dtype] = []
    own = halves._bound
    monkeypatch.setattr(halves, "_bound", lambda *of: [calls.append(of[3]), own(*of)][1])
    plain, net = nets(family)
    assert alike(cast_step(net), cast_step(plain))
    assert calls
    assert {*calls} == {torch.bfloat16}


@pytest.mark.usefixtures("high_powers")
@pytest.mark.parametrize("family", ["GPT2", "Llama, with biases"])
def test_an_activation_of_which_autocast_computes_a_part_in_fp32(family: str, fused_passes: list[int]) -> None:
    plain, net = nets(family)
    assert alike(cast_step(net), cast_step(plain))
    assert not fused_passes
    (note,) = [entry.note for entry in lpq.report(net).apart if entry.name.endswith("mlp")]
    assert note == "in its last pass: autocast is on"
    assert equal(step(net.bfloat16()), step(plain.bfloat16()))
    assert len(fused_passes) == 1
    assert [entry for entry in lpq.report(net).fused if entry.name.endswith("mlp")]
