"""The comparison of what ranks reduce after a step of an optimizer, before the first one and where it has changed.

Values are reduced in one flat tensor, in the order of the optimizer's parameters or of the model. With other parameters
on one rank, or in another order, values of different layers would be mixed in silence, or ranks wait in vain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lpq.distributed import meeting
from lpq.distributed.alike import compare_in_store
from lpq.distributed.ranks import Ranks
from lpq.operations.reduce_statistics import Parts
from lpq.registry.showing import listed

DIFFER = "the ranks do not step the same parameters"
REMEDY = "Give the optimizer the same parameters in the same order on all ranks, and take its steps on all"
WAITING = (
    "ranks compare the parameters that an optimizer steps before they reduce statistics of these, and not all have "
    f"come. {REMEDY}"
)


@dataclass
class Reduced:
    """The values that an optimizer's last step had reduced, as this rank has compared them with the others."""

    texts: dict[tuple[int, ...], list[str]] = field(default_factory=dict)
    """The layers of each value, by the ranks."""
    sizes: dict[tuple[object, ...], list[int]] = field(default_factory=dict)
    """The numbers of values, by the ranks and the device; none where the optimizer has other parameters since."""

    def compare(self, parts: Parts) -> None:
        """Raise on all ranks that reduce values together unless all have values of the same layers in the same order.
        Ranks compare nothing while all is as in the last step: others of them may see no change elsewhere."""
        sizes = {key: [value.numel() for _, value in part] for key, (_, part) in parts.items()}
        if sizes == self.sizes:
            return
        by_ranks: dict[tuple[int, ...], tuple[Ranks, list[str]]] = {}
        for (_, ranks, device), (group, part) in sorted(parts.items(), key=lambda one: (one[0][1], one[0][0])):
            texts = by_ranks.setdefault(ranks, (Ranks(group, device=device), []))[1]
            texts += [f"{value.numel()} statistics of {listed([one.title for one in own])}" for own, value in part]
        changed = [pair for ranks, pair in by_ranks.items() if pair[1] != self.texts.get(ranks)]
        errors = list[RuntimeError]()
        for pair in changed:
            try:
                compare_in_store([pair], "reductions", (DIFFER, REMEDY, WAITING))
            except RuntimeError as error:
                errors.append(error)
        for ranks, _ in changed:  # nobody leaves before all have compared; one of them may be of more sets than others
            alike = meeting.meet(ranks.names, "all reductions", str(bool(errors)), None, WAITING)
            if not alike and not errors:
                errors.append(RuntimeError(f"{DIFFER}: others, with which some of these reduce, say where. {REMEDY}"))
        for first in errors:
            raise first
        self.texts, self.sizes = {ranks: texts for ranks, (_, texts) in by_ranks.items()}, sizes
