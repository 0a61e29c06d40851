"""Tensors that travel while a layer multiplies: the order of gathers and products, on several ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import counted_format
import pytest
import torch
import value_formats
from overlapping import TOKENS, WIDTH, by_gloo, compare, only_own, swapped, transport
from pool import forget_compiled
from ranks import mesh_of, on_ranks
from support.comparing import equal
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.distributed import tensor_parallel as tp
from lpq.torch_private import symmetric
from lpq.torch_private.dispatch import TorchDispatchMode, schema_of

NAMED = {
    "all_gather_into_tensor_coalesced": "gather", "reduce_scatter_tensor": "sum", "all_reduce": "sum",
    "wait_tensor": "wait", "gemm": "multiply",
}  # fmt: skip


class _Order(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The order in which collectives begin, are waited for, and products are made; the same several times is one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = NAMED.get(schema_of(func).name.partition("::")[2])
        if name is not None and self.seen[-1:] != [name]:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


COLUMNS, ALL_COLUMNS = tp.ColwiseParallel(input_layouts=Shard(0)), tp.ColwiseParallel()
ROWS = tp.RowwiseParallel(output_layouts=Shard(0))


@pytest.mark.parametrize(
    ("style", "recipe", "expected"),
    [
        # The column operand of the gradient travels while dx is made, if there is one to send.
        (ROWS, "nvfp4", "sum wait gather wait multiply wait multiply"),
        (ROWS, "fp8-current", "sum wait gather wait multiply"),
        # dx is summed while dw is made, unless another layer may share the input.
        # Statistics that states remember are reduced at the end, with nothing to wait for it.
        (COLUMNS, "fp8-delayed", "gather multiply sum wait multiply wait sum wait"),
        (ALL_COLUMNS, "fp8-delayed", "multiply sum multiply wait sum wait"),
        (COLUMNS, "fp8-current", "gather sum wait multiply wait multiply sum wait"),
    ],
)
@on_ranks(2)
def test_tensors_travel_while_products_are_made(rank: int, style: Any, recipe: str, expected: str) -> None:
    net = _layer(style, recipe, bias=False)
    features = WIDTH // 2 if isinstance(style, tp.RowwiseParallel) else WIDTH
    y = net(torch.randn(TOKENS, features).bfloat16().requires_grad_())
    order = _Order()
    with order:
        y.sum().backward()
    assert order.seen == expected.split(), order.seen


def equals(rank: int, recipe: str, bias: bool = False, overlapped: int = 1, turn: int = 1, device: str = "cpu") -> None:
    """GPUs read each other's memory, CPUs gather by gloo."""
    for formats in (counted_format, value_formats):
        formats.register()
    compare(recipe, bias, partial(by_gloo, turn=turn) if device == "cpu" else None, device, overlapped)


@pytest.mark.parametrize(
    ("ranks", "recipe", "bias", "overlapped", "turn"),
    [
        *((2, recipe, False, 1, 1) for recipe in (
            "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4", "x=counted(), w=counted(), dy=mxfp8",
            *(f"x={name}, w={name}, dy=mxfp8" for name in value_formats.NAMES[1:]),
            "fprop=bf16, dgrad=mxfp8, wgrad=mxfp8", "x=fp8(static=true), w=fp8, dy=fp8",
        )),
        # statistics or random bits of their own
        (2, "fp8-delayed", False, 2, 1), (2, "x=nvfp4(stochastic=true), w=nvfp4(), dy=nvfp4()", False, 2, 1),
        (2, "nvfp4-eden", False, 2, 1),  # of whose row operand the column operand is made in backward
        # with a bias; parts arrive from the ranks after this one, or from the ranks before it
        (4, "fp8-current", True, 1, 1), (4, "mxfp8", True, 1, -1),
    ],
)  # fmt: skip
@on_ranks()
def test_an_input_that_is_multiplied_as_it_arrives(
    rank: int, ranks: int, recipe: str, bias: bool, overlapped: int, turn: int
) -> None:
    equals(rank, recipe, bias, overlapped, turn)


@pytest.mark.parametrize(
    ("gather", "words"), [(swapped, "the product of the pieces"), (only_own, "the operand that other products")]
)
@on_ranks(2)
def test_a_piece_in_a_wrong_place_is_found(rank: int, gather: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        compare("mxfp8", False, gather)


def _layer(style: Any, recipe: str = "mxfp8", device: str = "cpu", bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    net = lpq.convert(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias, dtype=torch.bfloat16)).to(device), recipe)
    return parallelize_module(net, mesh_of(device=device), {"0": style})


@on_ranks(2)
def test_it_overlaps_where_rows_of_a_rank_lie_side_by_side(rank: int) -> None:
    """Where symmetric memory serves, and where it does not."""
    tokens, batches = torch.ones(TOKENS, WIDTH), torch.ones(2, TOKENS, WIDTH)
    for dim, overlap, serves, x, expected in (
        (0, True, True, tokens, 1), (1, True, True, batches[:1], 1), (0, False, True, tokens, 0),
        (0, True, False, tokens, 0),
        (1, True, True, batches, 0),  # a rank's rows of two sequences do not lie side by side
        (0, True, True, tokens[:0], 0), (0, True, True, tokens[:10], 0),  # which is gathered in high precision
    ):  # fmt: skip
        net = _layer(tp.ColwiseParallel(input_layouts=Shard(dim), overlap=overlap))
        with transport(by_gloo) as seen:
            if not serves:
                symmetric.serves = lambda device: device.type == "cuda"
            y = net(x.bfloat16())
            noted = "it is multiplied as it arrives" in str(lpq.report(net))
        assert len(seen) == expected, (dim, overlap, serves, x.shape)
        assert noted is (overlap and serves)
        assert y.shape == (*x.shape[:dim], 2 * x.shape[dim], *x.shape[dim + 1 : -1], WIDTH // 2)


def compiled(rank: int, recipe: str, device: str = "cpu", steps: int = 2, **how: Any) -> None:
    """Bit for bit what is not compiled, by an operator in the graph."""
    found: list[list[Tensor]] = [[], []]
    for results, is_compiled in zip(found, (False, True), strict=True):
        net = _layer(tp.ColwiseParallel(input_layouts=Shard(0), overlap=True), recipe, device)
        if is_compiled:
            net.compile(fullgraph=True, **how)
        with transport(by_gloo) if device == "cpu" else nullcontext() as seen:
            for seed in range(steps):
                x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)
                y = net(x.requires_grad_())
                y.square().sum().backward()
                assert x.grad is not None
                results += [y.detach().clone(), x.grad.clone(), *(p.grad.to_local().clone() for p in net.parameters())]
                net.zero_grad()
        assert seen is None or len(seen) == steps
    forget_compiled()  # or recorded graphs would keep the group from ending
    assert equal(*found)


@on_ranks(2)
def test_compiled(rank: int) -> None:
    compiled(rank, "fp8-current", steps=1, backend="aot_eager")


@on_ranks(2)
def test_gpus_that_cannot_read_each_others_memory_are_refused(rank: int) -> None:
    words = r"layer 0, .* read each other's memory, which these cannot: no link\. Leave it out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "why_not", lambda mesh: "no link")
        for overlap in (False, True):
            with pytest.raises(RuntimeError, match=words) if overlap else nullcontext():
                _layer(tp.ColwiseParallel(input_layouts=Shard(0), overlap=overlap))
