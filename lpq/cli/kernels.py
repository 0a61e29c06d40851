"""Which kernel serves an operation here, and why not a better one: for ``lpq doctor`` and ``lpq explain``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, islice, permutations
from string import ascii_lowercase
from typing import Any

import torch
import typer

from lpq import registry
from lpq.cli.output import print_text
from lpq.formats.format import Quantizer
from lpq.kernels import KernelError, choose
from lpq.kernels.table import ENVIRONMENT
from lpq.registry import OPERATIONS
from lpq.registry.errors import OptionError, words
from lpq.registry.operations import TABLE
from lpq.registry.tables import table
from lpq.testing.options import nearby

NOTHING = "none needed"
"""The kernel of an operation on ordinary matrices: there is nothing to launch."""
NONE = "none"
"""The kernel of an operation without a reference that no kernel serves."""


@dataclass(frozen=True)
class Rejected:
    """A kernel that would have been preferred, and why it cannot run here."""

    impl: str
    """The kernel's backend and its place."""
    reason: str
    note: str = ""
    """A remark for the user about the kernel itself."""

    @property
    def words(self) -> str:
        """The reason and the note."""
        return _noted(self.reason, self.note)


@dataclass(frozen=True)
class Served:
    """An operation and the kernel that runs it."""

    op: str
    operands: tuple[str, ...]
    backend: str
    impl: str | None
    """The kernel; None: the reference, or nothing at all."""
    why_not: tuple[Rejected, ...]
    error: str | None = None
    """Why nothing may run: the kernels that ``LPQ_KERNELS`` allows are not there."""
    broken: tuple[str, ...] = ()
    """The kernels among these that are at fault, as opposed to not being for this place."""
    note: str = ""
    """A remark for the user about the kernel that runs."""

    @property
    def every_reason(self) -> str:
        """A line for each kernel, whatever the reasons."""
        return self.error or "\n".join(f"{rejected.impl}: {rejected.words}" for rejected in self.why_not)

    @property
    def by_reason(self) -> dict[str, list[str]]:
        """The kernels that cannot run, by the reason."""
        kernels: dict[str, list[str]] = {}
        for rejected in self.why_not:
            kernels.setdefault(rejected.words, []).append(rejected.impl)
        return kernels

    def reasons(self, letters: Mapping[str, str]) -> str:
        """Each reason once, after all kernels that it holds for; its letter in place of one that has a letter."""
        lines = (
            f"{', '.join(kernels)}{f' ({letters[reason]})' if reason in letters else f': {reason}'}"
            for reason, kernels in self.by_reason.items()
        )
        return self.error or "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """The same as plain data for JSON."""
        return {**asdict(self), "why_not": [{"impl": r.impl, "reason": r.words} for r in self.why_not]}


def served(op: str, operands: tuple[Quantizer, ...], device: torch.device) -> Served:
    """Find the kernel that serves ``op`` on these operands."""
    texts = tuple(q.text for q in operands)
    if all(q.plain for q in operands):
        return Served(op, texts, "torch" if op == "gemm" else NOTHING, None, ())
    try:
        choice = choose(op, texts, device)
    except KernelError as error:
        if not TABLE[op].reference:
            return Served(op, texts, NONE, None, (Rejected(ENVIRONMENT, "it allows no kernel that runs here"),))
        return Served(op, texts, "error", None, (), str(error))
    rejected = tuple(Rejected(f"{k.backend} {k.impl}", reason, k.note) for k, reason in choice.rejected)
    broken = tuple(f"{kernel.backend} {kernel.impl}" for kernel in choice.broken)
    if choice.kernel is None:
        return Served(op, texts, choice.backend if TABLE[op].reference else NONE, None, rejected, broken=broken)
    return Served(op, texts, choice.backend, choice.kernel.impl, rejected, broken=broken, note=choice.kernel.note)


def _noted(words: str, note: str) -> str:
    return f"{words} ({note})" if note else words


def show(
    title: str, columns: Sequence[str], steps: Iterable[tuple[Sequence[str], Served]], *, full: bool = False
) -> None:
    """Print what runs each step; ``columns`` are the heads of what names a step.

    Steps alike share a row. Kernels of a row share a reason, and a reason that several rows have stands below the
    table, under a letter. With ``full`` nothing is shared.
    """
    rows: list[tuple[str, ...]]
    letters: dict[str, str] = {}
    if full:
        rows = [(*names, _noted(s.impl or s.backend, s.note), s.every_reason) for names, s in steps]
    else:
        alike: dict[tuple[str, ...], tuple[list[str], Served]] = {}
        for (*names, last), s in steps:
            row = (*names, _noted(s.impl or s.backend, s.note), s.reasons({}))
            alike.setdefault(row, ([], s))[0].append(last)
        counts = Counter(reason for _, s in alike.values() for reason in s.by_reason)
        letters = dict(zip((reason for reason, count in counts.items() if count > 1), ascii_lowercase, strict=False))
        rows = [(*names, "\n".join(last), runs, s.reasons(letters)) for (*names, runs, _), (last, s) in alike.items()]
    table(title, (*columns, "runs", "why not a better one"), rows)
    for reason, letter in letters.items():
        print_text(f"{letter}  {reason}")
    if not any(reasons for *_, reasons in rows):
        typer.echo("No other kernel is installed for any of these.\n")


def served_by_format(name: str, device: torch.device) -> list[Served]:
    """List the kernels of all operations of a format with its default options, and of others that it has kernels for.

    An operation that only other options need, such as a memory of past statistics, is shown with one of these.
    """
    rows = served_by_quantizer(registry.quantizer(name), device)
    for op in OPERATIONS:
        if registry.kernels(op, (name,)) and op not in {s.op for s in rows}:
            needy = (side for other in nearby(name) for side in _sides(other) if _does(op, side))
            rows += [served(op, (side,), device) for side in islice(needy, 1)]
    return rows


def served_by_quantizer(quantizer: Quantizer, device: torch.device) -> list[Served]:
    """List the kernels of all operations of its operands, of both operands if these differ by direction."""
    rows: list[Served] = []
    for side in _sides(quantizer):
        ops = [op for op in OPERATIONS if _does(op, side)]
        rows += [served(op, (side,) * TABLE[op].formats[0], device) for op in ops]
    return rows


def served_by_pair(device: torch.device, formats: Container[str]) -> list[Served]:
    """List the kernels of operations on operands of two of these formats.

    These are operations with a kernel of their own, encoding both operands where both are made tile by tile, and
    products where both have an exact form.
    """
    kernels = {(k.op, k.formats) for plugin in registry.plugins() for k in plugin.kernels}
    pairs = {(op, names) for op, names in kernels if len(set(names)) == 2 and all(name in formats for name in names)}
    tiled, exact = (
        [name for name in registry.formats() if name in formats and registry.kernels(op, (name,))]
        for op in ("tile", "exact")
    )
    pairs |= {("quantize", names) for names in permutations(tiled, 2)}
    pairs |= {("gemm", names) for names in combinations(exact, 2)}
    rows: list[Served] = []
    for op, (first, last) in sorted(pairs, key=lambda pair: (OPERATIONS.index(pair[0]), pair[1])):
        row, other = registry.quantizer(first).side("row"), registry.quantizer(last)
        rows.append(served(op, (row, other.side("row" if op == "gemm" else "col")), device))
    return rows


def _sides(quantizer: Quantizer) -> Iterable[Quantizer]:
    return dict.fromkeys((quantizer.side("row"), quantizer.side("col")))


def _does(op: str, side: Quantizer) -> bool:
    """Whether there is this operation for operands of a quantizer; without a reference only if it has a kernel."""
    row = TABLE[op]
    if not row.reference:
        return bool(registry.kernels(op, (registry.format_of(type(side)).name,)))
    return row.is_of(side)


def pick_device(name: str) -> torch.device:
    """The device that ``--device`` names; ``auto`` is the GPU if there is one. A GPU gets its number."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(f"--device {name}: no such device; use cpu, cuda, cuda:N or auto") from None
    if device.type == "meta":
        raise OptionError(f"--device {name}: it holds no numbers, so that nothing runs there; use cpu, cuda or auto")
    if device.type != "cuda":
        _use(device, name)
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise KernelError(f"--device {name}: torch sees {count} CUDA devices; use cpu or auto")
    try:
        current = torch.cuda.current_device()
    except Exception as error:  # as where the driver is too old: counting devices does not show it
        raise KernelError(f"--device {name}: torch cannot use CUDA here: {words(error)}; use cpu") from error
    return torch.device("cuda", current if device.index is None else device.index)


def _use(device: torch.device, name: str) -> None:
    """Raise an error where torch lists a device of this type but cannot use it."""
    try:
        torch.empty(0, dtype=torch.uint8, device=device)
    except Exception as error:  # of a type that differs between types of devices
        why = str(error).partition("\n")[0].partition(". ")[0]  # the rest is a page about torch's operators
        raise KernelError(f"--device {name}: torch cannot use it here: {why}; use cpu, cuda or auto") from error
