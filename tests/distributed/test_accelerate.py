"""accelerate shards a model that lpq prepared, and finds the parameters of an optimizer that was made before that."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from sharded import How, batch, built, decoded, model, train
from test_steps import rounding
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.optim import AdamW, Optimizer

import lpq
from lpq.distributed.shard import plain
from lpq.optim import MasterWeights

STEPS = 3
HOW = How("mxfp8", width=64, inner=128, ranks=2)


def _accelerator(rank: int, **options: Any) -> Any:
    """As ``accelerate launch`` sets it up on GPUs: it offers FSDP2 on no CPU, and the code is the same."""
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # never used: the processes are connected
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **{**blocks, **options})
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    accelerator.state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    return accelerator


def _converted(how: How) -> nn.Module:
    return lpq.convert(
        model(how.width, how.inner, how.blocks),
        how.recipe,
        weights=how.weights,
        ranks=how.ranks if how.weights else None,
    )


def _adam(params: Any) -> Optimizer:
    return AdamW(params, lr=1e-2, foreach=True)


def _prepared(rank: int, how: How, **options: Any) -> tuple[Any, nn.Module, Any]:
    accelerator, net = _accelerator(rank, **options), _converted(how)
    return accelerator, *accelerator.prepare(net, _adam(net.parameters()))


def _trained(
    rank: int, how: How, wrapped: Callable[[Optimizer], Optimizer] | None = None, loads_once: bool = False
) -> list[float]:
    """The losses of some steps, each of which changes every parameter."""
    accelerator, net, optimizer = _prepared(rank, how, cpu_ram_efficient_loading=loads_once)
    if wrapped is not None:
        optimizer.optimizer = wrapped(optimizer.optimizer)
    losses = []
    for number in range(STEPS):
        x = batch(number, how)
        loss = (net(x) - x.roll(1, 0)).square().mean()
        accelerator.backward(loss)
        before = [decoded(p) for p in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert not any(torch.equal(a, decoded(p)) for a, p in zip(before, net.parameters(), strict=True)), number
        losses.append(loss.item())
    return losses


def _masters(params: Any) -> Optimizer:
    return MasterWeights(_adam(params))


def _trains_as_by_hand(rank: int) -> None:
    ordinary = _trained(rank, replace(HOW, weights=None))
    assert len(set(ordinary)) == STEPS
    assert _trained(rank, HOW) == ordinary
    stored = replace(HOW, weights="quantized")
    losses = _trained(rank, stored, rounding)
    assert losses[0] == ordinary[0]
    assert losses == train(replace(stored, optimizer=lambda params: rounding(_adam(params))), STEPS)[0]
    with_masters = _trained(rank, stored, MasterWeights)
    assert with_masters == train(replace(stored, optimizer=_masters), STEPS)[0] != losses


def _is_loaded_on_rank_0_alone(rank: int) -> None:
    """accelerate's default: the other ranks get the weights from there."""
    ordinary = _trained(rank, replace(HOW, weights=None), loads_once=True)
    assert _trained(rank, HOW, loads_once=True) == ordinary
    with pytest.raises(RuntimeError, match=r"stored quantized, and loses its values on .*cpu_ram_efficient_loading=F"):
        _prepared(rank, replace(HOW, weights="quantized"), cpu_ram_efficient_loading=True)  # on both ranks


def _what_cannot_be_exchanged_is_refused(rank: int) -> None:
    """The parameters of a model that somebody else sharded, and those of which there are masters already."""
    stored = replace(HOW, weights="quantized")
    for net, make, words in (
        (built(HOW), _adam, r"has 1\.down\.weight \d+ times, .*If a library exchanged its parameters, have that shard"),
        (_converted(stored), _masters, r"took the place of another one after MasterWeights was made"),
    ):
        accelerator = _accelerator(rank, cpu_ram_efficient_loading=False, auto_wrap_policy="no_wrap")
        net, optimizer = accelerator.prepare(net, make(net.parameters()))
        accelerator.backward(net(batch(0, HOW)).square().mean())
        with pytest.raises(RuntimeError, match=words):
            optimizer.step()


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[Pool]:
    """Ranks for these tests alone: accelerate has one state for each process. To import it takes a second."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "check", [_what_cannot_be_exchanged_is_refused, _trains_as_by_hand, _is_loaded_on_rank_0_alone]
)
def test_two_ranks(check: Callable[[int], None], own_ranks: Pool) -> None:
    own_ranks.run(check)


@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
def test_a_parameter_is_known_by_its_memory(weights: Any) -> None:
    """And a detached tensor by having none, or PyTorch would copy the memory of tensors in a state dict."""
    net = lpq.convert(model(64, 128), "mxfp8", weights=weights)
    wrapped = [p for p in net.parameters() if type(p) is not nn.Parameter]
    assert len(wrapped) == len({p.data_ptr() for p in wrapped} - {0}) == 4
    assert not any(p.detach().data_ptr() for p in wrapped)


def test_a_state_dict_is_staged() -> None:
    """As PyTorch does it before it saves asynchronously."""
    net = lpq.convert(model(64, 128), "mxfp8", weights="high_precision")
    staged = StateDictStager(pin_memory=False, share_memory=False).stage(net.state_dict())
    for name, value in net.state_dict().items():
        copy = plain(staged[name])
        assert torch.equal(copy, plain(value)), name
        assert copy.data_ptr() != plain(value).data_ptr(), name
