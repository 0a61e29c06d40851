"""A model under FSDP2 whose shards are measured and encoded together, beside one whose shards are so one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import imitated
import pytest
import torch
from ranks import fully_shard
from support.comparing import expect_bytes
from support.modes import Watched
from support.several import bind_real, real_transposes, side_real
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import lpq
from lpq.distributed import gather_arrivals, gather_loads, several_matrices
from lpq.kernels.cuda import CudaKernel
from lpq.operations import derived_operands
from lpq.torch_private.dispatch import modes

STEPS = 4
ENCODED = {"fp8-current": 8, "fp8-delayed": 12}
"""How often a unit is encoded, of two units in three steps of two passes each: once in a step or, by statistics of
steps before, in each pass, which moves them; and again where it was written to. In the last step operators encode."""
WRITTEN = {0: "between steps", 1: "by rank", 2: "before backward"}
"""The steps after which, or in which, a weight is written to, and where."""


def trained(recipe: str, width: int, inner: int, stays: bool = False) -> list[Tensor]:
    """The results, gradients and weights of a few steps, each of two passes. Weights are written to beside them.
    ``stays``: whether they stay gathered for backward, so that both operands are sent at once."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(width, inner), nn.LayerNorm(inner), nn.Linear(inner, width, bias=False))
        for _ in range(2)
    ]
    model = lpq.convert(nn.Sequential(*blocks), recipe, weights="high_precision")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy, reshard_after_forward=not stays)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out: list[Tensor] = []
    for step in range(STEPS):
        x = torch.randn(32, width, generator=torch.Generator().manual_seed(step), requires_grad=True)
        weight, written = model[0][0].weight, WRITTEN.get(step)
        for _ in range(2):
            with Watched() if step == STEPS - 1 else nullcontext():  # what is encoded by operators is sent likewise
                y = model(x)
                if written == "before backward" and recipe != "fp8-delayed":  # which refuses that
                    weight.data.mul_(0.5)
                y.square().mean().backward()
            out += [y.detach(), x.grad.clone()]  # type: ignore[union-attr]
        out += [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if written == "between steps":
                weight.mul_(3.0)
            elif written == "by rank":
                weight.to_local().mul_(1.0 + torch.distributed.get_rank())
    return [*out, *(p.full_tensor() for p in model.parameters())]  # type: ignore[attr-defined]


def check(
    rank: int, recipe: str, wanted: set[str], sizes: tuple[int, int], stays: bool = False, large: bool = False
) -> None:
    """``wanted``: the kernels that are launched; ``sizes``: the inputs and the outputs of a layer; ``stays``: as in
    ``trained``; ``large``: whether these weights are large, so that each buffer travels by itself."""
    expected, names, together = trained(recipe, *sizes, stays), Counter[str](), set[bool]()
    by_buffer = gather_loads.sent_bytes

    def sent_bytes(buffers: Any) -> list[Tensor]:
        assert modes() or not stays, (
            "a unit whose weights are encoded together sends their memory, and not buffer by buffer"
        )
        return by_buffer(buffers)

    class Arrivals(gather_arrivals.Arrivals):
        def place(self, staying: Sequence[Tensor]) -> None:
            together.add(self.flat)
            super().place(staying)

    def launch(self: CudaKernel, device: int, macros: tuple[str, ...], blocks: int, *arguments: float) -> None:
        names[self.name] += 1
        imitated.launch(self, macros, blocks, arguments, backwards=len(names) % 2 == 0)

    with pytest.MonkeyPatch.context() as patch, imitated.in_place_of_launches(launch):
        patch.setattr(several_matrices, "_several_of", bind_real)
        patch.setattr(several_matrices, "_side_of", side_real)
        patch.setattr(several_matrices, "serves", lambda kernel, device: True)
        patch.setattr(derived_operands, "_bound_several", real_transposes)
        patch.setattr(gather_arrivals, "serves", lambda kernel, device: True)
        patch.setattr(gather_loads, "sent_bytes", sent_bytes)
        patch.setattr(gather_loads, "Arrivals", Arrivals)
        if large:
            patch.setattr(gather_arrivals, "FLAT", 0)
        made = trained(recipe, *sizes, stays)
    assert set(names) == wanted
    assert together == {not large}
    assert names["encode_several"] == ENCODED.get(recipe, 0), names
    expect_bytes(made, expected, recipe)
