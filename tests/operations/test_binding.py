"""The rules around a bound kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lpq
from lpq.formats.layout import as_bytes
from lpq.kernels import Choice
from lpq.operations import binding, bound
from lpq.operations.binding import OUT_ALIGNED, Encode, Encoded, Encoding, Operand, Product
from lpq.operations.quantizing import quantize
from lpq.operations.references import quantize_reference
from lpq.registry import KernelSpec


def test_a_compiler_traces_layers_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which GPU is the current one is a question that it cannot trace, and need not be asked."""
    gpu = torch.device("cuda", 1)

    def ask() -> int:
        raise RuntimeError("asked")

    monkeypatch.setattr(binding.cuda, "current_device", ask)

    @torch.compile(backend="eager", fullgraph=True)
    def added(x: Tensor) -> Tensor:
        with binding.on_device(gpu):
            return x + 1

    assert torch.equal(added(torch.zeros(3)), torch.ones(3))
    with pytest.raises(RuntimeError, match="asked"):
        binding.on_device(gpu)


@pytest.mark.parametrize(
    "text", ["fp8", "fp8(scaling=row)", "mxfp8", "nvfp4", "hybrid(row=mxfp8, col=identity(dtype=bfloat16))"]
)
@pytest.mark.parametrize("kernel", [None, False, True], ids=["reference", "kernel", "kernel that rounds"])
def test_a_matrix_of_another_dtype_is_rounded_first(
    text: str, kernel: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that binds gets it as it is, if it rounds what it reads."""
    quantizer = lpq.quantizer(text)
    row, col, held = quantizer.side("row"), quantizer.side("col"), []

    def bind(e: Encoding) -> Encode:
        def encode(x: Tensor, at: int, stats: Any, seed: Any) -> Encoded:
            held.append((x.dtype, e.held))
            first, second, measured = quantize(x.to(e.dtype), stats, e.row, e.col, seed)
            return ([] if first is None else first.tensors()), ([] if second is None else second.tensors()), measured

        return encode

    x, cpu = torch.randn(64, 32), torch.device("cpu")
    wanted = [s for s in quantize(x.bfloat16(), None, row, col)[:2] if s is not None]  # bound by the reference
    if kernel is not None:
        spec = KernelSpec.cuda("quantize", "", rounds=kernel)
        monkeypatch.setattr(bound, "serving", lambda *_: Choice("cuda", spec, quantize_reference, (), bind))
    run = bound.bind_run(Encoding(row, col, (64, 32), torch.float32, torch.bfloat16, cpu))
    found = [t for buffers in run(x, (), None)[:2] for t in buffers]
    for got, expected in zip(found, [t for s in wanted for t in s.tensors()], strict=True):
        assert torch.equal(as_bytes(got), as_bytes(expected))
    assert not torch.equal(x, x.bfloat16())
    as_it_is = torch.float32 if kernel and not col.plain else torch.bfloat16
    assert set(held) == (set() if kernel is None else {(as_it_is, as_it_is)})


def _filled(a: Any, b: Any, bias: Any) -> Tensor:
    return torch.full((2, 128), 3.0)


def _filling(a: Any, b: Any, bias: Any, out: Tensor | None = None) -> Tensor:
    return _filled(a, b, bias) if out is None else out.fill_(5.0)


def _taking(a: Any, b: Any, bias: Any, out: Tensor | None = None) -> Tensor:
    return _filled(a, b, bias)


def _idle(a: Any, b: Any, bias: Any, out: Tensor | None = None) -> Tensor:
    return _filled(a, b, bias) if out is None else out


@pytest.mark.parametrize(
    ("multiply", "aligned", "misaligned"),
    [(_filled, 3.0, 3.0), (_filling, 5.0, 3.0), (_taking, 3.0, 3.0), (_idle, 7.0, 3.0)],
)
def test_a_product_is_written_where_it_belongs_by_itself_or_by_a_copy(
    multiply: Any, aligned: float, misaligned: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one writes nothing and returns what it was given: so nothing was copied over what the others wrote."""
    monkeypatch.setattr(bound, "bind_product", lambda p: multiply)
    operand = Operand(lpq.quantizer("fp8"), (2, 2), torch.float32)
    write = bound.bind_writing(Product(operand, operand, torch.float32, torch.device("cpu")))
    memory = torch.full((4 * 128 + OUT_ALIGNED,), 7.0)
    begin = -memory.data_ptr() % OUT_ALIGNED // 4
    for offset, value in ((0, aligned), (1, misaligned)):
        memory.fill_(7.0)
        y = memory[begin + offset : begin + offset + 4 * 128].view(4, 128)
        write([], [], None, y[2:])
        assert (y[:2] == 7.0).all()
        assert (y[2:] == value).all()
