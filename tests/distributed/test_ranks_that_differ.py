"""Ranks that were given different things, or one of which was given nonsense: all raise, in words, and none waits.

Where a rank raises in the middle of a step the others end after a timeout: ``test_failures``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import agreed, fully_shard, mesh_of, on_ranks
from sharded import bytes_of, give_gradients
from support.comparing import equal_states
from torch import nn
from torch.optim import AdamW, Optimizer

import lpq
from lpq.core import QuantizedTensor
from lpq.distributed import cast_master_weights, meeting, step_check
from lpq.observe import collectives
from lpq.operations.reduce_statistics import Reductions
from lpq.optim import MasterWeights, QuantizedStates, load_high_precision

# ---------------------------------------------------------------------------------- casting masters

SIZE = 64 * 64
HALF = SIZE // 2
RANDOM = "nvfp4(stochastic=true)"
DELAYED = lpq.quantizer("fp8(scaling=delayed, history=4)")
OTHERS = "RuntimeError: the ranks did not pass the same weights and seed"


def _weight(text: str, *shape: int) -> QuantizedTensor:
    return lpq.quantizer(text).quantize(torch.full(shape or (64, 64), 3.0), seed=torch.zeros((), dtype=torch.int64))


def _cast(rank: int, weights: list[QuantizedTensor], **options: Any) -> None:
    arguments = {"masters": [torch.full((HALF,), 1.0 + rank) for _ in weights], "offsets": [HALF * rank] * len(weights)}
    cast_master_weights(weights, group=dist.group.WORLD, **{**arguments, **options})


def _nothing_is_cast(rank: int, begins: str, *words: str, weights: list[QuantizedTensor], **options: Any) -> None:
    before = bytes_of(weights)
    found = agreed(lambda: _cast(rank, weights, **options))
    assert equal_states(before, bytes_of(weights))
    assert found == [found[0]] * 2
    assert found[0].startswith(begins), found
    assert all(word in found[0] for word in words), found


@on_ranks(2)
def test_casts_of_other_weights(rank: int) -> None:
    """The first difference is told."""
    here = "fp8 [64, 64] of torch.float32, row and col"
    shapes = [((64, 64), (32, 128))[i != rank] for i in range(2)]  # another order
    for weights, options, words in (
        ([_weight("mxfp8", *shape) for shape in shapes], {},
         f"rank 0 has [weights[0]: mx{here}], and rank 1 has [weights[0]: mxfp8 [32, 128] of "),
        ([_weight(("fp8", "fp8(dtype=e5m2)")[rank])], {},
         f"rank 0 has [weights[0]: {here}], and rank 1 has [weights[0]: fp8(dtype=e5m2) "),
        ([_weight("fp8").to((torch.float32, torch.bfloat16)[rank])], {}, "[weights[0]: fp8 [64, 64] of torch.bfloat1"),
        ([_weight("fp8")] * (1 + rank), {}, f"rank 0 has [no weight], and rank 1 has [weights[1]: {here}]"),
        ([_weight(DELAYED.text)], {"states": [DELAYED.new_state()] if rank else None}, "row and col, with a state]"),
    ):  # fmt: skip
        _nothing_is_cast(rank, OTHERS, words, weights=weights, **options)  # type: ignore[arg-type]


@on_ranks(2)
def test_casts_with_other_seeds(rank: int) -> None:
    seeds: list[Any] = [rank, rank << 33, -1 if rank else (1 << 62) - 1, torch.tensor(rank)]
    for seed in seeds:
        _nothing_is_cast(rank, OTHERS, "has [seed ", weights=[_weight("mxfp8"), _weight(RANDOM)], seed=seed)
    for seed in (-1, (1 << 64) - 1, torch.tensor(7)):
        _cast(rank, [_weight(RANDOM)], seed=seed)
    _cast(rank, [_weight("mxfp8")], seed=rank)  # nothing is rounded with it


@on_ranks(2)
def test_one_rank_refuses_its_part(rank: int) -> None:
    good = DELAYED.new_state()
    states = {"states": [good]}
    for words, text, right, wrong in (
        (r"TypeError: masters[0] is torch.float64", "fp8", {}, {"masters": [torch.ones(HALF, dtype=torch.float64)]}),
        (r"TypeError: masters[0] is str", "fp8", {}, {"masters": ["x"]}),
        (r"ValueError: masters[0] are elements [4096, 6144)", "fp8", {}, {"offsets": [SIZE]}),
        (r"TypeError: offsets[0] is a float", "fp8", {}, {"offsets": [float(HALF)]}),
        (r"TypeError: offsets[0] is a Tensor", "fp8", {}, {"offsets": [torch.tensor(HALF)]}),
        (f"ValueError: weights[0]: {RANDOM} rounds stochastically", RANDOM, {"seed": 3}, {"seed": None}),
        ("ValueError: states[0] has no ", DELAYED.text, states, {"states": [{"other": good["amax"]}]}),
        ("ValueError: states[0]: amax", DELAYED.text, states, {"states": [{n: torch.zeros(7, 7) for n in good}]}),
    ):
        options: Any = wrong if rank else right
        _nothing_is_cast(rank, f"RuntimeError: rank 1: {words}", weights=[_weight(text)], **options)
    with collectives() as seen:
        _cast(rank, [_weight("mxfp8", 64, 64)])
    assert [c.kind for c in seen].count("all_reduce") == 1


# ---------------------------------------------------------------------------------- wrapping optimizers

STATES = {"exp_avg": "fp8", "exp_avg_sq": "fp8"}
OTHER = "RuntimeError: the ranks do not wrap their optimizers alike: rank 0 has [{}], and rank 1 has [{}]. Wrap the opt"
WRAPPED: list[tuple[Callable[[AdamW, int], Optimizer], str, str]] = [
    (lambda adam, rank: QuantizedStates(adam, **{**STATES, "exp_avg": ("fp8", "mxfp8")[rank]}),
     "QuantizedStates with exp_avg=fp8", "QuantizedStates with exp_avg=mxfp8"),
    (lambda adam, rank: QuantizedStates(adam, least=4096 << rank, **STATES),
     "QuantizedStates with least=4096", "QuantizedStates with least=8192"),
    (lambda adam, rank: MasterWeights(adam, keep=rank == 0),
     "MasterWeights with keep=True", "MasterWeights with keep=False"),
    (lambda adam, rank: MasterWeights(QuantizedStates(adam, **STATES) if rank else adam),
     "MasterWeights of AdamW", "MasterWeights of QuantizedStates"),
    (lambda adam, rank: MasterWeights(adam) if rank else QuantizedStates(adam, **STATES),
     "QuantizedStates of AdamW", "MasterWeights of AdamW"),
]  # fmt: skip


def _with_gradients(text: str = "fp8-current") -> nn.Module:
    net = fully_shard(lpq.convert(_plain(), text, weights="quantized", ranks=2))
    give_gradients(net)
    return net


@pytest.mark.filterwarnings("ignore:masters begin with")
@on_ranks(2)
def test_optimizers_that_are_wrapped_otherwise(rank: int) -> None:
    """All ranks raise before the first step, which leaves the weights as they were."""
    for made, first, second in WRAPPED:
        net = _with_gradients()
        optimizer, before = made(AdamW(net.parameters()), rank), bytes_of(net.parameters())
        said = agreed(optimizer.step)
        assert said[0].startswith(OTHER.format(first, second)), said
        assert len({*said}) == 1
        assert equal_states(before, bytes_of(net.parameters()))


@on_ranks(4)
def test_an_optimizer_of_parameters_on_several_meshes(rank: int) -> None:
    """Each rank shares one with the rank that differs, or with a rank that does."""
    mesh = mesh_of("one", "other")
    nets = [fully_shard(net, mesh=mesh[name]) for net, name in zip(_plain(), ("one", "other"), strict=True)]
    exp_avg = "mxfp8" if rank == 3 else "fp8"
    optimizer = QuantizedStates(AdamW([p for net in nets for p in net.parameters()]), exp_avg=exp_avg)
    said = agreed(optimizer.step)
    assert "other ranks, with which this one shares other layers, say where they differ" in said[0]
    assert all(f"{first} has [QuantizedStates with exp_avg=" in one for first, one in zip("121", said[1:], strict=True))


@pytest.mark.filterwarnings("ignore:masters begin with")
@on_ranks(2)
def test_optimizers_are_compared_once(rank: int) -> None:
    net = _with_gradients()
    optimizer = MasterWeights(QuantizedStates(AdamW(net.parameters()), **STATES))
    with mock.patch.object(meeting, "meet", wraps=meeting.meet) as met:
        for _ in range(3):
            optimizer.step()
    assert [call.args[1] for call in met.mock_calls].count("optimizers") == 2, "once for each wrapper"
    alone = QuantizedStates(AdamW(_plain().parameters()), **STATES)
    if rank:
        alone.step()  # of parameters that are its own


@pytest.mark.filterwarnings("ignore:masters begin with")
@on_ranks(2)
def test_an_optimizer_that_one_rank_alone_wraps(rank: int) -> None:
    """That rank raises after a while, in words; a step of the others waits for nobody."""
    net = fully_shard(_plain())
    give_gradients(net)
    adam = AdamW(net.parameters())
    if not rank:
        adam.step()
        return
    words = "this rank has waited 0 s: .* as this rank does with a QuantizedStates of AdamW, and not all have come"
    with mock.patch.object(meeting, "limit", return_value=0.1), pytest.raises(RuntimeError, match=words):
        QuantizedStates(adam, **STATES).step()


@pytest.mark.filterwarnings("ignore:masters begin with")
@on_ranks(2)
def test_optimizers_of_other_parameters(rank: int) -> None:
    """Statistics of all weights travel in one tensor: statistics of other layers would be mixed there in silence."""
    first, second = "statistics of layer 0, lpq.nn.Linear(64, 128)]", "statistics of layer 1, lpq.nn.Linear(128, 64)]"
    every, some, others, turned = slice(None), slice(2), slice(2, None), slice(None, None, -1)
    stored = "[1 statistics of 0.weight]", "[1 statistics of 1.weight]"
    for weights, recipe, chosen, words in (
        ("high_precision", "fp8-current", (every, some), (second, "rank 1 has [none]")),
        ("high_precision", "fp8-current", (some, others), (first, second)),
        (None, "fp8-delayed", (some, every), ("rank 0 has [none]", second)),
        ("quantized", "fp8-current", (every, some), (stored[1], "rank 1 has [none]")),
        ("quantized", "fp8-current", (every, turned), stored),
    ):
        net = fully_shard(lpq.convert(_plain(), recipe, weights=weights, ranks=2 if weights else None))
        net(torch.ones(32, 64)).sum().backward()
        params = [*net.parameters()]
        before = bytes_of(params[::2])
        for differ in (True, False):
            optimizer: Optimizer = AdamW(params[chosen[rank]] if differ else params)
            optimizer = MasterWeights(optimizer) if weights == "quantized" else optimizer
            if differ:
                said = agreed(optimizer.step)
                assert len({*said}) == 1
                assert said[0].startswith("RuntimeError: the ranks do not step the same parameters: rank 0 has ["), said
                assert all(word in said[0] for word in words), said
                assert weights != "quantized" or equal_states(before, bytes_of(params[::2])), (
                    "stored ones are as before"
                )
                continue
            with mock.patch.object(meeting, "meet", wraps=meeting.meet) as met:
                for step in range(3):
                    if step == 1 and rank:  # nothing of it is reduced
                        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
                    optimizer.step()
            assert [call.args[1] for call in met.mock_calls].count("reductions") == 1, "as long as nothing changes"


@on_ranks(2)
def test_ranks_compare_where_something_changed(rank: int) -> None:
    """Others of a rank may see no change, and do not come."""
    layers, cpu = [mock.Mock(title=f"layer {i}") for i in range(2)], torch.device("cpu")

    def parts(*owners: Any) -> Any:
        group = dist.group.WORLD
        return {
            ("max", (0, 1, i), cpu): (group, [((one,), torch.ones(1)) for one in own]) for i, own in enumerate(owners)
        }

    reduced = step_check.Reduced()
    for given, changed in (
        (([layers[0]], layers), [1, 2]), (([layers[0]], layers), []), ((layers, layers), [2]),
    ):  # fmt: skip
        with mock.patch.object(step_check, "compare_in_store") as compare:
            reduced.compare(parts(*given))
        assert [len(texts) for call in compare.mock_calls for _, texts in call.args[0]] == changed
    with mock.patch.object(step_check, "compare_in_store") as compare:
        step_check.Reduced(reduced.texts).compare(parts(layers, layers[::-1]))
    assert [texts for _, texts in compare.mock_calls[0].args[0]] == [[f"1 statistics of layer {i}" for i in (1, 0)]]


@on_ranks(4)
def test_ranks_with_other_numbers_of_changes_leave_together(rank: int) -> None:
    """Ranks say to each other whether all are alike, also those that have compared with one other rank alone."""
    groups = {ranks: dist.new_group([*ranks]) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    pair, across = groups[(0, 1) if rank < 2 else (2, 3)], groups[(0, 2) if rank % 2 == 0 else (1, 3)]
    reduced = step_check.Reduced()
    for of_pair, of_across in ((0, 2), (1, 2 if rank % 2 else 3), (1, 2 if rank % 2 else 3)):
        reductions = Reductions(reduced.compare)
        values = [torch.full((), float(rank)) for _ in range(of_pair + of_across)]
        owners = [(mock.Mock(title=f"layer {i - of_pair}"),) for i in range(len(values))]
        reductions.add(values[:of_pair], pair, owners[:of_pair])
        reductions.add(values[of_pair:], across, owners[of_pair:])
        reductions.run()
        assert [v.item() for v in values] == [rank | 1] * of_pair + [rank | 2] * of_across


# ---------------------------------------------------------------------------------- loading weights


def _plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))


def _stored() -> nn.Sequential:
    net = _plain()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    return lpq.convert(net, "fp8-current", weights="quantized", ranks=2)


SPOILED: dict[str, tuple[Any, str]] = {
    "1.weight": (None, 'Missing key(s) in state_dict: "1.weight"'),
    "0.weight": (torch.zeros(3, 3), "size mismatch for 0.weight"),
    "2.weight": (torch.zeros(3, 3), 'Unexpected key(s) in state_dict: "2.weight"'),
    "0.bias": ("no tensor", "expected torch.Tensor or Tensor-like object from checkpoint but received <class 'str'>"),
    "": ("weights.pt", "got a str: pass whole tensors by name"),
}
"""The thing that one rank has in place of a value, or of all of them, and the words of the error."""


def _spoiled(name: str) -> Any:
    if not name:
        return SPOILED[name][0]
    state = {**_plain().state_dict(), name: SPOILED[name][0]}
    return {key: value for key, value in state.items() if value is not None}


@pytest.mark.parametrize(("ranks", "unlucky"), [(2, 1), (4, 2)])
@on_ranks()
def test_loading_what_one_rank_lacks(rank: int, ranks: int, unlucky: int) -> None:
    """Replicas do not reduce with each other, and hear of it as well."""
    for name, (_, words) in SPOILED.items():
        net: Any = fully_shard(_stored(), mesh=mesh_of("replicate", "shard") if ranks == 4 else mesh_of())
        optimizer = MasterWeights(AdamW(net.parameters()))
        state = _spoiled(name) if rank == unlucky else _plain().state_dict()
        found = agreed(lambda: load_high_precision(net, state, optimizer), (RuntimeError, TypeError))  # noqa: B023
        for other, said in enumerate(found):
            assert words in said, (name, said)
            told = f"weights in high precision could not be loaded on all ranks, because rank {unlucky} could not: "
            assert (told in said) == (other != unlucky), (name, said)
        weights = net[0].weight, net[1].weight
        assert not any(w.to_local().dequantize().any() for w in weights), "those that are encoded are as they were"
        load_high_precision(net, _plain().state_dict(), optimizer)
        assert all(w.to_local().dequantize().any() for w in weights)


@on_ranks(2)
def test_one_process_needs_no_others(rank: int) -> None:
    """A model that is not sharded is its rank's own."""
    if rank == 1:
        with pytest.raises(RuntimeError, match="Missing key"):
            load_high_precision(_stored(), _spoiled("1.weight"))
