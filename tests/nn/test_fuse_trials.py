"""lpq.fuse finds out by trials what a forward computes. Where a trial cannot know something, or something changes
after it, no bit changes: the block computes as it did, or the norm's output is what it was before it was encoded."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.comparing import equal, equal_states
from support.small_models import LlamaMlp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lpq


def pair(make: Callable[[], nn.Module], recipe: str = "fp8-current") -> tuple[Any, Any]:
    """The same model as it was converted, and fused."""
    torch.manual_seed(0)
    plain = lpq.convert(nn.Sequential(make()).bfloat16(), recipe, include="all")
    return plain, lpq.fuse(copy.deepcopy(plain))


def step(net: nn.Module, *args: Any, rows: int = 16, **kwargs: Any) -> list[Tensor | None]:
    net.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(2, rows, 64).bfloat16().requires_grad_()
    y = net(x, *args, **kwargs)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())]


def fused(net: nn.Module) -> int:
    return len(lpq.report(net).fused)


class Config:
    def __init__(self) -> None:
        self.inner = {"doubles": False}


class Block(LlamaMlp):
    """A feed-forward block whose forward may do something else."""

    def __init__(self, decides: str = "", act: nn.Module | None = None) -> None:
        super().__init__()
        self.decides, self.config = decides, Config()
        self.act_fn = act or nn.SiLU()
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        doubles = {
            "": lambda: False,
            "mode": lambda: self.training,
            "config": lambda: self.config.inner["doubles"],
            "an attribute that it may have": lambda: getattr(self, "doubles", False),
            "buffer": lambda: self.scale is not None,
            "shape": lambda: x.shape[1] == 1,
        }[self.decides]()
        return 2 * y if doubles else y


def config(net: Any) -> None:
    net[0].config.inner["doubles"] = True


CHANGES: dict[str, Callable[[Any], object]] = {
    "mode": lambda net: net.train(),
    "config": config,
    "an attribute that it may have": lambda net: setattr(net[0], "doubles", True),
    "buffer": lambda net: setattr(net[0], "scale", torch.ones(())),
}


@pytest.mark.parametrize("decides", CHANGES)
def test_what_a_block_decides_by_changes_later(decides: str) -> None:
    plain, net = pair(lambda: Block(decides).eval())
    assert fused(net) == (decides != "buffer")
    before = net(torch.ones(1, 64).bfloat16())
    for each in (plain, net):
        CHANGES[decides](each)
    assert equal(step(net), step(plain))
    assert not torch.equal(net(torch.ones(1, 64).bfloat16()), before)
    if decides != "buffer":
        assert "was set since: call lpq.fuse again" in str(lpq.report(net))


def test_a_block_that_decides_by_a_shape_is_left_alone() -> None:
    plain, net = pair(lambda: Block("shape"))
    assert not fused(net)
    assert equal(step(net, rows=1), step(plain, rows=1))


@pytest.mark.parametrize("change", ["approximate", "forward"])
def test_an_activation_is_changed_later(change: str) -> None:
    plain, net = pair(lambda: Block(act=nn.GELU()))
    assert fused(net) == 1
    assert equal(step(net), step(plain))
    for each in (plain, net):
        setattr(each[0].act_fn, change, "tanh" if change == "approximate" else F.relu)
    assert equal(step(net), step(plain))
    assert f"its {change} was set since" in str(lpq.report(net))


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None) -> Tensor:
        return F.relu(x) if y is None else x + y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        return dy * 0.5, dy if ctx.needs_input_grad[1] else None


class Straight(nn.Module):
    """A ReLU in forward alone."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = HalfGradient.apply(x, None)  # type: ignore[no-untyped-call]
        return y


def test_an_activation_with_another_gradient_is_another() -> None:
    plain, net = pair(lambda: Block(act=Straight()))
    assert not fused(net)
    assert equal(step(net), step(plain))
    assert fused(pair(lambda: Block(act=nn.ReLU()))[1]) == 1


