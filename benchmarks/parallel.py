"""A column-parallel layer and a row-parallel one behind it, on a sequence that ranks share out: a step of both.

``y = down(up(x))``: each rank has its part of the sequence, forward gathers the input of ``up`` and scatters the sum of
what ``down`` returns; backward gathers and scatters the other way round. Contenders take turns.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as styles
from torch.distributed.tensor.parallel import parallelize_module

import lpq
from benchmarks import overlap
from benchmarks.contenders import compile_afresh
from benchmarks.shapes import Pair
from benchmarks.stack import Failed, gathered_in, together
from lpq.bench.contenders import Contender
from lpq.bench.timing import Effort, on_gpu
from lpq.distributed import tensor_parallel

COUNT = 12
"""Steps in a sample: the same on all ranks, as they meet in each."""
RECIPES = ("fp8-current", "fp8-row", "mxfp8", "nvfp4")


IN_ORDER, OVERLAPPED = ", in order", ", overlapped"
"""Compiled in the order in which lpq waits, where Inductor looks for the one that takes the least memory; and with an
input that is multiplied as it arrives, too."""


def contenders(recipes: tuple[str, ...]) -> list[Contender]:
    """PyTorch in bf16 and lpq's recipes, without the compiler and with it, each with collectives that overlap products
    and without. In bf16 these are the compiler's work."""
    made = []
    for compiled in (False, True):
        made.append(Contender("torch", "bf16", compiled))
        made += [Contender("torch", f"bf16{OVERLAPPED}", True)] if compiled else []
        for recipe in recipes:
            convert = partial(lpq.convert, policy=recipe, include="all")
            hows = ("", IN_ORDER, OVERLAPPED) if compiled else ("", OVERLAPPED)
            made += [Contender("lpq", f"{recipe}{how}", compiled, convert) for how in hows]
    return made


class Both(nn.Module):
    """The two layers."""

    def __init__(self, shape: Pair) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y


def measure(everyone: list[Contender], shape: Pair, effort: Effort, device: torch.device) -> Iterator[dict[str, Any]]:
    """Milliseconds of a step of each contender and the bytes that a rank gathers in it; the whole at the end."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    peers = dist.new_group(backend="gloo")
    steps: dict[str, Callable[[], None]] = {}
    rows: list[dict[str, Any]] = []
    compile_afresh()
    for contender in everyone:
        row = contender.record() | {"failure": None}
        try:
            with together(peers):
                step = _step(contender, shape, mesh)
                step()
                if not contender.recipe.endswith(OVERLAPPED):  # these read memory, which is no collective
                    row["gathered_bytes"] = gathered_in(step, contender)
            steps[contender.name] = step
        except Failed as error:  # what one cannot do is a result, and the others go on
            row["failure"] = str(error)
        if dist.get_rank() == 0:
            print(f"{contender.name}: {row['failure'] or 'runs'}", file=sys.stderr)
        rows.append(row)
    taken = on_gpu(steps, effort, COUNT)
    steps.clear()
    compile_afresh()  # NCCL waits, when the group is destroyed, for recorded graphs that use it
    gc.collect()
    for row, contender in zip(rows, everyone, strict=True):
        if contender.name in taken:
            row.update(taken[contender.name].record("ms"))
    yield {**asdict(shape), "ranks": dist.get_world_size(), "results": rows}


def _step(contender: Contender, shape: Pair, mesh: DeviceMesh) -> Callable[[], None]:
    """Forward and backward of both layers; the gradients are dropped."""
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model: nn.Module = contender.convert(Both(shape).bfloat16())
    made: Any = styles if contender.library == "torch" else tensor_parallel
    sequence, overlapped = Shard(0), contender.recipe.endswith(OVERLAPPED)
    options = {"overlap": overlapped} if contender.library == "lpq" else {}
    plan = {
        "up": made.ColwiseParallel(input_layouts=sequence, **options),
        "down": made.RowwiseParallel(output_layouts=sequence),
    }
    parallelize_module(model, mesh, plan)
    if contender.compiled:
        in_order = contender.recipe.endswith((IN_ORDER, OVERLAPPED))
        how = overlap.options(contender, overlapped, in_order, mesh.get_group())
        model.compile(fullgraph=True, dynamic=False, **how)
    torch.manual_seed(1 + mesh.get_local_rank())
    mine = shape.tokens // mesh.size()
    x = torch.randn(mine, shape.hidden, device=mesh.device_type, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(mine, shape.hidden, device=mesh.device_type, dtype=torch.bfloat16)
    wanted = [x, *model.parameters()]

    def step() -> None:
        torch.autograd.grad(model(x), wanted, dy)

    return step
