"""Checks that several matrices, which are encoded, measured, transposed or put in their places at once, have the bytes
that each has by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import lpq
from lpq import operations, registry
from lpq.core import Quantizer
from lpq.distributed.several_matrices import Scratch, ShardOperands, ShardStatistics, spanning
from lpq.formats.format import DIRECTIONS, Direction
from lpq.kernels.placing import RankPieces, bind_places
from lpq.operations.binding import Operand, Transposes
from lpq.operations.derived_operands import Derived, bind_derive_into
from lpq.operations.fused_pair import TileSide
from lpq.operations.kernel_protocols import BindSeveral
from lpq.operations.references import quantize_reference
from lpq.operations.several_sides import bind_side
from lpq.testing.expect import same
from lpq.testing.operands import encode

SHAPES = ((48, 130), (32, 7), (128, 64), (16, 256))
ENCODED = ("fp8", "fp8(dtype=e5m2, pow2=true)", "fp8(scaling=delayed)", "fp8(static=true)")
TILED: tuple[tuple[str, Direction], ...] = tuple(
    (text, direction)
    for text in (
        "fp8", "fp8(scaling=row)", "fp8(scaling=row, dtype=e5m2, pow2=true)", "fp8(scaling=block)",
        "fp8(scaling=block, pow2=true)", "fp8(scaling=block, block=128x128)", "mxfp8", "mxfp8(dtype=e5m2)", "mxfp4",
        "nvfp4", "nvfp4(block=16x16)", "nvfp4(scaling=row)",
    )
    for direction in DIRECTIONS
)  # fmt: skip
"""Operands of every format that one launch makes tile by tile."""
WHOLE = ((256, 128), (512, 384), (256, 256))
"""Shapes that tiles cover exactly."""
MEASURED: tuple[tuple[str, Direction], ...] = (
    ("fp8", "row"), ("fp8", "col"), ("fp8(scaling=row, dtype=e5m2)", "col"), ("nvfp4", "row"),
    ("nvfp4(block=16x16)", "col"),
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POISON, BEFORE = 0xA5, 64
"""What bytes are that nobody wrote; and so many of them in front of a buffer and behind it."""


def bind_real(side: Quantizer, *_: object) -> BindSeveral[Quantizer] | None:
    """The function of a format that binds an encoding of several matrices, on whatever device."""
    for spec in registry.kernels("quantize", (registry.format_of(type(side)).name,)):
        if spec.several is not None:
            bind: BindSeveral[Quantizer] = registry.resolve(spec.several)
            return bind
    return None


def real_transposes(operands: Sequence[Operand], device: torch.device) -> Transposes | None:
    """The kernel that transposes several operands, if their plugin has one."""
    for spec in registry.kernels("transpose", (registry.format_of(type(operands[0].quantizer)).name,)):
        if spec.several is not None:
            bound: Transposes = registry.resolve(spec.several)(operands, device)
            return bound
    return None


def matrices(seed: int, device: torch.device, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Tensor]:
    """Matrices whose elements are no bf16 numbers, with infinities and NaN, tiny and large ones."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made[0][3, 70] = torch.inf
    made[1][2] = torch.nan
    made[2][:, :40] *= 1e-38
    made[-1][1] = 3.3895e38
    return [x.to(device) for x in made]


def row_operands(side: Quantizer, dtype: torch.dtype, device: torch.device) -> ShardOperands:
    bind = bind_real(side)
    assert bind is not None
    encode = bind(side, SHAPES, dtype, device)
    assert encode is not None
    return ShardOperands(side, "row", SHAPES, dtype, device, encode)


def side_real(side: Quantizer, direction: Direction, *_: object) -> TileSide | None:
    """How an operand is made tile by tile, on whatever device."""
    if side.stochastic:
        return None
    for spec in registry.kernels("tile", (registry.format_of(type(side)).name,)):
        made: TileSide | None = registry.resolve(spec.impl)(side, direction)
        return made
    return None


