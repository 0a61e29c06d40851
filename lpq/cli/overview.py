"""The kernels of all formats on a screen: a line for each operation, and each reason once, under a letter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from string import ascii_lowercase

import torch

from lpq.cli.kernels import NOTHING, Served
from lpq.cli.output import print_text
from lpq.registry import OPERATIONS
from lpq.registry.operations import TABLE
from lpq.registry.tables import table

ALONE = "lpq doctor QUANTIZER"


class Remarks:
    """Remarks about cells of a table, each under a letter; one that is made twice keeps its letter."""

    def __init__(self) -> None:
        self._about: dict[str, dict[str, None]] = {}

    def letters(self, served: Served, default: str | None) -> str:
        """Add the remarks about this cell; return their letters, in order."""
        remarks = [(served.error, "")] if served.error is not None else []
        if default is not None and served.operands[0] != default:
            remarks.append((f"for {served.operands[0]}", ""))
        if served.note:
            remarks.append((served.note, served.backend))
        remarks += [(r.reason, r.impl.partition(" ")[0]) for r in served.why_not]
        for words, backend in remarks:
            self._about.setdefault(words, {})[backend] = None
        order = list(self._about)
        return ",".join(map(_letter, sorted({order.index(words) for words, _ in remarks})))

    def lines(self) -> list[str]:
        """The remarks by their letters, each after the backends that it is about."""
        lines = []
        for i, (words, backends) in enumerate(self._about.items()):
            about = ", ".join(sorted(filter(None, backends)))
            lines.append(f"{_letter(i)}  {about}{': ' if about else ''}{words}")
        return lines


def show_overview(kernels: Mapping[str, Sequence[Served]], pairs: Iterable[Served], where: torch.device) -> None:
    """Print which backend runs each operation of each format, and of two formats at once."""
    remarks = Remarks()
    cells = {(s.op, name): _cell(s, remarks, name) for name, own in kernels.items() for s in own}
    ops = [op for op in OPERATIONS if any((op, name) in cells for name in kernels)]
    rows = [(op, *(cells.get((op, name), "") for name in kernels)) for op in ops]
    table(f"What runs on {where}, default options", ("operation", *kernels), rows)
    both: dict[tuple[str, str], list[str]] = {}
    for served in pairs:
        names = " and ".join(dict.fromkeys(served.operands))
        both.setdefault((served.op, _cell(served, remarks, None)), []).append(names)
    if both:
        rows = [(op, runs, ", ".join(names)) for (op, runs), names in both.items()]
        table("For two formats at once", ("operation", "runs", "formats"), rows)
    for line in remarks.lines():
        print_text(line)
    print_text(f"{'Letters say why no better kernel runs. ' if remarks.lines() else ''}`{ALONE}` names the kernels.")
    show_meanings(ops)


def show_meanings(ops: Iterable[str]) -> None:
    """Print what the kernels of these operations make, where the name of the operation does not say it."""
    for op, row in TABLE.items():
        if op in ops and row.explained:
            print_text(f"{op}: {row.meaning}.")


def _cell(served: Served, remarks: Remarks, name: str | None) -> str:
    runs = "–" if served.backend == NOTHING else served.backend
    return f"{runs} {remarks.letters(served, name)}".rstrip()


def _letter(index: int) -> str:
    most, least = divmod(index, len(ascii_lowercase))
    return (_letter(most - 1) if most else "") + ascii_lowercase[least]
