"""Models whose every tensor is known beforehand, whole or sharded by hand, and comparing them to the byte."""

from __future__ import annotations

from typing import Any

import torch
from support.comparing import as_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

import lpq
from lpq.core import QuantizedTensor, Storage

FORMATS = {
    "tensor": "fp8",
    "row": "fp8(scaling=row)",
    "block": "fp8(scaling=block)",
    "square": "fp8(scaling=block, block=128x128)",
    "mx": "mxfp8",
    "fp4": "nvfp4",
    "fp4_square": "nvfp4(block=16x16)",
    "rotated": "nvfp4(rht=true)",
    "identity": "identity(dtype=bfloat16)",
    "mixed": "hybrid(row=mxfp8, col=nvfp4(rht=true))",
    "mixed_back": "hybrid(row=nvfp4, col=fp8(scaling=row), col_source=row)",
    "delayed": "fp8(scaling=delayed, history=4)",
    "mixed_delayed": "hybrid(row=mxfp8, col=fp8(scaling=delayed, history=4))",
}
ROWS, COLS = 512, 96
POLICY = {
    "rules": [
        {"match": ["plain"], "recipe": "skip"}, {"match": "stored.*", "recipe": "mxfp8()"},
        {"match": "*", "until": 0.5, "recipe": "fp8(scaling=delayed, history=4)"}, {"match": "*", "recipe": "mxfp8()"},
    ],
}  # fmt: skip
STEPS = 10
CHANGED = 5
"""The step from which the policy has the other recipe."""


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """A layer for each format whose weight is stored quantized, an ordinary one, and one that remembers amaxes."""

    def __init__(self, seed: int, rows: int = ROWS, formats: dict[str, str] = FORMATS) -> None:
        super().__init__()
        self.stored = nn.ModuleDict({name: nn.Linear(COLS, rows, bias=False) for name in formats})
        self.plain = nn.Linear(COLS, 7)
        self.remembering = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        lpq.convert(self, POLICY, steps=STEPS)
        for i, (name, text) in enumerate(formats.items()):
            weight = lpq.quantizer(text).quantize(random((rows, COLS), 100 * seed + i))
            self.stored[name].weight = nn.Parameter(weight, requires_grad=False)
        with torch.no_grad():
            for i, (_, p) in enumerate(self.named_parameters()):
                if not isinstance(p, QuantizedTensor):
                    p.copy_(random(tuple(p.shape), 100 * seed + 50 + i))
            for i, (name, buffer) in enumerate(self.named_buffers()):
                if name != "scratch":
                    buffer.copy_(random(tuple(buffer.shape), 100 * seed + 70 + i).abs())


def share(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """Return this rank's part of a tensor; a quantized one is cut by the layouts that the formats declare."""
    for i, placement in enumerate(placements):
        if isinstance(placement, Shard):
            size = whole.shape[placement.dim]
            step = -(-size // mesh.size(i))
            start = min(mesh.get_local_rank(i) * step, size)
            whole = cut(whole, placement.dim, start, min(start + step, size))
    return whole


def cut(tensor: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """Rows (0) or columns (1) ``[start, stop)`` of a tensor."""
    if not isinstance(tensor, QuantizedTensor):
        return tensor.narrow(dim, start, stop - start).clone()

    def part(operand: Storage | None, along: int) -> Storage | None:
        if operand is None:
            return None
        narrowed = operand.narrow(along, start, stop)
        assert narrowed is not None, "that would cut a block"
        return narrowed.map(torch.clone)

    shape = [*tensor.shape]
    shape[dim] = stop - start
    return tensor.with_operands(part(tensor.row, dim), part(tensor.col, 1 - dim), tuple(shape), tensor.dtype)


def sharded(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """A tensor as a DTensor over this rank's share of it."""
    local, stride = share(whole, mesh, placements), (whole.shape[-1], 1)[-whole.dim() :]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=stride)


def shard(net: nn.Module, mesh: DeviceMesh, placements: tuple[Placement, ...] = (Shard(0),)) -> nn.Module:
    """Make every parameter of a model a DTensor."""
    for module in net.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            made = sharded(param.detach(), mesh, placements)
            module.register_parameter(name, nn.Parameter(made, requires_grad=param.requires_grad))
    return net


def optimizer_of(net: nn.Module, seed: int | None) -> torch.optim.AdamW:
    """AdamW over what is trained; with a seed, its state is known: fp32 masters of a bf16 weight among it."""
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained[:1], "lr": 0.5}, {"params": trained[1:]}], lr=0.25)
    for i, param in enumerate(trained if seed is not None else []):
        shape = tuple(param.shape)
        state = {"exp_avg": random(shape, 1000 * seed + i), "master": random(shape, 1000 * seed + 500 + i)}
        if isinstance(param, DTensor):
            state = {k: sharded(v, param.device_mesh, param.placements) for k, v in state.items()}
        optimizer.state[param] = {"step": torch.tensor(float(seed)), "count": seed, **state}
    return optimizer


def differences(found: Tensor, whole: Tensor) -> list[str]:
    """In what this rank's part of a tensor differs from the whole that it should be of; to the byte."""
    local = found.to_local() if isinstance(found, DTensor) else found
    if isinstance(found, DTensor):
        whole = share(whole, found.device_mesh, found.placements)
    if not isinstance(whole, QuantizedTensor):
        same = local.dtype == whole.dtype and torch.equal(as_bytes(local), as_bytes(whole))
        return [] if same else ["values"]
    assert isinstance(local, QuantizedTensor)
    wrong = []
    for (direction, a), (other, b) in zip(local.operands, whole.operands, strict=True):
        assert direction == other
        for name, buffer in b.buffers().items():
            if not torch.equal(as_bytes(a.buffers()[name]), as_bytes(buffer)):
                wrong.append(f"{direction}.{name}")
    return wrong


@torch.no_grad()
def model_differences(net: nn.Module, truth: nn.Module) -> dict[str, list[str]]:
    """The tensors of a model that are not those of another, which is whole."""
    found, expected = net.state_dict(keep_vars=True), truth.state_dict(keep_vars=True)
    assert found.keys() == expected.keys()
    return {name: wrong for name in found if (wrong := differences(found[name], expected[name]))}


@torch.no_grad()
def optimizer_differences(optimizer: Any, truth: Any) -> dict[str, Any]:
    """The same of optimizers."""
    wrong: dict[str, Any] = {}
    for group, expected in zip(optimizer.param_groups, truth.param_groups, strict=True):
        wrong.update({k: v for k, v in group.items() if k != "params" and expected[k] != v})
        for param, other in zip(group["params"], expected["params"], strict=True):
            state, values = optimizer.state[param], truth.state[other]
            assert state.keys() == values.keys()
            for name, value in values.items():
                same = not differences(state[name], value) if isinstance(value, Tensor) else state[name] == value
                wrong.update({} if same else {name: state[name]})
    return wrong
