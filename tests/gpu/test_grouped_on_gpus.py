"""Groups of rows on a GPU: the bytes of the reference on a CPU, the products up to sums, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

import lpq
from lpq.formats.layout import row_major
from lpq.formats.sections import bounds, starts, unit
from lpq.nn import GroupedLinear, functional
from lpq.operations import groups
from lpq.operations.binding import Operand
from lpq.operations.encoder import EncoderSpec
from lpq.testing.options import family

EVERY = [
    q for name in ("fp8", "mxfp8", "mxfp4", "nvfp4", "hybrid") for q in family(name).quantizers if not q.new_state()
]
RECIPES = [
    "bf16", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "mxfp4", "mxfp4-fwd-mxfp8-bwd", "nvfp4",
    "nvfp4-four-over-six", "nvfp4-eden", "mxfp8-one-copy",
    "nvfp4-row-fwd-mxfp8-bwd", "nvfp4-row-fwd-decoded-bwd",
    "nvfp4-fwd-mxfp8-bwd", "nvfp4-fwd-bf16-bwd",
    "x=fp8(), w=fp8(), dy=fp8()",
]  # fmt: skip
COUNTS = [0, 5, 130, 0, 16, 257, 0]
BEHIND = 7


def encoded(x: Tensor, offs: Tensor, quantizer: lpq.Quantizer, row: bool, col: bool, seeds: Tensor) -> list[Tensor]:
    both = groups.encode_groups(quantizer, x, offs, row=row, col=col, seeds=seeds)
    return [tensor for operand in both if operand is not None for tensor in operand.tensors]


def by_kernels(quantizer: lpq.Quantizer) -> bool:
    """Whether kernels encode its operands in groups: they cut no blocks of several rows from groups."""
    sides = quantizer.side("row"), quantizer.side("col")
    return all(buffer.block[0] in (1, None) for side in sides for buffer in side.layout)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rows(cols: int, dtype: torch.dtype, counts: list[int] = COUNTS) -> Tensor:
    """Each group's are three times as large as those before it; what is behind them is NaN."""
    torch.manual_seed(0)
    each = [3.0**i * torch.randn(n, cols) for i, n in enumerate(counts)]
    return torch.cat([*each, torch.full((BEHIND, cols), torch.nan)]).to(dtype)


def ends(counts: list[int] = COUNTS) -> Tensor:
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("quantizer", [*filter(by_kernels, EVERY)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_groups_have_the_bytes_of_the_reference(quantizer: lpq.Quantizer, dtype: torch.dtype) -> None:
    x, offs, seeds = rows(96, dtype), ends(), torch.arange(len(COUNTS)) - 3
    row, col = (not quantizer.side(d).plain or quantizer.col_source == "row" for d in ("row", "col"))
    alone = EncoderSpec(quantizer, (len(x), 96), dtype, x.device, row, col)
    wanted = groups.encode_groups_reference(x, offs, alone, seeds)
    there = x.cuda(), offs.cuda(), seeds.cuda()
    encoded(there[0], there[1], quantizer, row, col, there[2])  # kernels are compiled at first
    with waiting_is_an_error():
        found = encoded(there[0], there[1], quantizer, row, col, there[2])
    at = 0
    for is_wanted, direction, dim in ((row, "row", 0), (col, "col", 1)):
        if not is_wanted:
            continue
        side = quantizer.side(direction)
        shape = (len(x), 96) if dim == 0 else (96, len(x))
        end, begins = at + len(side.layout), starts(offs.tolist(), unit(side, dim))
        both = [
            Operand(side, shape, dtype, dim=dim, tensors=[t.cpu() for t in tensors[at:end]])
            for tensors in (found, wanted)
        ]
        for i, (start, stop) in enumerate(bounds(offs.tolist())):
            for a, b in zip(*(g.group(i, start, stop, begins[i]).tensors() for g in both), strict=True):
                first, second = (row_major(t).view(-1).view(torch.uint8) for t in (a, b))
                assert torch.equal(first, second), (str(quantizer), direction, i)
        at = end


@pytest.fixture
def same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's generator has other numbers than a CPU's."""
    monkeypatch.setattr(functional, "draw_seeds", lambda x, owner, count: torch.arange(count, device=x.device) - 5)


@pytest.mark.usefixtures("same_seeds")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("counts", [COUNTS, [0] * 7, [2000, 3000]], ids=["some", "none", "many"])
def test_a_layer_computes_what_the_cpu_does(recipe: str, counts: list[int]) -> None:
    here = GroupedLinear(len(counts), 128, 256, recipe=recipe, dtype=torch.bfloat16)
    there = GroupedLinear(len(counts), 128, 256, recipe=recipe, dtype=torch.bfloat16, device="cuda")
    there.load_state_dict(here.state_dict())
    x, dy, offs = rows(128, torch.bfloat16, counts), rows(256, torch.bfloat16, counts), ends(counts)
    found: dict[str, list[Tensor]] = {}
    for name, module in (("cpu", here), ("cuda", there)):
        leaf, other, at = x.to(name).requires_grad_(), dy.to(name), offs.to(name)
        for again in range(2):  # kernels are compiled at first
            with waiting_is_an_error() if name == "cuda" and again else nullcontext():
                y = module(leaf, at)
                gradients = torch.autograd.grad(y, (leaf, module.weight, module.bias), other)
        found[name] = [t.cpu() for t in (y.detach(), *gradients)]
    for name, a, b in zip(("y", "dx", "dw", "db"), found["cuda"], found["cpu"], strict=True):
        split = [t.split([*counts, BEHIND]) if name in ("y", "dx") else t.unbind() for t in (a, b)]
        for i, (part, wanted) in enumerate(zip(*split, strict=True)):
            if not wanted.any():
                assert not part.any(), (name, i, "what no group has is zero")
                continue
            error = (part.float() - wanted.float()).norm() / wanted.float().norm()
            assert error < 1e-2, (recipe, name, i, float(error))
