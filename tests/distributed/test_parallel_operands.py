"""Tensor parallelism multiplies, on each rank, parts of the very operands that one process multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import counted_format
import pytest
import residual_format
import torch
import torch.distributed as dist
import value_formats
import whole_formats
from products import multiplied
from ranks import mesh_of, on_ranks
from support.comparing import equal_bytes
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from lpq.core import Storage
from lpq.distributed import tensor_parallel as tp
from lpq.distributed.shardability import why_high
from lpq.nn import linear
from lpq.operations import reduce_statistics
from lpq.operations.cut import Cut
from lpq.operations.operands import encode_operands

ROWS, COLS, BATCH, TOKENS = 256, 256, 2, 256
MODES = ("columns", "columns of a sequence", "rows", "rows of a sequence")
SEEDS = torch.tensor([7, 11, 13]) << 33
OTHER = {
    "columns": ({"w", "dy"}, set()), "columns of a sequence": ({"x", "w", "dy"}, {"x"}), "rows": ({"x", "w"}, set()),
    "rows of a sequence": ({"x", "w", "dy"}, {"dy"}),
}  # fmt: skip
"""Which operands the first rank, and the last one, multiplies otherwise if nothing is reduced: only the last has the
largest elements, and codes that are gathered go with one rank's scale."""
ROTATED = {"nvfp4(rht=true)": "nvfp4()", "nvfp4(rht=true, stochastic=true)": "nvfp4(block=16x16)",
           "mxfp4(scale=ceil, rht=true, stochastic=true)": "mxfp4(scale=ceil)",
           "hybrid(row=mxfp8, col=nvfp4(rht=true))": "mxfp8()"}  # fmt: skip
"""Quantizers of x and dy with which the weight is not rotated, and what it has."""
EDEN = "nvfp4(stochastic=eden)"
BITS_OF_ROW = "hybrid(row=mxfp8, col=nvfp4(stochastic=true), col_source=row)"
KINDS = ["fp8(scaling=delayed)", "fp8(scaling=row)", "nvfp4(rht=true, stochastic=true)", EDEN, BITS_OF_ROW]
"""States, a statistic along what is cut, random bits, a rotation that is drawn, random bits for a column operand that
is made of the row operand. The conformance kit encodes and gathers parts in every format, by every cut, also with known
scales and with sums; here layers are seen to hand in their cut, state and seed."""


def _style(mode: str) -> Any:
    sequence = Shard(1) if "sequence" in mode else None
    columns = mode.startswith("columns")
    return tp.ColwiseParallel(input_layouts=sequence) if columns else tp.RowwiseParallel(output_layouts=sequence)


def _tensors(step: int) -> tuple[Tensor, Tensor]:
    """x and dy, with their largest element where only the last rank has it, however they are shared out."""
    draw = torch.Generator().manual_seed(step)
    x, dy = (torch.randn(BATCH, TOKENS, size, generator=draw).bfloat16() for size in (COLS, ROWS))
    x[-1, -1, -1], dy[-1, -1, -1] = 300.0, -200.0
    return x.to(_device()), dy.to(_device())


def _device() -> str:
    """Where this is tried: on GPUs, if the ranks have them."""
    return "cuda" if "nccl" in dist.get_backend_config() else "cpu"


def _own(tensor: Tensor, dim: int | None) -> Tensor:
    """This rank's part of a tensor."""
    return tensor if dim is None else tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def _layer(text: str) -> lpq.nn.Linear:
    torch.manual_seed(0)
    text = text if "(" in text else f"{text}()"
    recipe = f"x={text}, w={ROTATED.get(text, text)}, dy={text}"
    layer = lpq.nn.Linear(COLS, ROWS, bias=False, dtype=torch.bfloat16, recipe=recipe).to(_device())
    with torch.no_grad():
        layer.weight[-1, -1] = 100.0
        for value in layer.static_values().values():
            value.fill_(50.0)
    return layer


def _step(layer: lpq.nn.Linear, mode: str | None, step: int) -> None:
    x, dy = _tensors(step)
    if mode is not None:
        of_x = {"columns": None, "columns of a sequence": 1}.get(mode, 2)
        of_dy = {"rows": None, "rows of a sequence": 1}.get(mode, 2)
        x, dy = _own(x, of_x), _own(dy, of_dy)
    layer(x.requires_grad_()).backward(dy)


