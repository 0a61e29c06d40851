"""Layers that multiply their input as it arrives, and a transport for CPUs in place of symmetric memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from products import Products, multiplied
from ranks import mesh_of
from sharded import whole
from support.comparing import equal_bytes
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed import tensor_parallel as tp
from lpq.torch_private import collectives, symmetric

WIDTH, OUT, TOKENS = 128, 256, 256
POISON = 0x7E
Consume = Callable[[list[Tensor], int], None]


def by_gloo(
    parts: Sequence[Tensor], consume: Consume, whole: Sequence[Tensor], group: str, needed: bool, turn: int = 1
) -> None:
    """Do what the pipeline of symmetric memory does, one rank after the other, this one first."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent = collectives.arrived(collectives.begin_all_gather(list(parts), ranks, group))
    for each in whole:
        each.fill_(POISON)
    consume(list(parts), rank)
    for source in ((rank + turn * step) % ranks for step in range(1, ranks)):
        pieces = [each.chunk(ranks)[source] for each in whole]
        for piece, came in zip(pieces, sent, strict=True):
            piece.copy_(came.chunk(ranks)[source])
        consume(pieces, source)
    if needed:
        for each, own in zip(whole, parts, strict=True):
            each.chunk(ranks)[rank].copy_(own)


def swapped(parts: Sequence[Tensor], consume: Consume, whole: Sequence[Tensor], group: str, needed: bool) -> None:
    """The same, with the pieces of two ranks in each other's place."""
    places = [1, 0, *range(2, dist.get_world_size())]
    by_gloo(parts, lambda pieces, rank: consume(pieces, places[rank]), whole, group, needed)


def only_own(parts: Sequence[Tensor], consume: Consume, whole: Sequence[Tensor], group: str, needed: bool) -> None:
    """The same, without this rank's part in the whole operand."""
    by_gloo(parts, consume, whole, group, False)


@contextmanager
def transport(gather: Any) -> Iterator[list[int]]:
    """Have CPUs gather by this; yield a list with an entry for each gather, its number of buffers."""
    seen: list[int] = []

    def counted(parts: Sequence[Tensor], *args: Any) -> None:
        seen.append(len(parts))
        gather(parts, *args)

    kept = symmetric.serves, symmetric.gather_and_consume
    symmetric.serves, symmetric.gather_and_consume = lambda device: True, counted
    try:
        yield seen
    finally:
        symmetric.serves, symmetric.gather_and_consume = kept


class Two(nn.Module):
    """Layers that share an input."""

    def __init__(self, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, OUT, bias, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def made(recipe: str, bias: bool, overlap: bool, device: str) -> Two:
    torch.manual_seed(0)
    net = Two(bias, torch.bfloat16).to(device)
    lpq.convert(net, recipe, include="all")
    for layer in (net.first, net.second):
        for value in layer.static_values().values():
            value.fill_(50.0)
    style = tp.ColwiseParallel(input_layouts=Shard(0), overlap=overlap)
    parallelize_module(net, mesh_of(device=device), {"first": style, "second": style})
    return net


def step(net: Any, device: str) -> dict[str, Tensor]:
    """Outputs and gradients of a step."""
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    x = torch.randn(TOKENS, WIDTH, generator=draw)
    x[-1, -1] = 100.0 * (1 + dist.get_rank())  # the last rank has the largest of all
    x = x.to(device, torch.bfloat16).requires_grad_()
    torch.manual_seed(2)
    first, second = net(x)
    torch.autograd.backward([first, second], [torch.randn(first.shape, generator=draw).to(first) for _ in range(2)])
    assert x.grad is not None
    grads = {name: whole(p.grad) for name, p in net.named_parameters() if p.grad is not None}
    return {"first": first.detach(), "second": second.detach(), "dx": x.grad} | grads


def noted(net: nn.Module, device: str) -> tuple[dict[str, Tensor], Products]:
    """A step, and the operands of the products that layers make of whole operands."""
    with multiplied(net) as products:
        return step(net, device), products


def compare(recipe: str, bias: bool, gather: Any, device: str = "cpu", overlapped: int = 1) -> None:
    """Overlapped layers equal others. ``gather`` takes the place of symmetric memory, unless it is None. So many
    layers overlap: the first, and the second one too if it does not share the input."""
    plain, products = noted(made(recipe, bias, False, device), device)
    with nullcontext() if gather is None else transport(gather) as gathers:
        found, others = noted(made(recipe, bias, True, device), device)
    assert gathers is None or len(gathers) == overlapped
    assert len(others) == len(products) - overlapped
    by_pieces = ("first", "second")[:overlapped]
    for name, (left, right, options) in zip(by_pieces, products, strict=False):
        pieces = [left.narrow(0, r * TOKENS, (r + 1) * TOKENS) for r in range(dist.get_world_size())]
        expected = torch.cat([lpq.gemm(piece, right, **options) for piece in pieces if piece is not None])
        assert torch.equal(found[name], expected), "the product of the pieces"
        assert (found[name] - plain[name]).norm() < 1e-2 * plain[name].norm()
    for (other, _, _), (left, _, _) in zip(others, products[overlapped:], strict=True):
        assert equal_bytes(other.tensors(), left.tensors()), "the operand that other products are made of"
    for name in plain.keys() - set(by_pieces):
        assert torch.equal(found[name], plain[name]), name
