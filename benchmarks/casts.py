"""Casts: how fast each format encodes, measures, transposes and decodes, as a share of the copy speed of the same run.

    python -m benchmarks casts [--only mxfp8] [--size 32768x16384]

Bytes are counted once for each read of the input that the algorithm needs (two where the amax of the whole tensor must
be known before the first element is encoded) and once for each byte written. NVFP4 with an amax for each row needs one
read, and takes two of rows that are longer than a block of threads can hold. Which kernel ran stands beside each line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import lpq
from benchmarks import transformer_engine
from benchmarks.contenders import installed
from benchmarks.timing import copy_speed, seconds
from lpq import operations
from lpq.bench.contenders import in_words
from lpq.core import Quantizer, Storage
from lpq.kernels import choose
from lpq.operations.derived_operands import derive_col
from lpq.operations.sides import declared


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    quantizer: str
    sides: str
    """``row``, ``col`` or ``both``; ``transpose``, ``decode``, or ``measure``, for both operands; ``derive``: the
    column operand of the row operand."""
    target: float
    """The share of the copy speed to reach."""
    reads: int = 1
    known: bool = False
    """Whether the amax of the operand is given."""
    measured: bool = False
    """Whether the amax is measured on the way."""
    amax: float = 5.25
    """The amax of the matrices. This one makes NVFP4 slowest: in every block some elements can lie half-way between two
    codes, of which the even one is right. With 5.5 none can."""


def encodings(name: str, quantizer: str, **how: Any) -> list[Case]:
    return [Case(name, quantizer, sides, 0.92 if sides == "row" else 0.90, **how) for sides in ("row", "col", "both")]


def one_copy(quantizer: str) -> str:
    """The quantizer whose column operand is made of its row operand."""
    return f"hybrid(row={quantizer}, col={quantizer}, col_source=row)"


CASES = [
    *encodings("mxfp8", "mxfp8"),
    *encodings("mxfp4", "mxfp4"),
    *encodings("fp8 current", "fp8", reads=2),
    *encodings("fp8 delayed", "fp8(scaling=delayed)", known=True, measured=True),
    *encodings("fp8 current E5M2", "fp8(dtype=e5m2)", reads=2),
    *encodings("fp8 delayed E5M2", "fp8(scaling=delayed, dtype=e5m2)", known=True, measured=True),
    *encodings("fp8 row", "fp8(scaling=row)", reads=2),
    *encodings("fp8 block 1x128", "fp8(scaling=block)"),
    *encodings("fp8 block 128x128", "fp8(scaling=block, block=128x128)"),
    *encodings("nvfp4 1x16", "nvfp4", reads=2),
    *encodings("nvfp4 1x16, nothing half-way", "nvfp4", reads=2, amax=5.5),
    *encodings("nvfp4 1x16, amax known", "nvfp4", known=True, measured=False),
    *encodings("nvfp4 1x16 stochastic", "nvfp4(stochastic=true)", reads=2),
    Case("nvfp4 row", "nvfp4(scaling=row)", "row", 0.92),
    Case("nvfp4 row, four over six", "nvfp4(scaling=row, search=four_over_six, norm=256)", "row", 0.70),
    *encodings("nvfp4 16x16", "nvfp4(block=16x16)", reads=2),
    *encodings("nvfp4 16x16, amax known", "nvfp4(block=16x16)", known=True, measured=False),
    Case("mxfp4 RHT", "mxfp4(scale=even, rht=true)", "both", 0.70),
    Case("mxfp4 RHT stochastic", "mxfp4(scale=ceil, rht=true, stochastic=true)", "both", 0.70),
    Case("nvfp4 RHT", "nvfp4(rht=true)", "both", 0.70, 2),
    Case("nvfp4 RHT stochastic", "nvfp4(rht=true, stochastic=true)", "both", 0.70, 2),
    *(
        Case(name, f"hybrid(row={row}, col={col})", "both", target, reads)
        for name, row, col, target, reads in (
            ("fp8 block + mxfp8", "fp8(scaling=block)", "mxfp8", 0.90, 1),
            ("mxfp8 + fp8 current", "mxfp8", "fp8", 0.90, 2),
            ("mxfp8 + nvfp4", "mxfp8", "nvfp4", 0.90, 2),
            ("nvfp4 + mxfp8", "nvfp4", "mxfp8", 0.90, 2),
            ("fp8 current + nvfp4", "fp8", "nvfp4", 0.90, 2),
            ("mxfp8 + nvfp4 RHT stochastic", "mxfp8", "nvfp4(rht=true, stochastic=true)", 0.70, 2),
        )
    ),
    Case("fp8 current", "fp8", "measure", 0.92),
    Case("fp8 row", "fp8(scaling=row)", "measure", 0.92),
    Case("fp8 block 1x128", "fp8(scaling=block)", "measure", 0.92),
    Case("fp8 block 128x128", "fp8(scaling=block, block=128x128)", "measure", 0.92),
    Case("nvfp4 1x16", "nvfp4", "measure", 0.92),
    Case("nvfp4 16x16", "nvfp4(block=16x16)", "measure", 0.92),
    Case("nvfp4 RHT", "nvfp4(rht=true)", "measure", 0.70),
    Case("fp8 current", "fp8", "transpose", 0.85),
    Case("fp8 block 128x128", "fp8(scaling=block, block=128x128)", "transpose", 0.85),
    Case("nvfp4 16x16", "nvfp4(block=16x16)", "transpose", 0.85),
    Case("mxfp8", one_copy("mxfp8"), "derive", 0.90),
    Case("fp8 block 1x128", one_copy("fp8(scaling=block)"), "derive", 0.90),
    Case("mxfp8", "mxfp8", "decode", 0.85),
    Case("mxfp4", "mxfp4", "decode", 0.85),
    Case("mxfp4 RHT", "mxfp4(rht=true)", "decode", 0.85),
    Case("fp8 current", "fp8", "decode", 0.85),
    Case("nvfp4 1x16", "nvfp4", "decode", 0.85),
    Case("nvfp4 RHT", "nvfp4(rht=true)", "decode", 0.85),
]


def measure(case: Case, inputs: list[Tensor], busy: Callable[[], object]) -> dict[str, Any]:
    """Run one case on tensors in turn, so that none of them is in a cache."""
    quantizer = lpq.quantizer(case.quantizer)
    x = inputs[0]
    seed = torch.tensor(1, device=x.device)
    row = quantizer.side("row") if case.sides != "col" else None
    col = quantizer.side("col") if case.sides in ("col", "both", "measure") else None
    if case.sides in ("transpose", "decode", "derive"):
        if quantizer.rotation is not None:  # which only column operands have
            row, col = None, quantizer.side("col")
        pairs = [operations.quantize(x, None, row, col, seed)[:2] for x in inputs]
        encoded = [operand for pair in pairs for operand in pair if isinstance(operand, Storage)]
        operation = "reader" if case.sides == "derive" else case.sides
        texts: tuple[str, ...] = (quantizer.side("row").text if case.sides == "derive" else quantizer.text,)
        kept: list[object] = [None] * len(inputs)  # so that a result is not written to where the one before lies

        def made(operand: Storage) -> Storage | Tensor:
            if case.sides == "derive":
                return derive_col(quantizer, operand)
            return operations.transpose(operand) if case.sides == "transpose" else operations.decode(operand, x.dtype)

        def run(i: int) -> object:
            kept[i % len(inputs)] = made(encoded[i % len(inputs)])
            return kept

        moved = encoded[0].nbytes + made(encoded[0]).nbytes
    elif case.sides == "measure":
        operation = case.sides
        moved = x.nbytes + sum(found.nbytes for found in operations.measure(x, row, col))
        texts = tuple(side.text for side in (row, col) if side is not None)

        def run(i: int) -> object:
            return operations.measure(inputs[i % len(inputs)], row, col)
    else:
        stats = _known(operations.measure(x, row, col), row, col) if case.known else None
        operands = operations.quantize(x, stats, row, col, seed)[:2]
        moved = case.reads * x.nbytes + sum(o.nbytes for o in operands if isinstance(o, Storage))
        operation = "quantize"
        texts = tuple(side.text for side in (row, col) if side is not None)

        def run(i: int) -> object:
            return operations.quantize(inputs[i % len(inputs)], stats, row, col, seed, measure=case.measured)

    took = seconds(run, busy)
    choice = choose(operation, texts, x.device)
    return {
        **asdict(case),
        "microseconds": took * 1e6,
        "bytes": moved,
        "speed": moved / took,
        "kernel": choice.kernel.impl if choice.kernel is not None else "reference",
    }


def _known(measured: list[Tensor], row: Quantizer | None, col: Quantizer | None) -> list[Tensor | None]:
    """The statistics of whole operands, None for others: amaxes of blocks are found while encoding."""
    return [
        found if stat.block == (None, None) else None
        for found, (stat, _) in zip(measured, declared(row, col), strict=True)
    ]


def measure_all(device: torch.device, only: list[str] | None, rows: int, cols: int) -> dict[str, Any]:
    """Every case, or those whose name begins with one of ``only``; and the casts of other libraries."""
    cases = [case for case in CASES if case.name.startswith(tuple(only or [""]))]
    generator = torch.Generator(device).manual_seed(0)
    inputs = [torch.randn(rows, cols, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2)]
    clamped = {amax: [x.clamp(-amax, amax) for x in inputs] for amax in {case.amax for case in cases}}
    targets = [torch.empty_like(x) for x in inputs]

    def copy(i: int = 0) -> Tensor:
        return targets[i % 2].copy_(inputs[i % 2])

    copied = copy_speed(device, rows, cols)
    with torch.no_grad():  # as in a layer's pass: no graph of autograd is recorded around a kernel
        results = [measure(case, clamped[case.amax], copy) for case in cases]
    for result in results:
        result["share"] = result["speed"] / copied
    return {"rows": rows, "cols": cols, "copy_speed": copied, "cases": results, "peers": _peers(inputs, copy, copied)}


def _peers(inputs: list[Tensor], busy: Callable[[], object], copied: float) -> list[dict[str, Any]]:
    """TransformerEngine's casts, if it is here."""
    if installed("TransformerEngine") is None:
        return []
    try:
        casts = transformer_engine.casts()
        return [_peer(*key, *cast, inputs, busy, copied) for key, cast in casts.items()]
    except Exception as error:  # what one library cannot do is a result
        return [{"library": "TransformerEngine", "name": "casts", "sides": "", "failure": in_words(error)}]


def _peer(
    name: str,
    sides: str,
    reads: int,
    cast: Callable[[Tensor], Any],
    inputs: list[Tensor],
    busy: Callable[[], object],
    copied: float,
) -> dict[str, Any]:
    """One of its casts; of what it writes, scales are left out."""
    moved = inputs[0].nbytes * reads + inputs[0].numel() * (2 if sides == "both" else 1)
    took = seconds(lambda i: cast(inputs[i % len(inputs)]), busy)
    return {
        "library": "TransformerEngine",
        "name": name,
        "sides": sides,
        "reads": reads,
        "microseconds": took * 1e6,
        "bytes": moved,
        "speed": moved / took,
        "share": moved / took / copied,
    }
