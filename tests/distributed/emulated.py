"""Kernels for fragments that run here: they read the tables by their pointers, and encode as the formats define it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lpq import registry
from lpq.core import Quantizer
from lpq.distributed.casting.kinds import HEAD
from lpq.formats.blocks import block_amax
from lpq.kernels.fragments import CastKernels, Fragment, SentWords, Turned
from lpq.operations.binding import Operand, Transposes
from lpq.operations.quantizing import quantize_reference

FIRST = {Fragment: 3, SentWords: 1, Turned: 1}
"""How many numbers a row of a table has beside what it says: its first blocks of threads."""


def memory(pointer: int, count: int, dtype: torch.dtype) -> Tensor:
    """The memory there, which can be written."""
    if not count:
        return torch.empty(0, dtype=dtype)
    assert pointer
    assert pointer % dtype.itemsize == 0
    return torch.frombuffer((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(pointer), dtype=dtype)


@dataclass
class Emulated:
    """In place of a ``CudaKernel``: ``run`` takes one row of the table."""

    name: str
    kind: type[Any]
    run: Callable[[Any, tuple[str, ...]], None]
    which: int = 0
    """The kernel's place among those that read such a table."""
    launches: list[str] = field(default_factory=list)

    def launch(self, device: int, macros: tuple[str, ...], blocks: int, table: int, count: int) -> None:
        """Run over all rows, as blocks of threads find theirs."""
        self.launches.append(self.name)
        width, own = len(self.kind._fields) + FIRST[self.kind], len(self.kind._fields)
        with _disable_current_modes():  # who counts operators does not count these
            rows = memory(table, count * width, torch.int64).view(count, width).tolist()
            first = [row[own + self.which] for row in rows] + [blocks]
            assert first[0] == 0
            for row, begin, end in zip(rows, first, first[1:], strict=False):
                assert begin <= end
                if begin < end:
                    self.run(self.kind(*row[:own]), macros)


def real(side: Quantizer) -> CastKernels | None:
    """The kernels of this quantizer, if its plugin has any."""
    for spec in registry.kernels("cast", (registry.format_of(type(side)).name,)):
        if spec.why_not is None or registry.resolve(spec.why_not)(side) is None:
            kernels: CastKernels = registry.resolve(spec.impl)(side)
            return kernels
    return None


def real_transposes(operands: Sequence[Operand], device: torch.device, kernels: object) -> Transposes | None:
    """The kernel that transposes several operands, if their plugin has one."""
    for spec in registry.kernels("transpose", (registry.format_of(type(operands[0].quantizer)).name,)):
        if spec.several is not None:
            bound: Transposes = registry.resolve(spec.several)(operands, device)
            return bound
    return None


def emulated(side: Quantizer, launches: list[str]) -> CastKernels | None:
    """Return kernels that run on the CPU in place of a format's own."""
    kernels = real(side)
    if kernels is None:
        return None
    steps = {"measure": _measure, "scales": _scales, "codes": _codes}
    runs = {
        name: cast("Any", Emulated(name, Fragment, _of(side, run), which, launches))
        for which, (name, run) in enumerate(steps.items())
    }
    return replace(kernels, **runs)


def send_words(launches: list[str]) -> Emulated:
    return Emulated("send_words", SentWords, _send_words, launches=launches)


def turn(launches: list[str]) -> Emulated:
    return Emulated("turn", Turned, _turn, launches=launches)


# ---------------------------------------------------------------------------------------------- of a format


def _of(
    side: Quantizer, run: Callable[[Quantizer, Fragment, bool], None]
) -> Callable[[Fragment, tuple[str, ...]], None]:
    def one(fragment: Fragment, macros: tuple[str, ...]) -> None:
        col = "LPQ_COL" in macros
        down, across = side.stats[-1].block[:: -1 if col else 1]
        assert f"LPQ_DOWN={down or 0}" in macros
        assert f"LPQ_ACROSS={across or 0}" in macros
        run(side, fragment, col)

    return one


def _measure(side: Quantizer, f: Fragment, col: bool) -> None:
    x = torch.zeros(f.rows * f.cols)
    x[f.start : f.stop] = memory(f.values, f.stop - f.start, torch.float32)
    amaxes = block_amax(x.view(f.rows, f.cols), side.stats[-1].block[:: -1 if col else 1])
    _raise(f.amaxes, amaxes)
    if len(side.stats) == 2:
        _raise(f.overall, amaxes.flatten().view(torch.int32).amax().view(torch.float32))


