"""Producers: operands of what a source computes equal those of its outputs, encoded one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import lpq
from lpq import registry
from lpq.kernels import cuda, table
from lpq.operations import norm_kernels, norm_programs, produced_programs, produced_tiles
from lpq.operations.encoder import EncoderSpec
from lpq.operations.norm_choice import norm_kernels_of
from lpq.operations.norms import NormKind
from lpq.operations.producer import Output, bind_halves, bind_producer, kernels_of
from lpq.operations.source import ACTIVATIONS, Source

ROWS, COLS = 64, 96
CPU = torch.device("cpu")
SOURCES = [source for act in ACTIVATIONS.values() for between in (act.gated, act.alone) for source in between]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
@pytest.mark.parametrize("text", ["fp8", "fp8(scaling=row)", "mxfp8", "nvfp4", "hybrid(row=mxfp8, col=fp8)"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_operands_are_those_of_the_outputs(source: Source, text: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(ROWS, COLS, dtype=dtype) for _ in source.inputs]
    quantizer = lpq.quantizer(text)
    wanted = EncoderSpec(quantizer, (ROWS, COLS), dtype, CPU)
    last = source.outputs - 1
    outputs = [Output(wanted._replace(row=i != last), value=i == 0) for i in range(source.outputs)]
    producer = bind_producer(source, outputs)
    nothing, no_seed = [()] * source.outputs, [None] * source.outputs
    made = producer.produce(inputs, nothing, no_seed)
    for i, (x, output) in enumerate(zip(source.compute(*inputs), made, strict=True)):
        whole = quantizer.quantize(x)
        assert output.value is None or torch.equal(output.value, x)
        assert (output.value is None) == (i != 0)
        for operand, buffers, direction in zip(
            producer.operands[i], (output.row, output.col), ("row", "col"), strict=True
        ):
            if direction == "row" and i == last:
                assert operand is None
                assert not buffers
                continue
            assert operand is not None
            expected = whole.operand(direction).tensors()
            assert len(buffers) == len(expected)
            assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))


def test_outputs_that_are_not_the_source_s() -> None:
    with pytest.raises(ValueError, match="silu_gate_backward has 3 outputs, and 1 are described"):
        bind_producer(ACTIVATIONS["silu"].gated.backward, [Output(None)])


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_of_activations_are_autograd_s(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for between in (ACTIVATIONS[name].gated, ACTIVATIONS[name].alone):
        product, backward = between
        *inputs, dy = (torch.randn(ROWS, COLS, dtype=dtype) * 3 for _ in backward.inputs)
        leaves = [x.clone().requires_grad_() for x in inputs]
        (y,) = product.compute(*leaves)
        *grads, again = backward.compute(*inputs, dy)
        assert torch.equal(again, y)
        assert all(map(torch.equal, grads, torch.autograd.grad(y, leaves, dy)))


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """Answers about this machine are kept: none from before the test, and none of it behind it."""
    registry.refresh()
    yield
    registry.refresh()


@pytest.mark.parametrize(("without", "reason"), [
    ("allowed", "LPQ_KERNELS does not allow cuda"), ("nvidia", "is for NVIDIA's GPUs"),
    ("sm", "needs compute capability 8.0, this GPU has 7.5"), ("cuda.core", "needs cuda.core, which is not installed"),
])  # fmt: skip
def test_where_no_cuda_kernel_runs_triton_computes(
    without: str, reason: str, monkeypatch: pytest.MonkeyPatch, asked_anew: None
) -> None:
    """As on AMD's GPUs. Torch computes what has no kernel in Triton, and where Triton may not run, either."""
    source, gpu = ACTIVATIONS["silu"].gated.product, torch.device("cuda", 0)
    asked = source, (ROWS, COLS), torch.bfloat16, gpu
    monkeypatch.delenv("LPQ_KERNELS", raising=False)
    monkeypatch.setattr(torch.version, "hip", "7.0.0" if without == "nvidia" else None, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5) if without == "sm" else (9, 0))
    monkeypatch.setattr(table, "_installed", lambda module: module != without)
    monkeypatch.setattr(cuda, "why_not", lambda device: None)
    norm = NormKind(1e-6), *asked[1:]
    assert "of several matrices, and not in torch.float32" in kernels_of(source, asked[1], torch.float32, gpu)
    alone = ACTIVATIONS["silu"].alone.product
    assert kernels_of(alone, asked[1], torch.float32, gpu) is kernels_of(alone, *asked[1:])
    if without == "allowed":
        assert kernels_of(*asked) is produced_tiles
        assert norm_kernels_of(*norm) is norm_kernels
        monkeypatch.setenv("LPQ_KERNELS", "triton,reference")
    why = produced_tiles.why_not(*asked)
    assert why is not None
    assert reason in why
    assert kernels_of(*asked) is produced_programs
    assert norm_kernels_of(*norm) is norm_programs
    found = kernels_of(source._replace(program=None), *asked[1:])
    assert isinstance(found, str)
    assert reason in found
    assert found.endswith("; silu_gate has no kernel in Triton")
    monkeypatch.setenv("LPQ_KERNELS", "torch,reference")
    assert "the kernel of sources in triton LPQ_KERNELS does not allow triton" in kernels_of(*asked)
    assert "the kernel of sources in triton LPQ_KERNELS does not allow triton" in norm_kernels_of(*norm)
    halves = torch.randn(ROWS, 2 * COLS).bfloat16()
    assert torch.equal(bind_halves(*asked)(halves), source.compute(*halves.chunk(2, 1))[0])
