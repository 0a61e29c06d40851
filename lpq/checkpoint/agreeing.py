"""Checks before ranks save or load together: all ranks must have one model, and the same path."""

from __future__ import annotations

from collections.abc import Sequence

from lpq.checkpoint.errors import CheckpointError
from lpq.checkpoint.ranks import CheckpointRanks

Meshes = frozenset[tuple[int, ...]]
"""For each mesh of a model, the ranks over which its tensors lie."""
ALIKE = "Build and convert the model alike on all ranks, and have them read the same file"


def check_alike(place: str, meshes: Meshes, optimizers: Sequence[str], ranks: CheckpointRanks) -> None:
    """Raise on all ranks unless they save or load at one place, one model, with optimizers of the same kinds."""
    ranks.equal(
        [place], "the ranks were given different paths", "Pass the same path on all ranks, one that all ranks can read"
    )
    check_one_model([*ranks.exchange(meshes).values()], ranks)
    ranks.equal(optimizers, "the ranks were given different optimizers", "Pass the same on all ranks", "no optimizer")


def check_one_model(of_ranks: Sequence[Meshes], ranks: CheckpointRanks) -> None:
    """Refuse ranks that have separate models, whose tensors would be mixed because they have the same names.

    Ranks have one model if its meshes connect them all, directly or through other ranks.
    """
    meshes = sorted({mesh for own in of_ranks for mesh in own})
    if strangers := [mesh for mesh in meshes if not {*mesh} <= {*ranks.names}]:
        raise CheckpointError(
            f"a tensor lies over the ranks {[*strangers[0]]}, and the ranks that call this together "
            f"are {ranks.names}: call it on all ranks of the model, with a process_group of just these"
        )
    groups: list[set[int]] = [{rank} for rank in ranks.names]
    for mesh in meshes:
        neighbours = [group for group in groups if group & {*mesh}]
        groups = [group for group in groups if group not in neighbours] + [set[int]().union(*neighbours)]
    if meshes and len(groups) > 1:
        listing = " and ".join(str(sorted(group)) for group in sorted(groups, key=min))
        raise CheckpointError(
            f"no tensor joins the ranks {listing}, so these have models of their own, and one would hide the other: "
            "call it for each by itself, with a directory of its own and process_group=mesh.get_group(), or a group of "
            "all ranks of its mesh"
        )