def check_tiled(
    text: str, direction: Direction, dtype: torch.dtype, device: torch.device, shapes: Sequence[tuple[int, int]]
) -> None:
    """Encoded twice: at other places in memory, and by other statistics. Whatever nobody wrote shows."""
    side, scratch = lpq.quantizer(text).side(direction), Scratch()
    made = side_real(side, direction)
    assert made is not None, text
    encode = bind_side(made, direction, shapes, dtype, device)
    several = ShardOperands(side, direction, shapes, dtype, device, encode, scratch=scratch)
    for seed in range(2):
        xs = matrices(seed, device, shapes)
        sides = (side, None) if direction == "row" else (None, side)
        stats: list[list[Tensor | None]] = []
        for x in xs:
            found = [s * 1.5 for s in operations.measure_reference(x.to(dtype), *sides)]
            needs = made.needs(given=False, measure=False)
            stats.append([s if needs and k == 0 else None for k, s in enumerate(found)])
        for one in several.encode(xs, stats).buffers:
            for buffer in one:
                buffer.view(-1).view(torch.uint8).fill_(POISON)
        for i, buffers in enumerate(several.encode(xs, stats).buffers):
            expected = quantize_reference(xs[i].to(dtype), stats[i], *sides, None, 0, False)
            for k, (got, other) in enumerate(zip(buffers, expected, strict=True)):
                same(got, other.contiguous(), f"{text}, {direction}, matrix {i}, buffer {k}")


def check_operands(text: str, dtype: torch.dtype, device: torch.device) -> None:
    """Of given statistics, twice: at other places in memory."""
    side, flat = lpq.quantizer(text), None
    several = row_operands(side, dtype, device)
    for seed in range(2):
        xs = matrices(seed, device)
        stats = [[s * 1.5 for s in operations.measure_reference(x.to(dtype), side, None)] for x in xs]
        if flat is not None:
            flat.fill_(POISON)
        made = several.encode(xs, stats)
        flat = made.flat
        for i, buffers in enumerate(made.buffers):
            expected = quantize_reference(xs[i].to(dtype), stats[i], side, None, None, 0, False)
            for k, (one, other) in enumerate(zip(buffers, expected, strict=True)):
                same(one, other.contiguous(), f"{text}, matrix {i}, buffer {k}")


def check_versions(text: str, device: torch.device) -> None:
    """Codes are returned again for the same versions of all matrices, and for no others."""
    side, xs = lpq.quantizer(text), matrices(0, device)
    several = row_operands(side, torch.float32, device)
    stats = [[*operations.measure_reference(x, side, None)] for x in xs]
    versions = [object() for _ in xs]
    first = several.encode(xs, stats, versions)
    expected = first.flat.clone()
    first.flat.fill_(POISON)
    assert several.encode(xs, stats, [*versions]).flat.eq(POISON).all()
    for others in ([*versions[:-1], object()], versions, [], []):  # without versions each call encodes
        same(several.encode(xs, stats, others).flat, expected, f"{text}, {others}")
        first.flat.fill_(POISON)


def check_rows(dtype: torch.dtype, device: torch.device) -> None:
    """The amaxes of rows, which one launch measures before it encodes, over what was there."""
    side = lpq.quantizer("fp8(scaling=row)").side("row")
    measured = ShardStatistics(side, "row", SHAPES, dtype, device, side.stats[0])
    for seed in range(2):
        xs = [x / (1 + 9 * seed) for x in matrices(seed, device)]
        measured.measure(xs)
        for x, (one,) in zip(xs, measured.stats, strict=True):
            assert one is not None
            same(one, operations.measure_reference(x.to(dtype), side, None)[0], "amaxes of rows")


