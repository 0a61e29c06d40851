"""The report of a conversion: the converted modules, those that were left and why, and their shares of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lpq.nn.coverage import Coverage
from lpq.nn.names import grouped
from lpq.registry.showing import Readable


@dataclass(frozen=True)
class Entry:
    """One module in the report."""

    name: str
    kind: str
    """The class of the module before the conversion."""
    note: str
    """The recipe it got, or why it was left alone."""


@dataclass(frozen=True, repr=False)
class Report(Readable):
    """The modules that a conversion converted, and the modules with matrices that it left alone, with reasons. The text
    begins with the converted share of the model."""

    converted: tuple[Entry, ...]
    left: tuple[Entry, ...]
    unmatched: tuple[str, ...]
    """Patterns of the policy that match no layer."""
    unreached: tuple[int, ...] = ()
    """The numbers of the policy's rules that hold for no layer at any step: rules before them always win."""
    misplaced: tuple[tuple[int, str], ...] = ()
    """The numbers of the policy's rules with ``blocks`` that are for no layer of the model, and why."""
    weights: tuple[Entry, ...] = ()
    """With ``convert(…, weights=…)``: how each weight is stored and gathered, and why it is not quantized."""
    parallel: tuple[Entry, ...] = ()
    """Under tensor and expert parallelism: how each layer is sharded, and in which form sequences are gathered, and
    rows sent to experts."""
    experts: tuple[Entry, ...] = ()
    """How the products of experts are computed, and from how many rows on that takes less time than bf16."""
    fused: tuple[Entry, ...] = ()
    """The blocks that are computed as one function each, and the norms that encode their output; see ``lpq.fuse``."""
    apart: tuple[Entry, ...] = ()
    """Other blocks and norms that ``lpq.fuse`` looked at, and why they are computed as before."""
    uncalled: tuple[str, ...] = ()
    """The names of converted layers that no pass has called, though others: they count as not converted."""
    read: tuple[str, ...] = ()
    """The names of the others whose weight the pass of another module has read, as it does to multiply by it."""
    coverage: Coverage = field(default_factory=Coverage)
    """How much of the model's matrices is converted."""
    full: bool = field(default=False, compare=False)
    """Whether the text has a line for each module. Otherwise modules with the same note share a line, with ``0–79`` for
    layers in a row."""

    def __str__(self) -> str:
        idle = f"; {len(self.uncalled)} of the converted were not called so far" if self.uncalled else ""
        idle += f"; a pass has read the weights of {len(self.read)} past them" if self.read else ""
        tried = len(self.fused) + len(self.apart)
        blocks = f", {len(self.fused)} of {tried} blocks and norms fused" if tried else ""
        lines = [str(self.coverage), f"{len(self.converted)} converted, {len(self.left)} left alone{blocks}{idle}"]
        for title, entries in (
            ("converted", self.converted),
            ("left alone", self.left),
            ("weight", self.weights),
            ("parallel", self.parallel),
            ("experts", self.experts),
            ("fused", self.fused),
            ("not fused", self.apart),
        ):
            lines += [f"{title:>10}  {line}" for line in self._lines(entries)]
        lines += [f"no layer matches the pattern {p!r}" for p in self.unmatched]
        lines += [f"rule {number} never holds: {why}" for number, why in self.never_holding]
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def never_holding(self) -> list[tuple[int, str]]:
        """The numbers of the rules that hold for no layer at any step, each with the reason."""
        return sorted([*((n, "the rules before it win at every step") for n in self.unreached), *self.misplaced])

    def _lines(self, entries: tuple[Entry, ...]) -> Iterator[str]:
        every = [e.name for e in (*self.converted, *self.left, *self.fused, *self.apart)]
        alike: dict[tuple[str, str, int], list[str]] = {}
        for i, entry in enumerate(entries):
            alike.setdefault((entry.kind, entry.note, i if self.full else 0), []).append(entry.name)
        for (kind, note, _), names in alike.items():
            groups = []
            for called, members in grouped(names, every):
                count = f"{len(members)} " if len(members) > 1 else ""
                of = f" ({count}{kind})" if kind != WEIGHT else f" ({count.strip()})" if count else ""
                groups.append(f"{called or '(the model)'}{of}")
            yield f"{', '.join(groups)}: {note}"


WEIGHT = "weight"
"""The kind of entries about weights."""
