"""Which kernel serves an operation here, and why not a better one: for ``lpq doctor`` and ``lpq explain``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer

from lpq import registry
from lpq.cli.output import table
from lpq.core.quantizer import Quantizer
from lpq.ops import KernelError, choose
from lpq.registry.errors import OptionError

NOTHING = "none needed"
"""The kernel of an operation on ordinary matrices: there is nothing to launch."""


@dataclass(frozen=True)
class Served:
    """An operation and what runs it."""

    op: str
    operands: tuple[str, ...]
    backend: str
    impl: str | None
    """The kernel; None: the reference, or nothing at all."""
    why_not: tuple[tuple[str, str], ...]
    """The kernels that would have been preferred, and why each cannot run here."""
    error: str | None = None
    """Why nothing may run: the kernels that ``LPQ_KERNELS`` allows are not there."""
    broken: tuple[str, ...] = ()
    """The kernels among these that are at fault, as opposed to not being for this place."""
    note: str = ""
    """What a user should know of the kernel that runs."""

    @property
    def reasons(self) -> str:
        if self.error is not None:
            return self.error
        return "\n".join(f"{impl}: {reason}" for impl, reason in self.why_not)

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            **asdict(self),
            "why_not": [{"impl": impl, "reason": reason} for impl, reason in self.why_not],
        }


def served(op: str, operands: tuple[Quantizer, ...], device: torch.device) -> Served:
    """What serves ``op`` on these operands."""
    texts = tuple(q.text for q in operands)
    if all(q.plain for q in operands):
        return Served(op, texts, "torch" if op == "gemm" else NOTHING, None, ())
    try:
        choice = choose(op, texts, device)
    except KernelError as error:
        return Served(op, texts, "error", None, (), str(error))
    rejected = tuple(
        (f"{kernel.backend} {kernel.impl}", _noted(reason, kernel.note)) for kernel, reason in choice.rejected
    )
    broken = tuple(f"{kernel.backend} {kernel.impl}" for kernel in choice.broken)
    if choice.kernel is None:
        return Served(op, texts, choice.backend, None, rejected, broken=broken)
    return Served(op, texts, choice.backend, choice.kernel.impl, rejected, broken=broken, note=choice.kernel.note)


def _noted(words: str, note: str) -> str:
    return f"{words} ({note})" if note else words


def show(title: str, columns: Sequence[str], steps: Iterable[tuple[Sequence[str], Served]]) -> None:
    """Print what runs each step; ``columns`` are the heads of what names a step."""
    rows = [(*names, _noted(s.impl or s.backend, s.note), s.reasons) for names, s in steps]
    table(title, (*columns, "runs", "why not a better one"), rows)
    if not any(reasons for *_, reasons in rows):
        typer.echo("No other kernel is installed for any of these.\n")


def served_by_format(name: str, device: torch.device) -> list[Served]:
    """What serves each operation of a format with its default options."""
    quantizer = registry.quantizer(name)
    found: list[Served] = []
    for side in dict.fromkeys((quantizer.side("row"), quantizer.side("col"))):
        may = (("measure", side.stats), ("transpose", side.transposable), ("remember", side.state))
        ops = [op for op, has in may if has]
        found += [served(op, (side,), device) for op in (*ops, "quantize", "decode")]
        found.append(served("gemm", (side, side), device))
    return found


def pick_device(name: str) -> torch.device:
    """The device that ``--device`` names; ``auto`` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(f"--device {name}: no such device; use cpu, cuda, cuda:N or auto") from None
    seen = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= seen:
        raise KernelError(f"--device {name}: torch sees {seen} CUDA devices; use cpu or auto")
    return device
