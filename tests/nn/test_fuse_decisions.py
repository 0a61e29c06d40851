"""lpq.fuse changes no bit where hooks of all modules look, where layers draw numbers in another order, and where a
forward decides by what a first trial does not show."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.comparing import equal
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.utils import parametrizations

import lpq


def pair(make: Callable[[], nn.Module], recipe: str = "fp8-current", dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """The same model as it was converted, and fused."""
    torch.manual_seed(0)
    plain = lpq.convert(nn.Sequential(make()).to(dtype), recipe, include="all")
    return [plain, lpq.fuse(copy.deepcopy(plain))]


def fused(net: nn.Module) -> list[str]:
    return [entry.name for entry in lpq.report(net).fused]


def step(net: nn.Module, x: Tensor) -> list[Tensor | None]:
    net.zero_grad()
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = net(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())]


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(*shape, 64).to(dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act_fn(self.gate(x)) * self.up(x))
        return y


class UpFirst(Block):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        y: Tensor = self.down(self.act_fn(self.gate(x)) * up)
        return y


class Halves(nn.Module):
    """Gate and up are one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down, self.act_fn = nn.Linear(64, 192), nn.Linear(96, 64), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: Tensor = self.down(self.act_fn(gate) * up)
        return y


@pytest.mark.parametrize("block", [Block, UpFirst, Halves])
def test_a_hook_of_all_modules_is_called_with_the_activation(block: Any) -> None:
    found, called = [], []

    def hook(module: nn.Module, args: Any, y: Tensor) -> Tensor | None:
        called.append(type(module).__name__)
        return 2 * y if isinstance(module, nn.SiLU) else None

    for net in pair(block):
        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            found.append(step(net, rows(16)))
        finally:
            handle.remove()
    assert equal(*found)
    assert called[: len(called) // 2] == called[len(called) // 2 :]
    assert called.count("SiLU") == 2
    assert fused(net) == ["0"]


class Without(Block):
    """A child of it is None."""

    def __init__(self) -> None:
        super().__init__()
        self.register_module("dropout", None)


def test_a_child_that_is_none() -> None:
    plain, net = pair(Without)
    assert equal(step(net, rows(16)), step(plain, rows(16)))
    assert fused(net) == ["0"]


@pytest.mark.parametrize("block", [Block, UpFirst])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_layers_draw_random_numbers_in_the_order_of_their_calls(
    block: Any, recipe: str, fused_passes: list[int]
) -> None:
    plain, net = pair(block, recipe)
    assert equal(step(net, rows(16)), step(plain, rows(16)))
    draws = block is UpFirst and recipe == "nvfp4"
    assert len(fused_passes) == (not draws)
    assert ("it calls up before gate, and fused these would draw" in str(lpq.report(net))) == draws


@pytest.mark.parametrize("computed", ["gate", "up", "down"])
def test_a_layer_computes_its_weight_and_others_wait_for_a_gather(computed: str, fused_passes: list[int]) -> None:
    """The pass began as one function, and ended in an AttributeError at the first layer that waits."""
    plain = lpq.convert(nn.Sequential(Block()).to(torch.bfloat16), "nvfp4", include="all")
    parametrizations.weight_norm(plain.get_submodule(f"0.{computed}"))
    lpq.convert(plain, "nvfp4", include="all", weights="high_precision")
    net = lpq.convert(copy.deepcopy(plain), "nvfp4", include="all", weights="high_precision", fuse=True)
    assert fused(net) == ["0"]
    assert equal(step(net, rows(16)), step(plain, rows(16)))
    assert not fused_passes


class Norm(nn.Module):
    """A norm that does something else with some inputs."""

    def __init__(self, decides: str, eps: float = 1e-8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.decides, self.eps = decides, eps

    def forward(self, x: Tensor) -> Tensor:
        if self.decides == "size":
            x = x.clamp(-1000, 1000)
        if self.decides == "NaN":
            x = x.nan_to_num()
        high = x.float()
        squares = high.pow(2).mean(-1, keepdim=True)
        scale = squares.clamp(min=self.eps) if self.decides == "epsilon" else squares + self.eps
        y = self.weight * (high * torch.rsqrt(scale)).to(x.dtype)
        if self.decides == "zeros":
            y = torch.where(high.any(-1, keepdim=True), y, 1)
        doubles = {
            "dimensions": lambda: x.dim() == 3,
            "rows": lambda: x.shape[0] > 8,
            "dtype": lambda: x.dtype is torch.float16,
            "strides": lambda: not x.is_contiguous(),
            "gradient": lambda: not x.requires_grad,
        }.get(self.decides, lambda: False)()
        return 2 * y if doubles else y.clamp(-100, 100) if self.decides == "output" else y


class Behind(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.q = norm, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.q(self.norm(x))
        return y


HALF = torch.float16
INPUTS: dict[str, Callable[[], Tensor]] = {
    "size": lambda: rows(16) * 3000, "NaN": lambda: rows(16).fill_(torch.nan), "epsilon": lambda: rows(16) * 1e-5,
    "zeros": lambda: rows(16) * 0, "dimensions": lambda: rows(2, 16), "rows": lambda: rows(16),
    "dtype": lambda: rows(16, dtype=HALF), "strides": lambda: rows(64).t(), "output": lambda: rows(16),
    "gradient": lambda: rows(16),
}  # fmt: skip


@pytest.mark.parametrize("decides", ["nothing", *INPUTS])
def test_a_norm_that_decides_by_its_input_is_left_alone(decides: str) -> None:
    x = INPUTS.get(decides, lambda: rows(16))()
    plain, net = pair(lambda: Behind(Norm(decides)), dtype=x.dtype)
    with torch.no_grad():
        for each in (plain, net):
            each[0].norm.weight.mul_(1000)
        assert equal([net(x)], [plain(x)], nan=True)
    assert fused(net) == (["0.norm"] if decides == "nothing" else [])


class ByName(Norm):
    """It calls functions by the names of their arguments alone, and functions that return nothing."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            high = x.float()
        scale = high * torch.rsqrt(input=torch.mean(input=high.pow(2), dim=-1, keepdim=True) + self.eps)
        return self.weight.view(x.size(dim=-1)) * scale.to(x.dtype)


def test_a_norm_may_name_the_arguments_of_functions_and_set_modes() -> None:
    plain, net = pair(lambda: Behind(ByName("nothing")))
    assert equal(step(net, rows(16)), step(plain, rows(16)))
    assert fused(net) == ["0.norm"]


LIKE = (1, 64)
"""The shape of an input of one row."""
ASKED: dict[str, Callable[[Any], bool]] = {
    "for nothing": lambda shape: shape[-1] == shape[-1:][0] == 65, "for its length": lambda shape: len(shape) == 2,
    "whether it is another": lambda shape: not operator.ne(shape, LIKE), "for a size of all": lambda shape: 1 in shape,
    "for all sizes": lambda shape: [*shape] == [*LIKE], "for a number": lambda shape: shape.numel() == 64,
    "for more": lambda shape: operator.add(shape, (1,)) == (*LIKE, 1),
    "whether it is less": lambda shape: shape < (2, 64),
    "for a part": lambda shape: shape[:-1] == (1,), "for a count": lambda shape: shape.count(1) == 1,
    "for its hash": lambda shape: hash(shape) == hash(LIKE), "for twice": lambda shape: 2 * shape == (*LIKE, *LIKE),
}  # fmt: skip


class Folded(Norm):
    """It makes rows of its input, keeps the shape for a view at the end, and may decide by it."""

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        y = super().forward(x.reshape(-1, shape[-1])).view(shape)
        return 2 * y if ASKED[self.decides](shape) else y


@pytest.mark.parametrize("asks", ASKED)
def test_a_norm_may_keep_its_shape_for_a_view(asks: str) -> None:
    plain, net = pair(lambda: Behind(Folded(asks)))
    for x in (rows(2, 16), rows(1)):
        assert equal(step(net, x), step(plain, x))
    assert fused(net) == (["0.norm"] if asks == "for nothing" else [])


class Values(NamedTuple):
    first: Tensor
    second: Tensor


class Child(nn.Module):
    """It returns several values, as it was made."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.result = nn.Linear(64, 64), result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.inner(x))


class Adding(nn.Module):
    def __init__(self, child: nn.Module, counts: bool = False) -> None:
        super().__init__()
        self.norm, self.child, self.counts = nn.RMSNorm(64), child, counts

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(self.norm(x))
        if self.counts:
            y = y[0] + y[2] if len(y) > 2 else y[0]
        elif not isinstance(y, Tensor):
            y = y[0]
        return x + y  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("result", "counts", "adds"),
    [
        (lambda y: y, False, True), (lambda y: (y, None), False, True), (lambda y: [y, None], False, True),
        (lambda y: Values(y, y), False, True), (lambda y: (y, None, 2 * y), True, False),
    ],
    ids=["tensor", "tuple", "list", "named", "three"],
)  # fmt: skip
def test_values_that_a_part_of_a_layer_returns(result: Any, counts: bool, adds: bool, added: list[bool]) -> None:
    plain, net = pair(lambda: Adding(Child(result), counts))
    assert equal(step(net, rows(16)), step(plain, rows(16)))
    assert bool(added) == adds


def test_transforms_of_functions_run_no_trial() -> None:
    """Layers without a recipe are differentiated by them as before; others say that they are not."""
    plain, net = pair(lambda: Adding(Child(lambda y: y)))

    def gradients(of: nn.Module) -> Any:
        def loss(parameters: Any) -> Any:
            return functional_call(of, parameters, rows(16)).square().sum()

        return grad(loss)({name: p.detach() for name, p in of.named_parameters()})

    with pytest.raises(RuntimeError, match="transforms"):
        gradients(net)
    for each in (plain, net):
        each[0].child.inner.recipe = None
    assert equal(gradients(net).values(), gradients(plain).values())


class Gelu:
    """An object that is called, as an activation."""

    approximate = "tanh"

    def __call__(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.approximate)


class Holding(Block):
    """Its activation is an attribute, in a list, and no child."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        del self.act_fn
        self.held = [act]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.held[0](self.gate(x)) * self.up(x))
        return y


@pytest.mark.parametrize("act", [Gelu, lambda: nn.GELU("tanh")], ids=["object", "module"])
@pytest.mark.parametrize("change", ["approximate", "hook"])
def test_an_activation_that_is_no_child_is_changed_later(act: Any, change: str) -> None:
    nets = pair(lambda: Holding(act()))
    plain, net = nets
    assert fused(net) == ["0"]
    for each in nets:
        if change == "hook" and isinstance(each[0].held[0], nn.Module):
            each[0].held[0].register_forward_hook(lambda module, args, y: 2 * y)
        else:
            each[0].held[0].approximate = "none"
    assert equal(step(net, rows(16)), step(plain, rows(16)))
    assert "its held was set since: call lpq.fuse again" in str(lpq.report(net))


class InPlace(nn.Module):
    """Its second sum is made in place, in the input of the norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(64), nn.RMSNorm(64)
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.q(self.first(x))
        x += self.k(self.second(x))
        return x


def test_a_norm_whose_input_is_written_to_is_left_alone() -> None:
    """A norm of torch's operations in bf16 keeps a copy, and one that encodes its input."""
    plain, net = pair(InPlace)
    assert equal(step(net, rows(16)), step(plain, rows(16)))
    assert fused(net) == ["0.first"]
    assert "its output is written to, or its input is afterwards" in str(lpq.report(net))


class Counter:
    def __init__(self) -> None:
        self.passes, self.kept, self.by_name = 0, list[Tensor](), {"all": {"passes": 0}}


class Counting(nn.Module):
    """It notes its passes in objects, and not in attributes of its own."""

    counters: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.counter, self.lists = nn.RMSNorm(64), nn.Linear(64, 64), Counter(), [[0]]
        self.same = self.counter

    def forward(self, x: Tensor) -> Tensor:
        self.counter.passes += 1
        self.same.kept.append(x)
        self.counter.by_name["all"]["passes"] += 1
        self.lists[0].append(1)
        self.counters.append(1)
        return x + self.q(self.norm(x))  # type: ignore[no-any-return]


def test_a_trial_leaves_no_trace_in_what_an_attribute_holds() -> None:
    _, net = pair(Counting)
    assert fused(net) == ["0.norm"]
    layer = net[0]
    assert (vars(layer.counter), layer.lists) == (vars(Counter()), [[0]])
    net(rows(16))
    assert (layer.counter.passes, layer.counter.by_name, layer.lists) == (1, {"all": {"passes": 1}}, [[0, 1]])
    assert len(Counting.counters) == 1


class NewGelu(nn.Module):
    """A GELU by tanh as transformers has it for GPT-2, with a constant of its own."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + self.factor * torch.pow(x, 3.0))))


@pytest.mark.parametrize(
    ("act", "known"),
    [
        (nn.ReLU(), True), (nn.Hardtanh(0.0, 20.0), False), (nn.Softplus(beta=1e6), False),
        (NewGelu(0.044715), True), (NewGelu(0.04471), False), (nn.RReLU(0.0, 0.0), False),
        (nn.RReLU(0.0, 0.0).eval(), True),
    ],
)  # fmt: skip
def test_an_activation_that_is_almost_one_that_lpq_knows(act: nn.Module, known: bool) -> None:
    def block() -> nn.Module:
        made = Block()
        made.act_fn = act
        return made

    plain, net = pair(block)
    x = torch.cat([rows(64) * 100, rows(64), rows(1) * 0])
    drawn = []
    for each in (net, plain):
        torch.manual_seed(1)
        drawn.append((*step(each, x), torch.get_rng_state()))
    assert equal(*drawn)
    assert bool(fused(net)) == known