def check_statistics(text: str, direction: Direction, dtype: torch.dtype, device: torch.device) -> None:
    """Those that reach beyond a shard, twice: the second measurement forgets the first."""
    side = lpq.quantizer(text).side(direction)
    sides: tuple[Quantizer | None, Quantizer | None] = (side, None) if direction == "row" else (None, side)
    measured = ShardStatistics(side, direction, SHAPES, dtype, device)
    for seed in range(2):
        xs = [x / (1 + 9 * seed) for x in matrices(seed, device)]
        measured.measure(xs)
        for x, stats in zip(xs, measured.stats, strict=True):
            expected = operations.measure_reference(x.to(dtype), *sides)
            for stat, one, other in zip(side.stats, stats, expected, strict=True):
                assert (one is None) == (stat not in spanning(side, direction))
                if one is not None:
                    same(one, other, f"{text}, {direction}, {stat.name}")


PIECES = (
    RankPieces(1, 2, 40000, 40960), RankPieces(24, 3, 112, 24 * 112), RankPieces(7, 4, 36, 1024),
    RankPieces(5, 2, 3, 15), RankPieces(1, 1, 4, 4), RankPieces(0, 2, 0, 64),
    RankPieces(300, 8, 16, 4800), RankPieces(1, 5, 13, 16),
)  # fmt: skip
"""Buffers of several lines and ranks: of pieces of 16 bytes, of 4 and of single ones, and without any."""


def check_places(device: torch.device) -> None:
    """More buffers than one launch takes, some of them from and to addresses that are not aligned."""
    several = [piece for piece in PIECES for _ in range(3)]
    place = bind_places(several, device)
    generator = torch.Generator().manual_seed(0)
    sources, buffers, expected = [], [], []
    for i, (lines, ranks, piece, apart) in enumerate(several):
        off = (0, 4, 1)[i % 3]
        sent = torch.randint(256, (off + ranks * max(apart, lines * piece),), dtype=torch.uint8, generator=generator)
        parts = [sent[off + rank * apart :][: lines * piece].view(lines, piece) for rank in range(ranks)]
        expected.append(torch.cat(parts, 1).reshape(-1))
        sources.append(sent.to(device)[off:])
        buffers.append(
            torch.full((BEFORE + off + len(expected[-1]) + BEFORE,), POISON, dtype=torch.uint8, device=device)
        )
    starts = [BEFORE + (0, 4, 1)[i % 3] for i in range(len(several))]
    place([t.data_ptr() for t in sources], [t.data_ptr() + at for t, at in zip(buffers, starts, strict=True)])
    for one, at, wanted in zip(buffers, starts, expected, strict=True):
        made = one.cpu()
        assert torch.equal(made[at:-BEFORE], wanted)
        assert (made[:at] == POISON).all()
        assert (made[-BEFORE:] == POISON).all()


TURNED = ("fp8", "fp8(dtype=e5m2)", "fp8(scaling=block, block=128x128)", "nvfp4(block=16x16)")
SIZES = ((128, 256), (33, 70), (512, 48), (300, 700))


def check_derived(text: str, device: torch.device) -> None:
    """More column operands than one launch makes, each of its row operand."""
    quantizer, generator = lpq.quantizer(text), torch.Generator().manual_seed(0)
    derived, expected = [], []
    for rows, cols in SIZES * 5:
        row = encode(quantizer.side("row"), torch.randn(rows, cols, generator=generator))
        expected.append(operations.transpose_reference(row).map(torch.Tensor.contiguous))
        row = row.map(lambda t: t.to(device))
        out = expected[-1].map(lambda t: torch.empty_like(t, device=device))
        for buffer in out.tensors():
            buffer.view(-1).view(torch.uint8).fill_(POISON)
        derived.append(Derived(quantizer, row, out.tensors()))
    for derive in bind_derive_into(derived, device):
        derive()
    for i, (one, wanted) in enumerate(zip(derived, expected, strict=True)):
        for k, (got, other) in enumerate(zip(one.out, wanted.tensors(), strict=True)):
            same(got.cpu(), other, f"{text}, matrix {i}, buffer {k}")
