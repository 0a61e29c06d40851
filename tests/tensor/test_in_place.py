"""Stored tensors as users meet them: they are assigned to; arithmetic in place is refused, with the remedy."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparing import equal_bytes
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import LBFGS, SGD, AdamW, Optimizer

import lpq
from lpq.core import QuantizedTensor
from lpq.optim import MasterWeights
from lpq.testing.expect import same

FORMATS = ["fp8", "mxfp8", "nvfp4", "nvfp4(block=16x16)", "hybrid(row=fp8, col=mxfp8)"]


def stored(text: str = "fp8", seed: int = 0) -> nn.Parameter:
    value = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed))
    weight = nn.Parameter(lpq.quantizer(text).quantize(value))
    weight.grad = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed + 1))
    return weight


def buffers(weight: Any) -> list[Tensor]:
    assert isinstance(weight, QuantizedTensor)
    return [t.clone() for _, operand in weight.operands for t in operand.tensors()]


ARITHMETIC: dict[str, Callable[[Any], object]] = {
    "mul_": lambda t: t.mul_(2), "add_": lambda t: t.data.add_(torch.ones(64, 96), alpha=2),
    "lerp_": lambda t: t.detach().lerp_(torch.ones(64, 96), 0.5),
    "addcdiv_": lambda t: t.addcdiv_(torch.ones(64, 96), torch.ones(64, 96)),
    "clamp_": lambda t: t[32:].clamp_(-0.1, 0.1), "sub_": lambda t: t.t().sub_(1),
    "masked_fill_": lambda t: t.masked_fill_(torch.ones(64, 96).bool(), 1),
    "_foreach_add_": lambda t: torch._foreach_add_([t.detach()], 1.0),
    "_foreach_lerp_": lambda t: torch._foreach_lerp_([torch.ones(64, 96), t], [torch.ones(64, 96)] * 2, 0.5),
    "_fused_adamw_": lambda t: AdamW([t], fused=True).step(),
    "_foreach_mul_": lambda t: AdamW([t], foreach=True).step(), "mul_ ": lambda t: AdamW([t], foreach=False).step(),
    "_foreach_add_ ": lambda t: SGD([t], foreach=True, lr=0.1).step(), "add_  ": lambda t: operator.iadd(t, 1),
    "sub_ ": lambda t: operator.isub(t.detach(), t.grad), "mul_  ": lambda t: operator.imul(t, 0.5),
    "div_": lambda t: operator.itruediv(t.detach(), 2), "pow_": lambda t: operator.ipow(t, 2),
    "add_ ": lambda t: LBFGS([t]).step(lambda: torch.ones(())),
}  # fmt: skip


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_in_place_is_refused(name: str) -> None:
    weight = stored()
    weight.title = "blocks.0.up.weight"
    before = buffers(weight)
    words = (
        rf"^blocks\.0\.up\.weight: {name.strip()} would compute in place in this .* stored as .*fp8.* rounded at each "
        r"such operation\. Step it with lpq\.optim\.MasterWeights\(optimizer\), or MasterWeights\(optimizer, keep=Fa"
    )
    error = TypeError if name == "add_" else RuntimeError  # of its ``data``, to which what is computed may be assigned
    with torch.no_grad(), pytest.raises(error, match=words):
        ARITHMETIC[name](weight)
    assert equal_bytes(buffers(weight), before)


def test_it_is_refused_where_a_compiler_traces() -> None:
    for backend in ("eager", "aot_eager"):
        torch.compiler.reset()
        with pytest.raises(Exception, match=r"mul_ would compute in place in this \[64, 96\] tensor"):
            torch.compile(lambda t: t.mul_(2), backend=backend)(stored().detach())


def test_the_remedies_are_one() -> None:
    """By hand, as the words say it, is what the optimizer does."""
    weight, twin = stored(), stored()
    MasterWeights(SGD([weight], lr=0.3), keep=False).step()
    with torch.no_grad():
        value = twin.dequantize()
        twin.copy_(value.add_(twin.grad, alpha=-0.3))
    assert equal_bytes(buffers(weight), buffers(twin))


@pytest.mark.filterwarnings("ignore::lpq.core.PrecisionWarning")
def test_what_is_assigned_to_its_data_is_encoded() -> None:
    """As adapters are merged: Python computes a new tensor, and assigns that. PEFT looks for NaN in a copy first, which
    becomes an ordinary tensor."""
    weight = stored("fp8")
    before, delta = weight.dequantize().detach(), torch.randn(64, 96, generator=torch.Generator().manual_seed(3))
    copy = weight.data.clone()
    copy += delta
    assert torch.equal(copy, before + delta)
    weight.data += delta
    assert equal_bytes(buffers(weight), buffers(lpq.quantizer("fp8").quantize(before + delta)))
    assert not torch.equal(weight.dequantize(), before)


def test_who_only_reads_it_may_write_elsewhere() -> None:
    weight, moved = stored(), torch.zeros(64, 96)
    moved.lerp_(weight.detach(), 0.5)
    torch._foreach_add_([moved], [weight.detach()])
    assert torch.equal(moved, torch.zeros(64, 96).lerp_(weight.dequantize(), 0.5).add_(weight.dequantize()).detach())


INITS: dict[str, Callable[[Any], object]] = {
    "normal": nn.init.normal_, "constant": lambda t: nn.init.constant_(t, 0.5), "kaiming": nn.init.kaiming_uniform_,
    "truncated": lambda t: nn.init.trunc_normal_(t, std=0.02), "eye": nn.init.eye_,
    "bernoulli": lambda t: t.data.bernoulli_(0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", INITS)
def test_initialisation_is_assigned(name: str) -> None:
    if name == "truncated" and torch.__version__ < (2, 12):
        pytest.skip("this torch computes it in place, step by step, which is refused")
    weight, plain = stored("identity"), torch.empty(64, 96)
    for t in (weight, plain):
        torch.manual_seed(0)
        INITS[name](t)
    same(weight.dequantize().detach(), plain, name)


@pytest.mark.parametrize("text", FORMATS)
def test_hooks_after_a_step_see_what_is_stored(text: str) -> None:
    weight = stored(text)
    optimizer = MasterWeights(SGD([weight], lr=0.3), keep=False)
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: seen.append((weight.dequantize(), buffers(weight))))
    before = buffers(weight)
    optimizer.step()
    values, held = seen[-1]
    same(values, weight.dequantize(), text)
    assert equal_bytes(held, buffers(weight))
    assert not equal_bytes(held, before)


def test_a_step_that_a_scaler_skips_changes_no_byte() -> None:
    weight = stored()
    optimizer: Optimizer = MasterWeights(AdamW([weight], lr=0.1, fused=True), keep=False)
    before = buffers(weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    assert weight.grad is not None
    weight.grad[3, 3] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert equal_bytes(buffers(weight), before)
    weight.grad[3, 3] = 0.0
    scaler.step(optimizer)
    assert not equal_bytes(buffers(weight), before)


@pytest.mark.parametrize("text", FORMATS)
def test_what_is_assigned_to_data_is_encoded(text: str) -> None:
    weight, value = stored(text), torch.randn(64, 96)
    weight.data = value
    assert equal_bytes(buffers(weight), buffers(lpq.quantizer(text).quantize(value)))
    with pytest.raises(TypeError, match="a flattened weight that is stored as"):
        parameters_to_vector([weight])  # torch.cat cannot tell this from wrappers that would lose the weight
    vector_to_parameters(torch.zeros(64 * 96), [weight])
    assert not weight.dequantize().any()
    weight.data = lpq.quantizer(text).quantize(value)
    assert equal_bytes(buffers(weight), buffers(lpq.quantizer(text).quantize(value)))
    with pytest.raises(ValueError, match=r"is \[64, 96\], and what is assigned to its data \[2\]"):
        weight.data = torch.zeros(2)


def test_an_optimizer_that_assigns_to_data_trains() -> None:
    class Assigns(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data = p.data - 0.3 * p.grad

    weight, twin = stored("mxfp8"), stored("mxfp8")
    Assigns([weight], lr=0.3).step()
    MasterWeights(SGD([twin], lr=0.3), keep=False).step()
    assert equal_bytes(buffers(weight), buffers(twin))
