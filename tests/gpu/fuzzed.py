"""Helpers that fuzz kernels on a GPU: matrices with every kind of number, and comparing what is made of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import lpq
from lpq import operations
from lpq.core import Quantizer
from lpq.testing.comparing import Poisoned

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SEED = -12345678901
KINDS = (
    "normal", "wide range", "tiny", "large", "huge", "zeros", "nan", "infinite", "grid", "unaligned", "transposed",
)  # fmt: skip


def inputs(rows: int, cols: int, dtype: torch.dtype, kinds: tuple[str, ...] = KINDS) -> Iterator[tuple[str, Tensor]]:
    """Matrices with every kind of number, aligned, unaligned and transposed."""
    g = torch.Generator("cuda").manual_seed(rows * 1009 + cols)
    x = torch.randn(rows, cols, device="cuda", generator=g)
    least, most = (-60, 60) if dtype == torch.float32 else (-30, 16)
    powers = torch.randint(least, most, (rows, cols), device="cuda", generator=g)
    chance = torch.rand(rows, cols, device="cuda", generator=g)
    largest = torch.finfo(dtype).max
    made = {
        "normal": lambda: x,
        "wide range": lambda: x * torch.exp2(powers),
        "tiny": lambda: x * (1e-7 if dtype == torch.float16 else 1e-40),
        "large": lambda: torch.where(chance < 0.1, largest, x),
        "huge": lambda: x * (largest / 8),
        "zeros": lambda: torch.where(chance < 0.5, -0.0, 0.0),
        "nan": lambda: torch.where(chance < 0.01, -torch.nan, x),
        "infinite": lambda: torch.where(chance < 0.01, torch.where(chance < 0.005, -torch.inf, torch.inf), x),
        "grid": lambda: (x * 8).round().div(4),
    }
    for name in kinds:
        if name in made:
            yield name, made[name]().to(dtype)
    if "unaligned" in kinds:
        yield "unaligned", torch.cat([x.new_zeros(1), x.flatten()]).to(dtype)[1:].view(rows, cols)
    if "transposed" in kinds:
        yield "transposed", x.t().contiguous().to(dtype).t()


def sides(text: str, row: bool, col: bool) -> tuple[Quantizer | None, Quantizer | None]:
    quantizer = lpq.quantizer(text)
    return (quantizer.side("row") if row else None), (quantizer.side("col") if col else None)


def seed() -> Tensor:
    return torch.tensor(SEED, device="cuda")


def unaligned_offset(col: Quantizer | None) -> int:
    """The first row of a shard that cuts groups of 16 rows. Not where kernels leave these to the reference, which would
    be compared with itself: where a column operand has random bits."""
    return 48 if col is not None and col.stochastic else 5


def quantize(
    x: Tensor, stats: list[Tensor | None], row: Quantizer | None, col: Quantizer | None, offset: int, measure: bool
) -> list[Tensor]:
    """Return the operator's result, in memory that was full of something else."""
    texts = (row.text if row else "", col.text if col else "")
    with Poisoned():  # type: ignore[no-untyped-call]
        out: list[Tensor] = torch.ops.lpq.quantize(x, stats, *texts, seed(), offset, measure)
    return out


def assert_same(got: list[Tensor], expected: list[Tensor], what: str) -> None:
    """To the byte."""
    assert len(got) == len(expected), what
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape, f"{what}, output {i}: {list(a.shape)}, not {list(b.shape)}"
        one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        assert torch.equal(one, other), f"{what}, output {i}: {int((one != other).sum())} of {one.numel()} bytes differ"


def assert_captured(text: str) -> None:
    """Kernels wait for nothing; a recorded graph replays on what the tensor then holds."""
    quantizer = lpq.quantizer(text)
    seed = torch.tensor(7, device="cuda")
    for shape in ((256, 384), (128 * 34, 128 * 33)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        _made(quantizer, x, seed)
        torch.cuda.set_sync_debug_mode("error")
        try:
            _made(quantizer, x, seed)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = _made(quantizer, x, seed)
        x.copy_(torch.randn(shape, device="cuda") * 3)
        seed.fill_(8)
        graph.replay()
        assert_same(captured, _made(quantizer, x, seed), f"{text} {shape}")


def _made(quantizer: Quantizer, x: Tensor, seed: Tensor) -> list[Tensor]:
    """The statistics of both operands, the operands, what they decode to, and their transposes where they have some."""
    row, col = (side if side.stats else None for side in (quantizer.side("row"), quantizer.side("col")))
    made = operations.measure(x, row, col) if row is not None or col is not None else []
    for _, operand in quantizer.quantize(x, seed=seed).operands:
        made += [*operand.tensors(), operations.decode(operand, torch.bfloat16)]
        if operand.quantizer.transposable:
            made += operations.transpose(operand).tensors()
    return made


def of_many_elements(text: str) -> tuple[lpq.QuantizedTensor, lpq.QuantizedTensor]:
    """A tensor of more than 2^31 elements, quantized, and its last 128 rows alone: places are counted in 64 bits."""
    rows, cols = 2**16 + 128, 2**15
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16).repeat(1, cols // 256)
    x[-128, 0] = 1e4  # one amax for the whole and for its end
    whole, last = (lpq.quantizer(text).quantize(part) for part in (x, x[-128:]))
    assert whole.numel() > 2**31
    return whole, last
