"""Ranks that act as one: over a group, over a mesh, and through several sets of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import agreed, mesh_of, on_ranks
from torch.distributed.tensor import distribute_tensor

from lpq.distributed.ranks import Ranks, raise_on_all, sharing


@on_ranks(4)
def test_of_a_mesh(rank: int) -> None:
    mesh = mesh_of("dp", "tp")
    ranks = Ranks(mesh)
    assert ranks.exchange(rank * rank) == {0: 0, 1: 1, 2: 4, 3: 9}
    assert Ranks(mesh["tp"]).exchange(rank) == {first: first for first in (rank // 2 * 2, rank // 2 * 2 + 1)}
    assert ranks.first(lambda: rank + 7) == 7
    assert ranks.each(lambda: -rank) == -rank

    def fails() -> None:
        if rank > 1:
            raise KeyError(rank)

    assert {said.partition(" (")[0] for said in agreed(lambda: ranks.each(fails))} == {
        "RuntimeError: rank 2: KeyError: 2"
    }


@on_ranks(4)
def test_facts(rank: int) -> None:
    ranks = Ranks()
    ranks.equal(["a", "b"], "they differ", "Mend it")
    for of_rank_3, has, other in (
        (["b"], "a", "none"),
        (["b", "c", "a"], "none", "c"),
        (["b", "d"], "a", "d"),
        (["b", "a"], "a", "b"),  # in another order
    ):
        facts = of_rank_3 if rank == 3 else ["a", "b"]
        found = agreed(lambda: ranks.equal(facts, "they differ", "Mend it"))  # noqa: B023
        assert found == [f"RuntimeError: they differ: rank 0 has [{has}], and rank 3 has [{other}]. Mend it"] * 4


@on_ranks(4)
def test_an_error_goes_through_all_sets(rank: int) -> None:
    """Rank 3 shares nothing with rank 0."""
    groups = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [2, 3])]
    sets = [Ranks(group) for group in groups if dist.get_rank(group) >= 0]
    error = OSError("the disk is full") if rank == 0 else None
    found = agreed(lambda: raise_on_all(error, sets, "nothing is read, because ", " read"), (OSError, RuntimeError))
    assert found[0] == "OSError: the disk is full"
    assert all(
        "RuntimeError: nothing is read, because rank 0 could not read: OSError: the" in said for said in found[1:]
    )
    raise_on_all(None, sets, "", "")


@on_ranks(4)
def test_sets(rank: int) -> None:
    mesh = mesh_of("dp", "tp")
    over = [distribute_tensor(torch.zeros(4, 4), one) for one in (mesh["tp"], mesh)]
    pair = rank // 2 * 2
    assert [ranks.names for ranks in sharing([torch.zeros(2), *over, over[0]])] == [[pair, pair + 1], [0, 1, 2, 3]]
    assert [ranks.names for ranks in sharing([], [dist.group.WORLD])] == [[0, 1, 2, 3]]
    assert sharing([torch.zeros(2)]) == []


def test_one_process_is_alone() -> None:
    ranks = Ranks()
    assert (ranks.many, ranks.names, ranks.exchange("x")) == (False, [0], {0: "x"})
    ranks.equal(["a"], "", "")
    with pytest.raises(RuntimeError, match=r"^KeyError: 3"):
        ranks.each(lambda: {}[3])