def _raise(pointer: int, values: Tensor) -> None:
    """As atomics do."""
    bits = values.reshape(-1).view(torch.int32)
    held = memory(pointer, len(bits), torch.int32)
    held.copy_(torch.maximum(held, bits))


def _scales(side: Quantizer, f: Fragment, col: bool) -> None:
    _, scales, *kept = _encode(side, f, torch.zeros(f.rows, f.cols), col)
    memory(f.scales, scales.numel(), scales.dtype).copy_(scales.reshape(-1))
    for tensor in kept:
        memory(f.kept, 1, torch.float32).copy_(tensor)
    lines, width = _laid(scales, col).shape if scales.dim() else (1, 1)
    memory(f.factors, lines * width, torch.float32).fill_(1.0)


def _codes(side: Quantizer, f: Fragment, col: bool) -> None:
    assert memory(f.factors, 1, torch.float32) == 1.0, "scales come first"
    x = torch.zeros(f.rows * f.cols)
    x[f.start : f.stop] = memory(f.values, f.stop - f.start, torch.float32)
    for start, stop, head, tail in _others(f):
        x[start : start + len(head)] = head
        x[stop - len(tail) : stop] = tail
    codes = _laid(_encode(side, f, x.view(f.rows, f.cols), col)[0], col)
    assert codes.shape[1] == f.width
    made = codes.reshape(-1).view(torch.uint8)[f.codes_start : f.codes_stop]
    memory(f.codes + f.codes_start, len(made), torch.uint8).copy_(made)


def _others(f: Fragment) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield the notes of all ranks on their fragments."""
    size = HEAD + 2 * f.reach
    for said in memory(f.ends, f.ranks * size if f.ends else 0, torch.int32).view(-1, size):
        a, b, c, d = said[:4].tolist()
        start, stop = a * f.cols + b, c * f.cols + d
        count = min(f.reach, stop - start)
        values = said[4:].view(torch.float32)
        yield start, stop, values[:count], values[len(values) - count :]


def _encode(side: Quantizer, f: Fragment, x: Tensor, col: bool) -> list[Tensor]:
    """The buffers of the operand with the statistics that are to be used."""
    shape = (f.cols, f.rows) if col else (f.rows, f.cols)
    stats: list[Tensor | None] = []
    for stat, pointer in zip(side.stats, (f.used_overall, f.used_amaxes)[-len(side.stats) :], strict=True):
        grid = stat.grid(*shape) or (1, 1)
        laid = memory(pointer, grid[0] * grid[1], torch.float32).view(grid[::-1] if col else grid)
        values = (laid.t() if col else laid).contiguous().clone()
        stats.append(values if stat.grid(*shape) else values.reshape(()))
    return quantize_reference((x.t() if col else x).contiguous(), stats, side, None, None, 0, False)


def _laid(buffer: Tensor, col: bool) -> Tensor:
    """In the order of the weight."""
    return buffer.t().contiguous() if col and buffer.dim() else buffer.contiguous()


# ---------------------------------------------------------------------------------------------- of none


def _send_words(t: SentWords, macros: tuple[str, ...]) -> None:
    nothing, head = torch.iinfo(torch.int32).min, HEAD
    values, to = memory(t.values, t.stop - t.start, torch.int32), memory(t.to, t.words, torch.int32)
    to.fill_(nothing)
    if t.reach < 0:
        to[t.start : t.stop] = values
        return
    said = to.view(-1, head + 2 * t.reach)[t.rank]
    said[:head] = torch.tensor([*divmod(t.start, t.cols), *divmod(t.stop, t.cols)], dtype=torch.int32)
    count = min(t.reach, len(values))
    said[head : head + count] = values[:count]
    said[len(said) - count :] = values[len(values) - count :]


def _turn(t: Turned, macros: tuple[str, ...]) -> None:
    if t.bits != 4:
        dtype = {8: torch.uint8, 32: torch.int32}[t.bits]
        source = memory(t.source, t.rows * t.cols, dtype).view(t.rows, t.cols)
        memory(t.to, source.numel(), dtype).copy_(source.t().reshape(-1))
        return
    wide, high = (-(-size // 16) * 16 for size in (t.cols, t.rows))
    packed = memory(t.source, t.rows * wide // 2, torch.uint8).view(t.rows, wide // 2)
    codes = torch.stack((packed & 15, packed >> 4), -1).view(t.rows, wide)[:, : t.cols]
    turned = torch.zeros(t.cols, high, dtype=torch.uint8)
    turned[:, : t.rows] = codes.t()
    memory(t.to, t.cols * high // 2, torch.uint8).copy_((turned[:, ::2] | turned[:, 1::2] << 4).reshape(-1))