def _part(operand: Storage | None, dim: int | None) -> list[Tensor]:
    assert operand is not None
    size = 0 if dim is None else operand.shape[dim] // dist.get_world_size()
    start = size * dist.get_rank()
    part = operand if dim is None else operand.narrow(dim, start, start + size)
    assert part is not None
    return part.tensors()


def different(text: str, mode: str) -> set[str]:
    """Which of x, w and dy this rank does not multiply as one process does."""
    ranks = dist.get_world_size()
    layer, whole = _layer(text), _layer(text)
    parallelize_module(layer, mesh_of(device=_device()), _style(mode))
    _step(layer, mode, 0)
    _step(whole, None, 0)
    states, recipe = whole.states(), whole.recipe
    assert recipe is not None
    (x, dy), expected = _tensors(1), {}
    for i, (name, tensor) in enumerate({"x": x, "w": whole.weight, "dy": dy}.items()):
        matrix, quantizer = tensor.detach().reshape(-1, tensor.shape[-1]), getattr(recipe, name)
        seed = SEEDS[i].to(_device()) + ranks - 1  # the largest of the ranks'
        expected[name] = encode_operands(quantizer, matrix, state=states.get(name), seed=seed)
    with multiplied(layer) as products:
        _step(layer, mode, 1)
    of_x, of_w, of_dy = expected["x"], expected["w"], expected["dy"]
    cut = (None, 0, 1, 1, 0, None) if mode.startswith("columns") else (1, 1, None, 0, None, 0)
    wanted = list(zip((of_x.row, of_w.row, of_dy.row, of_w.col, of_dy.col, of_x.col), cut, strict=True))
    names, found = ("x", "w", "dy", "w", "dy", "x"), [operand for pair in products for operand in pair[:2]]
    wrong = set()
    for name, operand, (whole_operand, dim) in zip(names, found, wanted, strict=True):
        if not equal_bytes(operand.tensors(), _part(whole_operand, dim)):
            wrong.add(name)
    _step(whole, None, 1)
    for name, memory in whole.memories().items():
        assert torch.equal(getattr(layer, name).to_local(), memory), name
    return wrong


def same_operands(rank: int, text: str, modes: Sequence[str]) -> None:
    _register()
    with pytest.MonkeyPatch.context() as patch:
        for draw in ("drawn_by_operator", "drawn"):  # traced, and not
            patch.setattr(linear, draw, lambda *_: SEEDS.to(_device()) + rank)
        assert {mode: different(text, mode) for mode in modes} == {mode: set() for mode in modes}


def _register() -> None:
    for formats in (counted_format, value_formats, whole_formats, residual_format):
        formats.register()


@pytest.mark.parametrize("text", KINDS)
@on_ranks(2)
def test_operands_of_a_sequence(rank: int, text: str) -> None:
    same_operands(rank, text, MODES[1::2])


@pytest.mark.parametrize("text", ["fp8(scaling=delayed)", "nvfp4(rht=true, stochastic=true)"])
@on_ranks(2)
def test_without_a_sequence(rank: int, text: str) -> None:
    same_operands(rank, text, MODES[::2])


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_without_the_reduction_each_rank_has_another_scale(rank: int, mode: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce_statistics, "reduce_max", lambda values, group: list(values))
        assert different("fp8", mode) == OTHER[mode][rank]


@on_ranks(2)
def test_operands_are_sent_if_they_are_few_bytes(rank: int) -> None:
    residual_format.register()
    cut = Cut(0, rank, 2, TOKENS // 2)
    for text, alone, together in (
        ("mxfp8", None, None),  # 0.52, and 1.03 together: the second one travels while the first is multiplied
        ("hybrid(row=fp8, col=identity)", None, "1.50"),
        ("residual(base=fp8, rest=mxfp8)", "1.02", "2.03"),  # alone it is waited for
        (BITS_OF_ROW, None, None),  # each rank makes the column operand, with the seed that all have
        (f"hybrid(row=nvfp4, col={EDEN}, col_source=row)", None, None),
    ):
        quantizer = lpq.quantizer(text)
        for col, share in ((False, alone), (True, together)):
            found = why_high(quantizer, True, col, cut, TOKENS, COLS, torch.bfloat16)
            wanted = None if share is None else f"the operands that are wanted together would be {share} of that"
            assert found == wanted, (text, col, found)
