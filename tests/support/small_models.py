"""Small models, which tests of several folders convert, share out and train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import lpq
from lpq.distributed import tensor_parallel
from lpq.nn import GroupedLinear


def linears(
    *sizes: int, bias: bool = True, dtype: torch.dtype = torch.float32, between: type[nn.Module] | None = None
) -> nn.Sequential:
    """Linear layers of these sizes one after the other, with the same weights each time."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [between()] if layers and between is not None else []
        layers.append(nn.Linear(fan_in, fan_out, bias, dtype=dtype))
    return nn.Sequential(*layers)


def converted(
    policy: Any, *sizes: int, bias: bool = True, dtype: torch.dtype = torch.float32,
    between: type[nn.Module] | None = None, **how: Any,
) -> Any:  # fmt: skip
    """Convert ``linears``: the layers of a model, which know their names."""
    return lpq.convert(linears(*sizes, bias=bias, dtype=dtype, between=between), policy, **how)


class Mlp(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self, width: int = 64, inner: int = 128, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.between(self.up(x)))
        return y


class Gated(nn.Module):
    """As the feed-forward block of a Llama, with a norm."""

    def __init__(self, width: int, inner: int, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.left, self.right = nn.Linear(width, inner, bias), nn.Linear(width, inner, bias)
        self.down = nn.Linear(inner, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        y: Tensor = self.down(nn.functional.silu(self.left(normed)) * self.right(normed))
        return y


def shared_out(
    first: Iterable[str], last: str, dim: int | None = None, styles: Any = tensor_parallel
) -> dict[str, Any]:
    """A plan of tensor parallelism: the first layers by their outputs, the last one by its inputs.

    Args:
        dim: along which the tokens outside are divided over the ranks; None: each rank has all
        styles: the module of the styles: lpq's, or torch's
    """
    tokens = Replicate() if dim is None else Shard(dim)
    column = styles.ColwiseParallel(input_layouts=tokens)
    return {**dict.fromkeys(first, column), last: styles.RowwiseParallel(output_layouts=tokens)}


def gated_plan(sequence: bool, styles: Any = tensor_parallel) -> dict[str, Any]:
    """A plan of tensor parallelism for ``Gated``, whose tokens are divided over the ranks outside if ``sequence``."""
    norm = {"norm": styles.SequenceParallel(use_local_output=True)} if sequence else {}
    return {**norm, **shared_out(("left", "right"), "down", 1 if sequence else None, styles)}


class LlamaMlp(nn.Module):
    """The feed-forward block of a Llama, as another library writes it."""

    def __init__(self, width: int = 64, inner: int = 128) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Normed(nn.Module):
    """A norm, that block, and a residual around both."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.mlp = norm(64), LlamaMlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(self.norm(x))
        return x + y


class Stream(nn.Module):
    """A residual stream: two norms, each before a layer whose output is added; torch or the norms make the sums."""

    def __init__(self, norm: Any, size: int, by_norms: bool, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.by_norms = norm(size, eps=1e-5), norm(size, eps=1e-5), by_norms
        self.a, self.b = (nn.Linear(size, size, bias=bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.by_norms:
            normed, x = self.first(x, with_sum=True)
            normed, x = self.second(self.a(normed), residual=x)
        else:
            x = x + self.a(self.first(x))
            normed = self.second(x)
        y: Tensor = x + self.b(normed)
        return y


class Behind(nn.Module):
    """Three layers behind a norm, as attention has them."""

    def __init__(self, norm: Callable[..., nn.Module], width: int, outputs: int) -> None:
        super().__init__()
        self.norm = norm(width, eps=1e-5)
        self.q, self.k, self.v = (nn.Linear(width, outputs, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.q(x) + 0.5 * self.k(x) + torch.sin(self.v(x))


class Siblings(nn.Module):
    """Layers that are given one tensor: ``q``, ``k`` and ``v``, of so many features each."""

    def __init__(self, width: int, *outs: int, bias: bool = True) -> None:
        super().__init__()
        for name, out in zip("qkv", outs, strict=False):
            setattr(self, name, nn.Linear(width, out, bias))
        self.between: Callable[[Tensor], Any] = lambda x: None
        """Called with that tensor behind the first layer."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.children()
        y = [first(x)]
        self.between(x)
        return torch.cat([*y, *(layer(x) for layer in others)], dim=-1)


class Experts(nn.Module):
    """Two stacks, as a mixture of experts has them, without a router."""

    def __init__(self, count: int, width: int, inner: int, bias: bool = True, recipe: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = GroupedLinear(count, width, inner, bias, recipe=recipe)
        self.down = GroupedLinear(count, inner, width, bias, recipe=recipe)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(rows, ends).relu(), ends)
        return y


def experts_apart(stacks: nn.Module) -> nn.ModuleList:
    """Return the experts of stacks as layers of the same names and values, each expert a module."""
    experts = nn.ModuleList()
    for name, stack in stacks.named_children():
        for i, weight in enumerate(stack.weight):
            if i == len(experts):
                experts.append(nn.Module())
            layer = nn.Linear(*reversed(weight.shape), bias=stack.bias is not None)
            layer.load_state_dict({key: value[i] for key, value in stack.state_dict().items()})
            setattr(experts[i], name, layer)
    return experts


class Planted(nn.Module):
    """A block, which may have a few input channels that are a million times larger than the others. They do not count,
    as their weights are 0 and stay so: but the others share their scales."""

    def __init__(self, width: int, planted: bool) -> None:
        super().__init__()
        self.layer, self.planted = nn.Linear(width, width), planted
        if planted:
            self.layer.weight[:, ::16] = 0.0
            self.layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.planted:
            x = x.clone()
            x[:, ::16] = 1e6
        y: Tensor = self.layer(x)
        return y.tanh()
