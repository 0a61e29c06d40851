"""On a GPU every format gives the bytes that it gives on a CPU, and every recipe trains."""

from __future__ import annotations

import pytest
import torch
from quantizers import QUANTIZERS
from support.comparing import as_bytes
from torch import nn

import lpq
from lpq.kernels import choose


@pytest.fixture(params=["kernels", "reference"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By what is best here, or as where there is neither cuda-core nor Triton."""
    if request.param == "reference":
        monkeypatch.setenv("LPQ_KERNELS", "torch,reference")
        assert choose("quantize", ("mxfp8",), torch.device("cuda", 0)).backend == "reference"
    return str(request.param)


def inputs() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(256, 384, generator=g)
    return {
        "normal": normal,
        "bf16": normal.bfloat16(),
        "ragged": torch.randn(37, 53, generator=g),
        "wide range": normal * torch.exp2(torch.randint(-40, 40, (256, 384), generator=g)),
        "subnormal": normal * 1e-39,
        "large": torch.full((32, 48), 3.3895e38),
        "zeros": torch.zeros(32, 48),
        "non-finite": torch.where(
            torch.rand(64, 64, generator=g) < 0.02, float("nan"), torch.randn(64, 64, generator=g)
        ),
        "infinite": torch.where(torch.rand(64, 64, generator=g) < 0.02, float("inf"), torch.randn(64, 64, generator=g)),
    }


@pytest.mark.parametrize("text", QUANTIZERS)
def test_bytes_are_those_of_the_cpu(text: str, served: str) -> None:
    for name, x in inputs().items():
        quantizer = lpq.quantizer(text)
        here, there = quantizer.quantize(x, seed=5), quantizer.quantize(x.cuda(), seed=5)
        for (d, a), (_, b) in zip(here.operands, there.operands, strict=True):
            for buffer, tensor in a.buffers().items():
                other = b.buffers()[buffer].cpu()
                if a.quantizer.plain:  # an ordinary matrix: its NaNs are what the hardware makes them
                    tensor, other = tensor.nan_to_num(7.0), other.nan_to_num(7.0)
                assert torch.equal(as_bytes(tensor), as_bytes(other)), (name, d, buffer)
        decoded = torch.nan_to_num(here.dequantize(torch.float32), nan=7.0)
        assert torch.equal(decoded, torch.nan_to_num(there.dequantize(torch.float32), nan=7.0).cpu()), name


@pytest.mark.parametrize("recipe", sorted(lpq.registry.recipes()))
def test_recipes_train_without_a_synchronisation(recipe: str, served: str) -> None:
    torch.manual_seed(0)
    model = lpq.convert(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), recipe).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(96, 64, device="cuda")
    losses = []
    for step in range(20):
        if step == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            loss = (model(x) - x.flip(-1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(loss.detach())
    assert losses[-1] < 0.7 * losses[0]


def test_a_step_can_be_captured_in_a_cuda_graph() -> None:
    layer = lpq.nn.Linear(64, 96, recipe="nvfp4").cuda()
    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            layer(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    layer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
        y.square().sum().backward()
    graph.replay()
    first = layer.weight.grad.clone()
    assert torch.equal(y, layer(x))
    assert first.isfinite().all()
    assert first.any()
