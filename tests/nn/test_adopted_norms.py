"""Norms of other classes: known by what they compute, and made to encode their output."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from support.comparing import equal
from support.passes import step
from torch import Tensor, nn

import lpq
from lpq.core import QuantizedTensor
from lpq.nn.adopted_norms import TRIED, adopt, norm_of, release
from lpq.operations.norms import NormKind, norm_source

DIM = 64


class Rms(nn.Module):
    """A norm that rounds twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.variance_epsilon = 1e-5

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * self.normed(hidden_states).to(hidden_states.dtype)

    def normed(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class RmsOnce(Rms):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return (self.weight * self.normed(hidden_states)).to(hidden_states.dtype)


class RmsOffset(Rms):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return (self.normed(hidden_states) * (1.0 + self.weight.float())).type_as(hidden_states)


class RmsOther(Rms):
    """A module that computes none of these norms in one dtype alone."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.normed(hidden_states).to(hidden_states.dtype) * (1 + self.weight)


class RmsWithAnotherGradient(Rms):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * self.normed(hidden_states).detach().to(hidden_states.dtype) + 0 * hidden_states


KINDS: dict[Any, NormKind | None] = {
    Rms: NormKind(1e-5, rounds=True), RmsOnce: NormKind(1e-5), RmsOffset: NormKind(1e-5, offset=True), RmsOther: None,
    RmsWithAnotherGradient: None,
}  # fmt: skip


def kind_of(module: nn.Module) -> NormKind | None:
    found = norm_of(module)
    return None if found is None else found.norm


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_norm_is_known_by_what_it_computes(kind: Any) -> None:
    module = kind()
    expected = KINDS[kind]
    assert kind_of(module) == expected
    assert kind_of(module.to("meta").bfloat16()) == expected
    assert torch.is_grad_enabled()


def test_modules_of_torch() -> None:
    assert kind_of(nn.RMSNorm(DIM)) == NormKind(None)
    assert kind_of(nn.RMSNorm(DIM, eps=1e-6)) == NormKind(1e-6)
    assert kind_of(nn.LayerNorm(DIM)) == kind_of(nn.LayerNorm(DIM, bias=False)) == NormKind(1e-5, centers=True)
    for other in (nn.Linear(4, 4), nn.LayerNorm((4, 4)), nn.RMSNorm(DIM, elementwise_affine=False), nn.BatchNorm1d(4)):
        assert norm_of(other) is None
    patched = nn.RMSNorm(DIM)
    patched.forward = lambda x: x
    assert norm_of(patched) is None


class Adds(Rms):
    """A norm with a residual of its own."""

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if residual is None else hidden_states + residual)


class AddsUnnamed(Adds):
    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        return super().forward(hidden_states, **others)


@pytest.mark.parametrize("kind", [Adds, AddsUnnamed], ids=lambda kind: kind.__name__)
def test_a_norm_with_a_residual_of_its_own_is_left_alone(kind: Any) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.q = kind(), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
            y: Tensor = self.q(self.norm(x) if memory is None else self.norm(x, residual=memory))
            return y

    torch.manual_seed(0)
    plain: Any = lpq.convert(nn.Sequential(Block()), "mxfp8")
    fused = lpq.fuse(copy.deepcopy(plain))
    x, memory = torch.randn(2, 32, DIM)
    for arguments in ((x,), (x, memory)):
        assert torch.equal(fused[0](*arguments), plain[0](*arguments))
    assert not lpq.report(fused).fused


def converted(kind: Any) -> Any:
    torch.manual_seed(1)
    model: Any = lpq.convert(nn.Sequential(kind(), nn.Linear(DIM, 96)).bfloat16(), "mxfp8")
    with torch.no_grad():
        model[0].weight.uniform_(0.5, 1.5)
    return model


def given() -> Tensor:
    return torch.randn(2, 32, DIM, generator=torch.Generator().manual_seed(2)).bfloat16()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind]], ids=lambda kind: kind.__name__)
def test_adopted_it_computes_the_same_and_can_be_released(kind: Any) -> None:
    model = converted(kind)
    expected, norm = step(model, given()), norm_of(model[0])
    assert norm is not None
    adopt(model[0], norm, (model[1],))
    assert isinstance(model[0], kind)
    assert norm_of(model[0]) == norm
    assert isinstance(model[0](torch.ones(2, DIM, dtype=torch.bfloat16)), QuantizedTensor)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert equal(step(other, given()), expected)
        assert other[0].consumers == (other[1],)
    own = type(model[0])
    model[0].__class__ = extended = type("FSDPNorm", (own,), {})
    with pytest.raises(RuntimeError, match=r"has become a FSDPNorm since.* call lpq\.unfuse or lpq\.restore before"):
        release(model[0])
    assert type(model[0]) is extended
    assert model[0].consumers == (model[1],)
    model[0].__class__ = own
    release(model[0])
    assert type(model[0]) is kind
    assert vars(model[0]).keys() == vars(kind()).keys()
    assert equal(step(model, given()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "norm", [NormKind(None), *(kind for kind in KINDS.values() if kind), NormKind(1e-5, centers=True)], ids=str
)
def test_its_source_computes_what_the_module_computes(norm: NormKind, dtype: torch.dtype) -> None:
    """In the centered norm torch sums the rows of bf16 and fp16 in an order of its own."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((33, 256), (256,), (256,)))
    given = (weight, bias) if norm.centers else (weight,)
    (y,) = norm_source(norm, norm.centers).compute(x, *norm.rows(x), *given)
    expected = norm.compute(x, *given)
    if norm.centers and dtype is not torch.float32:
        torch.testing.assert_close(y, expected)
        assert torch.equal(norm_source(norm, True).compute(x.float(), *norm.rows(x), *given)[0].to(dtype), y)
    else:
        assert torch.equal(y, expected)


RUNS: list[str] = []


class Noted(Rms):
    """A norm whose runs are noted where no trial looks."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        RUNS.append("norm")
        return super().forward(hidden_states)


class Layer(nn.Module):
    """Attention with a norm of its own, and a norm before it."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.inner, self.q = Noted(), inner or Layer(nn.Identity()), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.q(self.norm(x)))


def test_fusing_tries_each_norm_once() -> None:
    """It was tried for each block around it, for each kind of norms, and again to be adopted: ten times."""
    model = lpq.convert(nn.Sequential(*(Layer() for _ in range(3))), "mxfp8", include="all")
    for _ in range(2):
        RUNS.clear()
        lpq.fuse(model)
        assert len(RUNS) == 6 * len(TRIED)
        assert len(lpq.report(model).fused) == 6


def test_no_gradients_are_compared_where_outputs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm without a bias may be of four kinds."""
    grad, ours = torch.autograd.grad, list[Any]()

    def noting(y: Tensor, *args: Any, **within_torch: Any) -> Any:
        ours.extend([] if within_torch else [y])
        return grad(y, *args, **within_torch)

    monkeypatch.setattr(torch.autograd, "grad", noting)
    assert kind_of(nn.LayerNorm(DIM, bias=False)) == NormKind(1e-5, centers=True)
    assert len(ours) == 2 * len(TRIED)