class Twice(nn.Module):
    """A child that returns several values."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.inner, self.second = nn.Linear(64, 64), second

    def forward(self, x: Tensor) -> Any:
        return self.inner(x), None if self.second == "None" else x


class Layer(nn.Module):
    """A layer of sums, which may do something else."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind, self.seen = kind, list[int]()
        self.draws, self.numpy_draws = random.Random(2), np.random.default_rng(2)
        self.norm = lpq.nn.RMSNorm(64)
        several = {"weights": "x", "no weights": "None", "perhaps a tuple": "None"}
        self.inner = Twice(several[kind]) if kind in several else nn.Linear(64, 64)

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        if self.kind == "asks" and given:
            y, x = self.norm(x, with_sum=True)
            y = self.inner(y)
        else:
            y = self.inner(self.norm(x))
        if self.kind in ("weights", "no weights"):
            y, second = y
            y = 2 * y if (second is not None) == (self.kind == "weights") else y
        if self.kind == "perhaps a tuple" and isinstance(y, tuple):
            y, _ = y
        doubles = {
            "text": lambda: given == "double",
            "number": lambda: given is not None and given > 1,
            "tensor": lambda: isinstance(given, Tensor),
            "length": lambda: y.shape[1] == 1,
            "dtype": lambda: y.dtype is torch.bfloat16,
            "random": lambda: random.random() < 0.5,
            "random in NumPy": lambda: np.random.rand() < 0.5,
            "random of its own": lambda: self.draws.random() < 0.5,
            "random of its own in NumPy": lambda: self.numpy_draws.random() < 0.2,
            "mode of a child": lambda: not self.inner.training,
            "notes": lambda: self.seen.append(1) is not None,
        }.get(self.kind, lambda: False)()
        if self.kind == "gradient":
            z: Tensor = HalfGradient.apply(x, y)  # type: ignore[no-untyped-call]
            return z
        return x + 2 * y if doubles else x + y


@pytest.mark.parametrize(
    ("kind", "given", "adds"),
    [
        ("plain", None, True), ("text", "double", True), ("number", 2, True), ("tensor", torch.ones(()), True),
        ("asks", True, True), ("perhaps a tuple", None, True), ("length", None, False), ("dtype", None, False),
        ("random", None, False), ("notes", None, False), ("gradient", None, False), ("weights", None, False),
        ("no weights", None, False), ("random in NumPy", None, False), ("random of its own", None, False),
        ("random of its own in NumPy", None, False), ("mode of a child", None, False),
    ],
)  # fmt: skip
def test_what_a_layer_of_sums_decides_by(kind: str, given: Any, adds: bool) -> None:
    """``adds``: in a call without arguments it is known by its sums."""
    plain, net = pair(lambda: Layer(kind))
    assert any("adds the gradients that meet there" in (entry.note or "") for entry in lpq.report(net).fused) == adds
    for args in ((), (given,), ()):
        for rows in (16, 1):
            found = []
            for each in (net, plain):
                random.seed(rows)
                np.random.seed(rows)
                each[0].inner.train(rows > 1)
                found.append(step(each[0], *args, rows=rows))
            assert equal(*found), (args, rows)
    assert plain[0].seen == net[0].seen


class Attention(nn.Module):
    """Two layers behind a norm, and something else with a mask, or once ``forward`` is another function."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x * mask
        y: Tensor = self.q(x) + self.k(x)
        return y


class Attending(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.norm, self.attention = norm(64), Attention()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.attention(self.norm(x), mask)
        return y


@pytest.mark.parametrize("cls", [Block, nn.SiLU, nn.RMSNorm, Layer], ids=lambda cls: cls.__name__)
def test_a_class_is_patched_later(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a library that makes the blocks of others faster. Copies are of the model before."""
    made = {nn.RMSNorm: Attending, Layer: Layer}.get(cls, Block)
    plain, net = pair(made)
    copied, before, forward = copy.deepcopy(net), step(net), cls.forward
    reported = str(lpq.report(net))
    with monkeypatch.context() as patch:
        patch.setattr(cls, "forward", lambda self, *args: 2 * forward(self, *args))
        expected = step(plain)
        assert not equal(expected, before)
        for each in (net, copied):
            assert equal(step(each), expected)
            said = (
                "in the calls so far, its block" if cls is Layer else "its forward was set since: call lpq.fuse again"
            )
            assert said in str(lpq.report(each))
    assert str(lpq.report(net)) == reported
    assert equal(step(pickle.loads(pickle.dumps(net))), before)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "mxfp8"])
