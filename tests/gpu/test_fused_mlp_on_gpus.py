"""On a GPU too, swiglu as one function is, to the bit, its three layers one after the other; also in a CUDA graph."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.comparing import equal
from support.passes import in_a_graph
from torch import Tensor, nn

import lpq
from lpq.nn import SwiGLU
from lpq.nn.fused_mlp import why_apart


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
    one_function = type(model) is SwiGLU and why_apart((model.gate_proj, model.up_proj), model.down_proj) is None
    assert ("FusedMLP" in type(y.grad_fn).__name__) == one_function
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
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(*in_a_graph(made(SwiGLU, "fp8-delayed"), x))


class Halves(nn.Module):
    """A block in which one layer makes gate and up, as in Phi-3."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(256, 1024, device="cuda", dtype=torch.bfloat16)
        self.down_proj = nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        y: Tensor = self.down_proj(up * F.silu(gate))
        return y


class Ungated(nn.Module):
    """A block without a gate, with biases."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up = nn.Linear(256, 512, device="cuda", dtype=torch.bfloat16)
        self.down, self.act = nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16), act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


class NewGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "mxfp8"])
@pytest.mark.parametrize(
    "block", [Halves, lambda: Ungated(nn.ReLU()), lambda: Ungated(nn.GELU()), lambda: Ungated(NewGelu())]
)
def test_other_blocks(recipe: str, block: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = lpq.convert(block(), recipe, include="all")
    fused, found = lpq.fuse(copy.deepcopy(plain)), []
    assert len(lpq.report(fused).fused) == 1
    x = torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16)
    for model in (fused, plain):
        y = model(x)
        y.float().square().mean().backward()
        found.append([y.detach(), *(p.grad for p in model.parameters())])
    assert equal(*found)


@pytest.mark.parametrize("block", [Halves, lambda: Ungated(nn.GELU()), lambda: Ungated(NewGelu())])
def test_other_blocks_under_autocast(block: Callable[[], nn.Module]) -> None:
    """Which computes the power of one of them in fp32."""
    torch.manual_seed(0)
    plain = lpq.convert(block().float(), "fp8-current", include="all")
    fused, found = lpq.fuse(copy.deepcopy(plain)), []
    x = torch.randn(2, 128, 256, device="cuda")
    for model in (fused, plain):
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        y.float().square().mean().backward()
        found.append([y.detach(), *(p.grad for p in model.parameters())])
    assert equal(*found)


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
def test_experts(recipe: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, num_local_experts=4,
    )  # fmt: skip
    plain = lpq.convert(transformers.MixtralForCausalLM(config).cuda().bfloat16(), recipe)
    fused = copy.deepcopy(plain)
    tokens, found = torch.randint(0, 64, (2, 96), device="cuda"), []
    lpq.fuse(fused.model.layers[0].mlp)  # without the norms, whose rows are added in another order on a GPU
    assert [entry.name for entry in lpq.report(fused).fused] == ["model.layers.0.mlp.experts"]
    for model in (fused, plain):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert equal(*found)


def test_positions_by_liger() -> None:
    """Its kernel runs on a GPU alone, in the trial of a decoder layer, too. It patches a module, so in a process."""
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("liger_kernel", reason="needs liger-kernel")
    ran = subprocess.run([sys.executable, "-c", BY_LIGER], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "6 fused, bits equal"


BY_LIGER = """
import torch, lpq
from liger_kernel.transformers import apply_liger_kernel_to_llama
from transformers import LlamaConfig, LlamaForCausalLM
apply_liger_kernel_to_llama(rms_norm=False, swiglu=False)
config = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=512,
)
tokens = torch.randint(0, 512, (2, 128), generator=torch.Generator().manual_seed(0)).cuda()
made = []
for fuse in (False, True):
    torch.manual_seed(0)
    net = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    lpq.convert(net, "fp8-current", fuse=fuse)
    loss = net(input_ids=tokens, labels=tokens).loss
    loss.backward()
    made.append([loss.detach(), *(p.grad for p in net.parameters())])
assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
with torch.device("meta"):
    early = lpq.convert(LlamaForCausalLM(config).bfloat16(), "fp8-current", fuse=True)
torch.cuda.synchronize()  # no kernel was launched with no address
assert len(lpq.report(early).fused) == 2
print(len(lpq.report(net).fused), "fused, bits equal")
"""
