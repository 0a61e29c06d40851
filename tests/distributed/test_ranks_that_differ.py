"""Ranks that were given different things, or one of which was given nonsense: all raise, in words, and none waits.

Where a rank raises in the middle of a step the others end after a timeout: ``test_failures``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import agreed, fully_shard, on_ranks, spawn
from support.comparing import copy_bytes, equal
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

import lpq
from lpq.core import QuantizedTensor
from lpq.distributed import cast_master_weights
from lpq.observe import collectives
from lpq.optim import MasterWeights, load_high_precision

# ---------------------------------------------------------------------------------- casting masters

SIZE = 64 * 64


def _weight(text: str, *shape: int) -> QuantizedTensor:
    return lpq.quantizer(text).quantize(torch.full(shape or (64, 64), 3.0), seed=torch.zeros((), dtype=torch.int64))


def _cast(rank: int, weights: list[QuantizedTensor], **options: Any) -> None:
    half = SIZE // 2
    parts = [torch.full((half,), 1.0 + rank) for _ in weights]
    arguments = {"masters": parts, "offsets": [half * rank] * len(weights), **options}
    cast_master_weights(weights, group=dist.group.WORLD, **arguments)


def _bytes(weights: list[QuantizedTensor]) -> list[Tensor]:
    return [copy_bytes(b) for w in weights for _, s in w.operands for b in s.tensors()]


def _nothing_is_cast(rank: int, weights: list[QuantizedTensor], **options: Any) -> list[str]:
    before = _bytes(weights)
    found = agreed(lambda: _cast(rank, weights, **options))
    assert equal(before, _bytes(weights))
    return found


def _casts_of_other_weights(rank: int) -> None:
    """The first difference is told."""
    here = "fp8 [64, 64] of torch.float32, row and col"
    delayed = lpq.quantizer("fp8(scaling=delayed, history=4)")
    mine: list[tuple[list[QuantizedTensor], dict[str, Any], str]] = [
        (
            [_weight("mxfp8", *((64, 64), (32, 128))[i != rank]) for i in range(2)],  # another order
            {},
            f"rank 0 has [weights[0]: mx{here}], and rank 1 has [weights[0]: mxfp8 [32, 128] of ",
        ),
        (
            [_weight(("fp8", "fp8(dtype=e5m2)")[rank])],
            {},
            f"rank 0 has [weights[0]: {here}], and rank 1 has [weights[0]: fp8(dtype=e5m2) ",
        ),
        (
            [_weight("fp8").to((torch.float32, torch.bfloat16)[rank])],
            {},
            "[weights[0]: fp8 [64, 64] of torch.bfloat16, ",
        ),
        ([_weight("fp8")] * (1 + rank), {}, f"rank 0 has [no weight], and rank 1 has [weights[1]: {here}]"),
        ([_weight(delayed.text)], {"states": [delayed.new_state()] if rank else None}, "row and col, with a state]"),
    ]
    for number, (weights, options, words) in enumerate(mine):
        found = _nothing_is_cast(rank, weights, **options)
        assert len(set(found)) == 1, (number, found)
        assert found[0].startswith("RuntimeError: the ranks did not pass the same weights and seed"), (number, found)
        assert words in found[0], (number, found)


def _casts_with_other_seeds(rank: int) -> None:
    seeds: list[Any] = [rank, rank << 33, -1 if rank else (1 << 62) - 1, torch.tensor(rank)]
    for seed in seeds:
        found = _nothing_is_cast(rank, [_weight("mxfp8"), _weight("nvfp4(stochastic=true)")], seed=seed)
        assert len(set(found)) == 1, found
        assert found[0].startswith("RuntimeError: the ranks did not pass the same weights and seed"), found
        assert "has [seed " in found[0], found
    for seed in (-1, (1 << 64) - 1, torch.tensor(7)):
        _cast(rank, [_weight("nvfp4(stochastic=true)")], seed=seed)
    _cast(rank, [_weight("mxfp8")], seed=rank)  # nothing is rounded with it


def _one_rank_refuses_its_part(rank: int) -> None:
    half = SIZE // 2
    nonsense: list[tuple[str, dict[str, Any]]] = [
        (r"TypeError: masters[0] is torch.float64", {"masters": [torch.ones(half, dtype=torch.float64)]}),
        (r"TypeError: masters[0] is str", {"masters": ["x"]}),
        (r"ValueError: masters[0] are elements [4096, 6144)", {"offsets": [SIZE]}),
        (r"TypeError: offsets[0] is a float", {"offsets": [float(half)]}),
        (r"TypeError: offsets[0] is a Tensor", {"offsets": [torch.tensor(half)]}),
    ]
    delayed = lpq.quantizer("fp8(scaling=delayed, history=4)")
    good = delayed.new_state()
    states = {"states": [good]}
    missing, misshapen = {"states": [{"other": good["amax"]}]}, {"states": [{n: torch.zeros(7, 7) for n in good}]}
    random = "nvfp4(stochastic=true)"
    for words, text, right, wrong in [
        *((words, "fp8", {}, options) for words, options in nonsense),
        (f"ValueError: weights[0]: {random} rounds stochastically", random, {"seed": 3}, {"seed": None}),
        ("ValueError: states[0] has no ", delayed.text, states, missing),
        ("ValueError: states[0]: amax", delayed.text, states, misshapen),
    ]:
        found = _nothing_is_cast(rank, [_weight(text)], **(wrong if rank else right))
        assert found == [found[0]] * 2
        assert found[0].startswith(f"RuntimeError: rank 1: {words}"), found
    with collectives() as seen:
        _cast(rank, [_weight("mxfp8", 64, 64)])
    assert [c.kind for c in seen].count("all_reduce") == 1


# ---------------------------------------------------------------------------------- loading weights


def _plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))


def _stored(mesh: Any = None) -> tuple[nn.Module, MasterWeights]:
    net = _plain()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    lpq.convert(net, "fp8-current", weights="quantized", ranks=2)
    fully_shard(net, **({"mesh": mesh} if mesh is not None else {}))
    return net, MasterWeights(AdamW(net.parameters()))


def _spoiled(how: str) -> dict[str, Any]:
    found: dict[str, Any] = dict(_plain().state_dict())
    if how == "missing":
        del found["1.weight"]
    elif how == "another shape":
        found["0.weight"] = torch.zeros(3, 3)
    elif how == "too many":
        found["2.weight"] = torch.zeros(3, 3)
    elif how == "no tensor":
        found["0.weight"] = None
    return found


SAID = {
    "missing": 'Missing key(s) in state_dict: "1.weight"',
    "another shape": "size mismatch for 0.weight",
    "too many": 'Unexpected key(s) in state_dict: "2.weight"',
    "no tensor": "'NoneType' object has no attribute 'shape'",
}


def _loading_what_one_rank_lacks(rank: int, mesh: Any = None, unlucky: int = 1) -> None:
    for how, words in SAID.items():
        net, optimizer = _stored(mesh)
        state = _spoiled(how if rank == unlucky else "")
        found = agreed(lambda: load_high_precision(net, state, optimizer), (RuntimeError, AttributeError))  # noqa: B023
        for other, said in enumerate(found):
            assert words in said, (how, said)
            told = f"weights in high precision could not be loaded on all ranks, because rank {unlucky} could not: "
            assert (told in said) == (other != unlucky), (how, said)
        for parameter in net.parameters():
            if isinstance(parameter.to_local(), QuantizedTensor):
                assert not parameter.to_local().dequantize().any(), "those that are encoded are as they were"
        load_high_precision(net, _spoiled(""), optimizer)
        assert all(parameter.to_local().dequantize().any() for parameter in (net[0].weight, net[1].weight))


def _one_process_needs_no_others(rank: int) -> None:
    """A model that is not sharded is its rank's own."""
    net = lpq.convert(_plain(), "fp8-current", weights="quantized")
    if rank == 1:
        with pytest.raises(RuntimeError, match="Missing key"):
            load_high_precision(net, _spoiled("missing"))


@pytest.mark.parametrize(
    "check",
    [
        _casts_of_other_weights,
        _casts_with_other_seeds,
        _one_rank_refuses_its_part,
        _loading_what_one_rank_lacks,
        _one_process_needs_no_others,
    ],
)
def test_two_ranks(check: Callable[[int], None]) -> None:
    spawn(check, 2)


@on_ranks(4)
def test_replicas(rank: int) -> None:
    """Replicas do not reduce with each other, and hear of it as well."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _loading_what_one_rank_lacks(rank, mesh, unlucky=2)