@pytest.mark.parametrize("way", ["mask", "layer", "attention", "in place", "in a list", "by a view", "for others"])
def test_whatever_takes_the_output_of_a_norm_gets_it_as_it_was(
    way: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that no trial has seen takes the value: nothing decodes."""
    plain, net = pair(Attending, recipe)
    assert fused(net) == 1
    mask = torch.tensor(3.0).bfloat16() if way == "mask" else None
    for q in (plain[0].attention.q, net[0].attention.q) if way == "layer" else ():
        own = type(q).forward
        q.__class__ = type("Scaled", (type(q),), {"forward": lambda self, x, own=own: own(self, x * 3)})
    forwards: dict[str, Any] = {
        "attention": lambda self, x, mask: self.q(x) + x.cumsum(1),
        "in place": lambda self, x, mask: self.q(x.add_(1)),
        "in a list": lambda self, x, mask: torch._foreach_add_([x], 1) or self.q(x),
        "by a view": lambda self, x, mask: x[..., :8].add_(1).sum() + self.q(x),
        "for others": lambda self, x, mask: self.q(x) + x[..., :8].add_(1).sum(),
    }
    monkeypatch.setattr(Attention, "forward", forwards.get(way, Attention.forward))
    if way in ("in place", "in a list", "by a view"):
        with pytest.raises(TypeError, match=r"the output of a norm .* layers? would multiply its former values"):
            step(net[0], mask)
        return
    if way != "mask" and recipe == "fp8-delayed":
        with pytest.raises(RuntimeError, match="did not get, in a pass that trains it, the input that was encoded"):
            step(net[0])
        return
    for given in (None, mask, None):
        assert equal(step(net[0], given), step(plain[0], given))
        assert equal_states(net.state_dict(), plain.state_dict())
    with torch.inference_mode():
        x = torch.randn(2, 16, 64).bfloat16()
        assert torch.equal(net[0](x, mask), plain[0](x, mask))


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "mxfp8"])
@pytest.mark.parametrize("way", ["layer", "attention", "in place"])
def test_a_forward_on_the_object_gets_the_output_of_the_norm_in_high_precision(way: str, recipe: str) -> None:
    """As forwards of Accelerate do, which may send what they are given elsewhere."""
    plain, net = pair(Attending, recipe)
    for each in (plain, net):
        attention = each[0].attention
        if way == "layer":
            own = attention.q.forward
            attention.q.forward = lambda x, own=own: own(x * 3)
        elif way == "attention":
            attention.forward = lambda x, mask, attention=attention: attention.q(x) + x.cumsum(1)
        else:
            attention.forward = lambda x, mask, attention=attention: attention.q(x.add_(1))
    for _ in range(2):
        assert equal(step(net[0]), step(plain[0]))
        assert equal_states(net.state_dict(), plain.state_dict())
    why = "the forward of a module that gets its output was replaced on the object: take that away"
    assert [entry.note for entry in lpq.report(net).apart if entry.name == "0.norm"] == [why]
    if recipe == "fp8-delayed":
        return  # the layers have different histories by now
    lpq.fuse(net)
    assert equal(step(net[0]), step(plain[0]))
    (note,) = [entry.note for entry in lpq.report(net).apart if entry.name == "0.norm"]
    assert "was replaced on the object" in note
    for module in (net[0].attention, net[0].attention.q):
        vars(module).pop("forward", None)
    assert fused(lpq.fuse(net)) == 1


def test_an_input_that_was_written_to_does_not_give_another_output() -> None:
    _, net = pair(Attending)
    with torch.no_grad():
        x = torch.randn(4, 64).bfloat16()
        y = net[0].norm(x)
        expected = nn.RMSNorm.forward(net[0].norm, x)
        assert torch.equal(y + 0, expected)
        x.add_(1)
        assert torch.equal(y + 0, expected)
        y = net[0].norm(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"the input of a norm, .* was written to"):
            y + 0


@pytest.mark.parametrize("norm", [nn.RMSNorm, lpq.nn.RMSNorm, nn.LayerNorm])
def test_a_norm_gets_another_epsilon(norm: Any) -> None:
    plain, net = pair(lambda: Attending(norm))
    assert equal(step(net), step(plain))
    x = torch.randn(2, 64).bfloat16()
    before = net(x)
    for each in (plain, net):
        each[0].norm.eps = 1.0
    assert equal(step(net), step(plain))
    assert not torch.equal(net(x), before)
    text = str(lpq.report(net))
    assert ("its eps was set since: call lpq.fuse again" in text) == (norm is not lpq.nn.RMSNorm)


def test_a_method_of_a_norm_stays_its_own() -> None:
    """As of Gemma: the norm computes as its class does, as in autocast."""

    class Norm(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-6

        def _norm(self, x: Tensor) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)

        def forward(self, x: Tensor) -> Tensor:
            return self._norm(x)

    plain, net = pair(lambda: Attending(Norm))
    assert fused(net) == 1
    assert equal(step(net), step(plain))
    with torch.autocast("cpu", torch.bfloat16):
        assert equal(step(net), step(plain))


def test_a_copy_of_a_norm_in_another_place() -> None:
    plain, net = pair(lambda: nn.Sequential(Attending(), Attending()), "fp8-delayed")
    for each in (plain, net):
        each[0][1].norm = copy.deepcopy(each[0][0].norm)
    for _ in range(2):
        assert equal(step(net), step(plain))
        assert equal_states(net.state_dict(), plain.state_dict())


class Around(Attending):
    """A block with a buffer that a pass writes to, and with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.draws = nn.BatchNorm1d(64), random.Random(2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = F.dropout(super().forward(x), 0.5) + random.random() + np.random.rand() + self.draws.random()
        z: Tensor = y + self.other(x.flatten(0, -2)).view_as(x)
        return z


def test_a_trial_leaves_no_trace() -> None:
    torch.manual_seed(0)
    net = lpq.convert(nn.Sequential(Around(), Block(), Layer()).bfloat16(), "fp8-current", include="all")
    before, drawn, python = copy.deepcopy(net.state_dict()), torch.get_rng_state(), random.getstate()
    numpy, own = np.random.get_state()[1:3], net[0].draws.getstate()
    lpq.fuse(net)
    lpq.report(net)
    assert fused(net) == 3
    assert equal_states(net.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert random.getstate() == python
    assert net[0].draws.getstate() == own
    assert all(map(np.array_equal, np.random.get_state()[1:3], numpy))
    assert torch.is_grad_enabled()


def test_a_trial_calls_no_hooks() -> None:
    """A hook of FSDP2 would take a unit inside for the root of the model, if the first to call it were a trial."""
    calls: list[nn.Module] = []
    net: Any = lpq.convert(nn.Sequential(Attending()).bfloat16(), "fp8-current", include="all")
    net[0].attention.register_forward_pre_hook(lambda module, args: calls.append(module))
    lpq.fuse(net)
    lpq.report(net)
    assert calls == []
    net(torch.randn(2, 64).bfloat16())
    assert calls == [net[0].attention]


def elsewhere() -> AbstractContextManager[Any]:
    return torch.device("meta")


@pytest.mark.parametrize("around", [elsewhere, FakeTensorMode, torch.inference_mode, torch.no_grad])
def test_a_trial_within_a_mode(around: Callable[[], AbstractContextManager[Any]]) -> None:
    torch.manual_seed(0)
    plain = lpq.convert(nn.Sequential(Block(), Layer()).bfloat16(), "fp8-current", include="all")
    net = copy.deepcopy(plain)
    with around():
        lpq.fuse(net)
    assert fused(net) == 2
    for part in net:  # a call of a new kind is tried in the pass
        if hasattr(part, "lpq_calls"):
            part.lpq_calls.clear()
    x = torch.randn(2, 16, 64).bfloat16()
    if around is FakeTensorMode:
        with FakeTensorMode(allow_non_fake_inputs=True):
            net(x)
    else:
        with around():
            assert torch.equal(net(x), plain(x))
    assert equal(step(net), step(plain))


def test_copies_and_pickles_know_their_own_attributes() -> None:
    plain, net = pair(lambda: Block("config"))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert fused(other) == 1
        config(other)
        assert not fused(other)
        assert equal(step(other), changed(plain))
        assert fused(net) == 1


def changed(net: Any) -> list[Tensor | None]:
    other = copy.deepcopy(net)
    config(other)
    return step(other)
