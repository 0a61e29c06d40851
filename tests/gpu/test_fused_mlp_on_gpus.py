"""On a GPU too, swiglu as one function is, to the bit, its three layers one after the other; also in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.comparing import equal
from torch import Tensor

import lpq
from lpq.nn import SwiGLU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Plain(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


def made(kind: type[SwiGLU], recipe: str, sizes: tuple[int, int] = (256, 512)) -> Any:
    torch.manual_seed(0)
    return lpq.convert(kind(*sizes, device="cuda", dtype=torch.bfloat16), recipe)


def step(model: Any, scale: float = 1.0) -> list[Tensor | None]:
    model.zero_grad()
    torch.manual_seed(1)
    x = (torch.randn(2, 128, model.gate_proj.in_features, device="cuda") * scale).bfloat16().requires_grad_()
    y = model(x)
    assert ("FusedMLP" in type(y.grad_fn).__name__) == (type(model) is SwiGLU)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize("sizes", [(256, 512), (272, 336)])
@pytest.mark.parametrize(
    "recipe",
    [
        "fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "nvfp4", "mxfp8-fwd-nvfp4-bwd",
        "fprop=fp8(), dgrad=fp8(), wgrad=bf16",
    ],
)  # fmt: skip
def test_steps_are_those_of_the_layers(recipe: str, sizes: tuple[int, int]) -> None:
    fused, plain = made(SwiGLU, recipe, sizes), made(Plain, recipe, sizes)
    for scale in (1.0, 8.0, 0.25):
        assert equal(step(fused, scale), step(plain, scale))


def test_a_graph() -> None:
    model = made(SwiGLU, "fp8-delayed")
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        model(x)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = model(x)
        x.copy_(torch.randn(256, 256, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, model(x))
