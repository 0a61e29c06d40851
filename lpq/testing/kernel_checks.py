"""The check of each operation's kernels: the operands that they are tried on, and the comparison with the reference."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lpq import registry
from lpq.formats import Quantizer
from lpq.kernels.table import allowed_backends, why_not
from lpq.registry import KernelSpec
from lpq.registry.errors import words
from lpq.registry.operations import TABLE
from lpq.testing import comparing
from lpq.testing.expect import there

Pair = tuple[Quantizer | None, Quantizer | None]
Compare = Callable[[KernelSpec, Quantizer | None, Quantizer | None, Tensor, str, str], bool]
"""``compare(kernel, row, col, x, device, name)``; whether there was anything to compare."""


def _of_matrix(kernel: KernelSpec, first: Quantizer, last: Quantizer) -> Iterator[Pair]:
    row, col = first.side("row"), last.side("col")
    yield row, col
    if len(kernel.formats) == 1:
        yield from ((row, None), (None, col))


def _of_row(kernel: KernelSpec, first: Quantizer, last: Quantizer) -> Iterator[Pair]:
    if TABLE[kernel.op].is_of(first.side("row")):
        yield first.side("row"), None


def _of_each(kernel: KernelSpec, first: Quantizer, last: Quantizer) -> Iterator[Pair]:
    yield from ((first.side("row"), None), (last.side("col"), None))


def _by_direction(kernel: KernelSpec, first: Quantizer, last: Quantizer) -> Iterator[Pair]:
    yield from ((first.side("row"), None), (None, last.side("col")))


def _of_product(kernel: KernelSpec, first: Quantizer, last: Quantizer) -> Iterator[Pair]:
    yield first.side("row"), last.side("row")


@dataclass(frozen=True)
class KernelCheck:
    """How kernels of one operation are compared with its reference."""

    pairs: Callable[[KernelSpec, Quantizer, Quantizer], Iterable[Pair]]
    """The operands that a kernel is tried on, of quantizers of its first and of its last format."""
    compare: Compare = comparing.compare_calls
    views: Callable[[KernelSpec, Quantizer | None, Quantizer | None, str], bool] = lambda *_: False
    """As ``compare``, on views of larger operands; by default for an operation that takes none."""
    several: Callable[[KernelSpec, Quantizer, Sequence[tuple[int, int]], str], None] | None = None
    """The comparison of a launch for several matrices; None: the operation has none."""
    sums: bool = False
    """Whether results are compared up to the order of sums, or of products, and not on numbers of all sizes: where sums
    of these overflow depends on their order."""
    nothing: str = "it accepts these operands, and made nothing of them"
    """Why there was nothing to compare, though a kernel accepts its operands."""


CHECKS = {
    "measure": KernelCheck(_of_matrix),
    "quantize": KernelCheck(_of_matrix, several=comparing.compare_encodings),
    "decode": KernelCheck(_of_row, views=comparing.compare_views),
    "transpose": KernelCheck(_of_row, views=comparing.compare_views, several=comparing.compare_transposes),
    "gemm": KernelCheck(_of_product, views=comparing.compare_views, sums=True),
    "exact": KernelCheck(
        _of_each, comparing.compare_exact, comparing.compare_exact_of_views, sums=True,
        nothing="it has no exact form of any operand that it was given",
    ),
    "tile": KernelCheck(
        _by_direction, comparing.compare_tiles,
        nothing="no other built-in format has an operand to make beside its own",
    ),
    "exact_tile": KernelCheck(
        _by_direction, comparing.compare_exact_tiles, sums=True,
        nothing="nothing was made by it of any matrix, though it accepts these operands",
    ),
    "reader": KernelCheck(
        _of_row, comparing.compare_recoded,
        nothing="no column operand of this format is made of codes alone",
    ),
    "stored_tile": None,
    "tile_program": None,
    "remember": KernelCheck(_of_row, comparing.compare_memories),
    "grouped_gemm": None,
}  # fmt: skip
"""The check for each operation; None: there is none, as products of rows in groups have no matrix to be tried with, and
tiles in Triton are parts of other programs."""


def kernels(quantizer: Quantizer) -> list[KernelSpec]:
    """The kernels in the table that serve this format, on one side at least."""
    name = registry.format_of(type(quantizer)).name
    return [kernel for plugin in registry.plugins() for kernel in plugin.kernels if name in kernel.formats]


def compared(quantizer: Quantizer) -> list[KernelSpec]:
    """The kernels with a check that serve this format, each with the type of device that runs it: the CPU runs
    kernels in Triton, where Triton interprets them."""
    served = [kernel for kernel in kernels(quantizer) if CHECKS[kernel.op] is not None]
    if triton_interprets():
        served = [dataclasses.replace(k, device="cpu") if k.backend == "triton" else k for k in served]
    return served


def triton_interprets() -> bool:
    """Whether ``TRITON_INTERPRET`` has Triton run its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def refusal(kernel: KernelSpec, operands: tuple[Quantizer, ...]) -> str | None:
    """Why a kernel is not compared for these operands; None: it is."""
    allowed = allowed_backends()
    try:
        return why_not(kernel, operands, torch.device(kernel.device), allowed)
    except Exception as error:
        if kernel.backend == "triton" and kernel.device == "cpu":  # it may read a GPU's properties, and there is none
            return f"its why_not raised {words(error)}, where Triton interprets on a CPU"
        raise


def check_of(kernel: KernelSpec) -> KernelCheck:
    """Return the check of a kernel's operation, which must have one."""
    return there(CHECKS[kernel.op], f"the check of kernels for {kernel.op}")


def pairs(kernel: KernelSpec, quantizer: Quantizer) -> Iterator[Pair]:
    """The operands to try a kernel on: this quantizer where its format stands, else that format's default."""
    name = registry.format_of(type(quantizer)).name
    first, last = (
        quantizer if format == name else registry.quantizer(format)
        for format in (kernel.formats[0], kernel.formats[-1])
    )
    yield from check_of(kernel).pairs(kernel, first, last)
