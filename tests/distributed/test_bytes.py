"""The bytes that travel: forward gathers row operands, backward column operands, a step reduces statistics once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import on_ranks
from sharded import SMALL, W8, How, batch, built, same_weights, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer

import lpq
from lpq.core import QuantizedTensor
from lpq.observe import Collective, collectives, gathered_bytes
from lpq.optim import MasterWeights


@dataclass(frozen=True)
class Sent:
    """The bytes sent for one operand."""

    bits: int
    """Of an element."""
    scale: int = 0
    """Bytes of a scale; 0: ranks know the scales from statistics."""
    block: tuple[int, int | None] = (1, None)
    """The elements of one scale."""

    def bytes(self, rows: int, cols: int) -> int:
        down, across = self.block
        return rows * cols * self.bits // 8 + self.scale * (rows // down) * (cols // (across or cols))


FP8 = Sent(8)
FP8_ROW = Sent(8, 4, (1, None))
FP8_SQUARE = Sent(8, 4, (128, 128))
MXFP8 = Sent(8, 1, (1, 32))
NVFP4 = Sent(4, 1, (1, 16))
NVFP4_SQUARE = Sent(4, 1, (16, 16))
BF16 = Sent(16)
REMEMBERED = 3 * (1024 + 1)
"""Of x, w and dy of a layer with delayed scaling: the amaxes of earlier steps, and what follows from them."""


@dataclass(frozen=True)
class Travels:
    """The bytes sent for one weight."""

    row: Sent
    col: Sent
    derived: bool = False
    """The column operand follows from the row operand: where both are wanted, only that is sent."""
    amaxes: int = 0
    """That cover rows of several ranks."""
    amaxes_of_columns: int = 0
    """The same, of each column."""
    remembered: int = 0
    """Numbers that layers remember across steps."""

    def forward(self, rows: int, cols: int) -> int:
        return self.row.bytes(rows, cols)

    def backward(self, rows: int, cols: int) -> int:
        return self.row.bytes(rows, cols) if self.derived else self.col.bytes(cols, rows)

    def both(self, rows: int, cols: int) -> int:
        """By one gather for both directions: of both operands or, if that is less, of the weight."""
        operands = self.forward(rows, cols) + (0 if self.derived else self.backward(rows, cols))
        return min(operands, BF16.bytes(rows, cols))

    def measured(self, rows: int, cols: int) -> int:
        """The statistics that are reduced."""
        return 4 * (self.amaxes + self.amaxes_of_columns * cols)


TRAVELS = {
    "fp8-current": Travels(FP8, FP8, derived=True, amaxes=1),
    "fp8-delayed": Travels(FP8, FP8, derived=True, amaxes=1, remembered=REMEMBERED),
    "fp8-row": Travels(FP8_ROW, FP8, amaxes_of_columns=1),
    "fp8-block": Travels(FP8_SQUARE, FP8_SQUARE, derived=True),
    "mxfp8": Travels(MXFP8, MXFP8),
    "nvfp4": Travels(NVFP4_SQUARE, NVFP4_SQUARE, derived=True, amaxes=1),
    W8.format("nvfp4()"): Travels(NVFP4, NVFP4, amaxes=2),
    W8.format("identity(dtype=bf16)"): Travels(BF16, BF16, derived=True),
    W8.format("hybrid(row=mxfp8, col=nvfp4)"): Travels(MXFP8, NVFP4, amaxes=1),
    W8.format("hybrid(row=nvfp4, col=mxfp8)"): Travels(NVFP4, MXFP8, amaxes=1),
    W8.format("hybrid(row=nvfp4, col=identity(dtype=bf16))"): Travels(NVFP4, BF16, amaxes=1),
    W8.format("hybrid(row=fp8, col=nvfp4)"): Travels(FP8, NVFP4, amaxes=2),
    W8.format("hybrid(row=nvfp4, col=mxfp8, col_source=row)"): Travels(NVFP4, MXFP8, derived=True, amaxes=1),
    W8.format("hybrid(row=mxfp8, col=fp8, col_source=row)"): Travels(MXFP8, FP8, derived=True),
}
WIDTHS = [256, 512, 256]
SHAPES = [(rows, cols) for cols, rows in pairwise(WIDTHS)]
STORED = ("quantized", "masters")
"""How weights are stored, beside in high precision: one or the other with each recipe."""


class _Linears(nn.Sequential):
    """A model of nothing but converted weights."""


def _sharded(
    recipe: str, weights: str = "high_precision", reshard: bool = True, device: str = "cpu"
) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    net = _Linears(*(nn.Linear(cols, rows, bias=False) for rows, cols in SHAPES)).to(device)
    lpq.convert(net, recipe, weights="quantized" if weights == "masters" else weights)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)  # fp32 from torch 2.15 on
    for part in (*net, net):  # each on a mesh of its own: several meshes of the same ranks are no difference
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    made = AdamW(net.parameters(), lr=1e-3)  # it writes twice to each weight
    return net, made if weights == "high_precision" else MasterWeights(made, keep=weights == "masters")


@dataclass
class Step:
    """The collectives of one step."""

    forward: list[Collective]
    backward: list[Collective]
    update: list[Collective]


def _step(net: nn.Module, optimizer: Optimizer, device: str = "cpu") -> Step:
    x = torch.randn(32, WIDTHS[0], dtype=torch.bfloat16, device=device, requires_grad=True)
    with collectives() as forward:
        loss = net(x).float().square().mean()
    with collectives() as backward:
        loss.backward()
    with collectives() as update:
        optimizer.step()
        optimizer.zero_grad()
    return Step(forward, backward, update)


def _of(kind: str, sizes: list[int]) -> list[Collective]:
    return [Collective(kind, size) for size in sizes]


def _reduction(sizes: list[int]) -> list[Collective]:
    """One collective for all of them; none where there is nothing to reduce."""
    return _of("all_reduce", [sum(sizes)] if sum(sizes) else [])


def every_collective_of_a_step(rank: int, recipes: Iterable[str] = TRAVELS, device: str = "cpu") -> None:
    """There are no others. In forward no reduction, in backward that of gradients only."""
    for number, recipe in enumerate(recipes):
        travels = TRAVELS[recipe]
        measured = [travels.measured(*shape) for shape in SHAPES]
        remembered = [4 * travels.remembered] * len(SHAPES)
        for weights in ("high_precision", STORED[number % 2]):
            for reshard in (True, False) if weights == "high_precision" and number % 2 == 0 else (True,):
                about = (recipe, weights, reshard)
                net, optimizer = _sharded(recipe, weights, reshard, device)
                first, step = _step(net, optimizer, device), _step(net, optimizer, device)
                gathered = [(travels.forward if reshard else travels.both)(*shape) for shape in SHAPES]
                again = [travels.backward(*shape) for shape in reversed(SHAPES)] if reshard else []
                gradients = [BF16.bytes(*shape) for shape in reversed(SHAPES)]
                assert step.forward == _of("all_gather", gathered), (about, step.forward)
                assert [c for c in step.backward if c.kind == "all_gather"] == _of("all_gather", again), about
                others = [c for c in step.backward if c.kind != "all_gather"]
                assert others == _of("reduce_scatter", gradients), (about, others)
                # whether each weight changes, where it has no master that would tell
                changes = [4] * len(SHAPES) if weights == "quantized" else []
                assert step.update == _reduction(measured + remembered + changes), (about, step.update)
                # what was initialised is measured when it is gathered first; what is stored quantized has been
                begun = _reduction(measured if weights == "high_precision" else [])
                assert first == Step(begun + step.forward, step.backward, step.update), (about, first)
                assert _reported(net) == _in_words(gathered, again[::-1] or [0, 0]), about


@on_ranks(2)
def test_every_collective(rank: int) -> None:
    every_collective_of_a_step(rank)


def _in_words(forward: list[int], backward: list[int]) -> list[tuple[str, ...]]:
    """Of each weight the shares of bf16."""
    sizes = [2 * rows * cols for rows, cols in SHAPES]
    each = zip(forward, backward, sizes, strict=True)
    return [(f"{there / size:.2f}", f"{back / size:.2f}") for there, back, size in each]


def _reported(net: nn.Module) -> list[tuple[str, ...]]:
    """The same in the report."""
    found = []
    for entry in lpq.report(net).weights:
        shares = re.search(r"gathered as .*: (\S+) of bf16(?: in forward, (\S+) in backward)?", entry.note)
        assert shares is not None
        assert (shares[2] is None) == ("of bf16, once for forward and backward" in entry.note)
        found.append((shares[1], shares[2] or "0.00"))
    return found


@on_ranks(2)
def test_what_is_less_travels(rank: int) -> None:
    """Both operands of these are more than the weight, which is encoded where it arrives, into the same bytes."""
    for recipe in ("mxfp8", W8.format("hybrid(row=fp8(scaling=delayed, history=2), col=mxfp8)")):
        for way in ({"reshard": False, "accumulate": 2, **SMALL}, {"checkpoint": True, **SMALL}):
            (losses, a), (found, net) = (
                train(How(recipe, w, mixed=True, blocks=1, **way)) for w in (None, "high_precision")
            )
            assert losses == found, (recipe, way)
            same_weights(a, net, (recipe, way))
            note = lpq.report(net).weights[0].note
            assert ("in high precision, for its operands would be 1.0" in note) == ("reshard" in way), note


@on_ranks(2)
def test_nothing_escapes_the_count(rank: int) -> None:
    """Also what a tensor does inside itself: a write to a stored weight, and putting it together."""
    rows, cols = SHAPES[0]
    for weights in ("high_precision", "quantized"):
        net, optimizer = _sharded("fp8-current", weights)
        _step(net, optimizer)
        stored = weights == "quantized"
        assert isinstance(net[0].weight._local_tensor, QuantizedTensor) == stored
        with torch.no_grad(), collectives() as seen:
            net[0].weight.fill_(2)
        assert seen == [Collective("all_reduce", 4)] * stored, (weights, seen)
        with collectives() as seen:
            net[0].weight.full_tensor()  # of a stored weight what it decodes to
        assert seen == [Collective("all_gather", 4 * rows * cols)], (weights, seen)
        with collectives() as seen:
            net[0].weight.to_local().clone()
        assert seen == []


@on_ranks(2)
def test_every_kind_is_counted(rank: int) -> None:
    """Those that libraries call, and those that compiled code and DTensors do, also many in one."""
    world = dist.group.WORLD
    x, half, double = torch.ones(4, 4), torch.empty(2, 4), torch.empty(8, 4)

    def together(collective: Callable[..., Any], *args: Any) -> None:
        with dist._coalescing_manager():
            for _ in range(2):
                collective(*args)

    for collective, expected in (
        (lambda: dist.all_reduce(x), Collective("all_reduce", 64)),
        (lambda: dist.all_gather([half, half], x[:2]), Collective("all_gather", 64)),
        (lambda: dist.all_gather_into_tensor(double, x), Collective("all_gather", 128)),
        (lambda: dist.reduce_scatter_tensor(half, x), Collective("reduce_scatter", 64)),
        (lambda: dist.reduce_scatter(x, [x, x]), Collective("reduce_scatter", 128)),
        (lambda: dist.broadcast(x, 0), Collective("broadcast", 64)),
        (lambda: together(dist.all_reduce, x), Collective("all_reduce", 128)),
        (lambda: together(dist.all_gather_into_tensor, double, x), Collective("all_gather", 256)),
        (lambda: together(dist.reduce_scatter_tensor, half, x), Collective("reduce_scatter", 128)),
        (lambda: functional.all_reduce(x, "sum", world), Collective("all_reduce", 64)),
        (lambda: functional.all_gather_tensor(x, 0, world), Collective("all_gather", 128)),
        (lambda: functional.reduce_scatter_tensor(x, "sum", 0, world), Collective("reduce_scatter", 64)),
        (lambda: functional.all_reduce_coalesced([x, x], "sum", world), Collective("all_reduce", 128)),
        (lambda: functional.all_gather_into_tensor_coalesced([x, x], world), Collective("all_gather", 256)),
        (
            lambda: functional.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], world),
            Collective("reduce_scatter", 128),
        ),
    ):
        with collectives() as seen:
            result = collective()
            for part in result if isinstance(result, list) else [result]:
                _ = part + 0 if isinstance(part, torch.Tensor) else part  # here it is waited for
        assert seen == [expected], (expected, seen)


@on_ranks(2)
def test_a_checkpointed_block_gathers_both_in_backward(rank: int) -> None:
    how = How("mxfp8", checkpoint=True)
    bare = How("mxfp8")
    sizes = []
    for h in (bare, how):
        net = built(h)
        with collectives() as forward:
            loss = net(batch(0, h)).square().mean()
        with collectives() as backward:
            loss.backward()
        sizes.append((gathered_bytes(forward), gathered_bytes(backward)))
    operand, biases = 2 * 2 * (512 * 256) * (1 + 1 / 32), 2 * 4 * (512 + 256)  # of both layers, from both ranks
    assert sizes == [(operand + biases, operand + biases), (operand + biases, 2 * operand + biases)], sizes


@on_ranks(2)
def test_freed(rank: int) -> None:
    """Gathered memory is given back, and an operand that is not there is not read."""
    net = built(How("mxfp8"))
    seen: dict[str, tuple[int, int]] = {}

    def look(layer: Any, when: str) -> None:
        weight = layer.weight
        assert isinstance(weight, QuantizedTensor)
        seen[when] = tuple(s.tensors()[0].untyped_storage().size() for s in (weight.row, weight.col))
        kept.append(weight)

    kept: list[QuantizedTensor] = []
    layer = net[0].up
    layer.register_forward_hook(lambda m, a, o: look(m, "forward"))
    layer.register_full_backward_hook(lambda m, a, o: look(m, "backward"))
    x = batch(0, How("mxfp8")).requires_grad_()
    net(x).square().mean().backward()
    data = 512 * 256
    assert seen == {"forward": (data, 0), "backward": (0, data)}
    assert all(t.untyped_storage().size() == 0 for w in kept for _, s in w.operands for t in s.tensors())
    with pytest.raises(RuntimeError, match="is not there"):
        kept[0].dequantize()
