"""Checks before ranks save or load together: what they exchange must show that all of them have one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lpq.checkpoint.errors import CheckpointError
from lpq.checkpoint.ranks import Ranks
from lpq.registry.showing import listed

Meshes = frozenset[tuple[int, ...]]
"""For each mesh of a model, the ranks over which its tensors lie."""


@dataclass(frozen=True)
class Facts:
    """A rank's account of what it is about to save or to load, for the other ranks."""

    place: str
    meshes: Meshes
    optimizers: tuple[str, ...]
    """The kind of each optimizer."""
    description: str = ""
    """The digest of the description; empty where something is loaded, as ``tensors``."""
    tensors: str = ""
    """The digest of the names and shapes of the tensors."""
    memories: dict[str, Tensor] = field(default_factory=dict)


def check_alike(found: Sequence[Facts], ranks: Ranks) -> None:
    """Raise an error if the accounts of all ranks do not agree."""
    if len(places := {facts.place for facts in found}) > 1:
        shown = ", ".join(sorted(places))
        raise CheckpointError(
            f"the ranks were given different paths: {shown}. Pass the same on all ranks, one that all of them see"
        )
    check_one_model([facts.meshes for facts in found], ranks)
    _check_optimizers([facts.optimizers for facts in found], ranks)
    if len({facts.description for facts in found}) > 1:
        raise CheckpointError(
            "the ranks hold different layers, quantizers, recipes or steps, and a checkpoint describes one model: call "
            "lpq.set_step and lpq.checkpoint.save alike on all ranks"
        )


def check_one_model(found: Sequence[Meshes], ranks: Ranks) -> None:
    """Refuse ranks that have separate models, whose tensors would be mixed because they have the same names.

    Ranks have one model if its meshes connect them all, directly or through other ranks.
    """
    meshes = sorted({mesh for own in found for mesh in own})
    if strangers := [mesh for mesh in meshes if not {*mesh} <= {*ranks.names}]:
        raise CheckpointError(
            f"a tensor lies over the ranks {[*strangers[0]]}, and those that were called together are "
            f"{ranks.names}: call it on all ranks of the model, with a process_group of just these"
        )
    groups: list[set[int]] = [{rank} for rank in ranks.names]
    for mesh in meshes:
        joined = [group for group in groups if group & {*mesh}]
        groups = [group for group in groups if group not in joined] + [set[int]().union(*joined)]
    if meshes and len(groups) > 1:
        shown = " and ".join(str(sorted(group)) for group in sorted(groups, key=min))
        raise CheckpointError(
            f"no tensor joins the ranks {shown}, so these have models of their own, and one would hide the other: call "
            "it for each by itself, with a directory of its own and process_group=mesh.get_group(), or a group of all "
            "ranks of its mesh"
        )


def _check_optimizers(found: Sequence[Sequence[str]], ranks: Ranks) -> None:
    """Refuse an optimizer that some ranks were given and others were not."""
    for name, kinds in zip(ranks.names, found, strict=True):
        if kinds != found[0]:
            first, other = (", ".join(given) or "no optimizer" for given in (found[0], kinds))
            raise CheckpointError(
                f"rank {ranks.names[0]} was given {first}, and rank {name} {other}: pass the same optimizers on all "
                "ranks"
            )


def check_tensors(held: Sequence[Sequence[str]], ranks: Ranks) -> None:
    """Refuse ranks with different tensors, and name these: a load would miss some of them or mix two."""
    mine = held[0]
    for name, theirs in zip(ranks.names, held, strict=True):
        if mine != theirs:
            only, others = (
                listed([n for n in a if n not in set(b)]) or "none" for a, b in ((mine, theirs), (theirs, mine))
            )
            raise CheckpointError(
                f"the ranks hold different tensors: rank {ranks.names[0]} has {only}, and rank {name} has {others} in "
                "their place. A checkpoint is of one model: build it alike on all ranks"
            )
