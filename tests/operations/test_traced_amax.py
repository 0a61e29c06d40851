"""While a compiler traces, amaxes of whole tensors are measured in the pass that makes the tensor, to the bit."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from support.comparing import equal_bytes
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as autograd_config
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import lpq
from lpq.formats.blocks import block_amax, rounded_to_bfloat16, traced_amax
from lpq.operations.quantizing import quantize

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
WHOLE: tuple[None, None] = (None, None)


def bits(x: Tensor | None) -> int:
    assert x is not None
    return int(x.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("special", [0.0, -3.0, math.inf, -math.inf, math.nan, 3.3895e38, 1e-40])
def test_it_is_the_amax_of_the_matrix(dtype: torch.dtype, special: float) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).mul(1e-3 if special == 0 else 1).to(dtype)
    x[2, 3] = special
    assert bits(traced_amax(x)) == bits(block_amax(x, WHOLE))


def test_it_is_rounded_as_elements_are() -> None:
    """A compiler leaves out ``x.to(bf16).float()`` inside a pass, and so measures what is not rounded."""
    patterns = (*range(0x3F800000, 0x3F830000, 0x0FFF), 0, 0x8000, 0x00007FFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF)
    given = torch.tensor(patterns, dtype=torch.int32)
    wanted = given.view(torch.float32).to(torch.bfloat16).float().view(torch.int32)
    assert torch.equal(rounded_to_bfloat16(given), wanted)
    assert not torch.equal(given & ~0xFFFF, wanted), "no pattern is rounded up"


def test_float16_is_measured_by_the_format() -> None:
    assert traced_amax(torch.ones(2, 2, dtype=torch.float16)) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("text", "dtype"), [("hybrid(row=fp8, col=fp8(dtype=e5m2))", torch.float32), ("nvfp4", torch.bfloat16)]
)
def test_operands_are_those_of_the_tensor_that_was_made(device: str, text: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    generator, quantizer = torch.Generator().manual_seed(3), lpq.quantizer(text)
    h, gate = (torch.randn(64, 128, generator=generator).to(device, dtype) for _ in range(2))

    def operands(x: Tensor) -> list[Tensor]:
        row, col, _ = quantize(x, None, quantizer.side("row"), quantizer.side("col"))
        return [t for operand in (row, col) if operand is not None for t in operand.tensors()]

    def made(h: Tensor, gate: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = F.silu(gate) * h
        return x, operands(x)

    with torch.no_grad(), config.patch(fx_graph_cache=False), autograd_config.patch(enable_autograd_cache=False):
        compiled: Any = torch.compile(made, fullgraph=True, dynamic=False)
        (x, found), code = run_and_get_code(compiled, h, gate)
        assert re.search(r"fused\w*_amax\w*_silu", code[0]), "the pass that makes the tensor does not measure it"
        wanted = operands(x)
    assert equal_bytes(found, wanted)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_without_rounding_it_is_that_of_another_tensor(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a GPU Inductor keeps what it makes in fp32; for a CPU it rounds it first."""
    torch._dynamo.reset()
    monkeypatch.setattr("lpq.formats.blocks.rounded_to_bfloat16", lambda bits: bits)
    generator = torch.Generator().manual_seed(3)
    h, gate = (torch.randn(64, 128, generator=generator).to(device, torch.bfloat16) for _ in range(2))

    def made(h: Tensor, gate: Tensor) -> tuple[Tensor, Tensor | None]:
        x = F.silu(gate) * h
        return x, traced_amax(x)

    with torch.no_grad(), config.patch(fx_graph_cache=False), autograd_config.patch(enable_autograd_cache=False):
        x, found = torch.compile(made, fullgraph=True, dynamic=False)(h, gate)
    assert bits(found) != bits(block_amax(x, WHOLE))


@pytest.mark.parametrize("text", ["mxfp8", "fp8(scaling=row)", "nvfp4(rht=true)"])
def test_a_format_measures_blocks_itself(text: str) -> None:
    """In the pass that encodes; and what it rotates first."""
    torch._dynamo.reset()
    x, quantizer, graphs = torch.randn(64, 128), lpq.quantizer(text), []

    def record(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(module.graph)
        return module.forward

    def encoded(x: Tensor) -> list[Tensor]:
        made = quantize(x, None, None, quantizer.side("col"))[1]
        assert made is not None
        return made.tensors()

    with torch.no_grad():
        torch.compile(encoded, backend=record, fullgraph=True)(x)
    assert [n.name for n in graphs[0].nodes if n.op != "placeholder" and "amax" in n.name] == []
    assert any("quantize" in n.name for n in graphs[0].nodes)


def test_a_weight_is_measured_by_its_kernel() -> None:
    """No pass of the graph makes a weight: measuring it in one would read it once more, in two launches."""
    torch._dynamo.reset()
    layer = lpq.convert(torch.nn.Linear(32, 64, bias=False), "fp8-current")
    graphs: list[torch.fx.Graph] = []

    def record(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    compiled: Any = torch.compile(layer, backend=aot_autograd(fw_compiler=record), fullgraph=True, dynamic=False)
    x = torch.randn(16, 32, requires_grad=True)
    compiled(x).sum().backward()
    whole = [sum(n.target is torch.ops.aten.amax.default and len(n.args) == 1 for n in g.nodes) for g in graphs]
    assert whole == [1, 1], "of the input in forward, of the gradient in backward"
