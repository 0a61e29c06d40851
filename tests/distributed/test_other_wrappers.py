"""Other wrappers that shard or replicate a model train prepared weights as they do others, or are refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import mesh_of, on_ranks
from sharded import bytes_of, model
from support.comparing import equal, equal_states
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.optim import SGD, Optimizer

import lpq
from lpq.distributed.shard import WeightShard, plain

Wrap = Callable[[nn.Module], nn.Module]
JOINED = r"0\.up\.weight: a flattened weight that is stored as nvfp4.* would be joined with others.*fully_shard"
SENT = r"0\.up\.weight: c10d::\w+ would receive into a decoded copy.*tensor parallelism do that.*fully_shard"
ROUNDED = r"0\.\w+\.weight: add_ would compute in place in this .* stored as nvfp4.*MasterWeights"
TAKEN = r"layer 0\.up, .* its weight, which .* prepared, was made a part of another parameter.*fully_shard"
ASSIGNED = r"0\.up\.weight: this weight, .* is \[128, 64\], and what is assigned to its data \[\d+\].*fully_shard"
NOT_BUILT = r"layer 0\.up, .* its weight was prepared by .*not built for weights that tensor parallelism alone shards"
WHOLE = r"layer 0\.up, .* is stored as nvfp4.* and cannot be gathered so: every rank keeps it whole, as replicate"


def _fsdp1(net: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)


def _in_place(net: nn.Module) -> nn.Module:
    return _fsdp1(net, use_orig_params=True)


def _tensor_parallel(net: nn.Module) -> nn.Module:
    return parallelize_module(net, mesh_of(), {"0.up": ColwiseParallel()})


def _replicated_by_fsdp2(net: nn.Module) -> nn.Module:
    from torch.distributed._composable import replicate_with_fsdp

    return replicate_with_fsdp.replicate(net, mesh=mesh_of())  # type: ignore[no-any-return]


def _itself(net: nn.Module) -> nn.Module:
    return net


def _sgd(net: nn.Module) -> Optimizer:
    return SGD(net.parameters(), lr=0.1)


def _zero(net: nn.Module) -> Optimizer:
    return ZeroRedundancyOptimizer(net.parameters(), optimizer_class=SGD, lr=0.1)


CASES: dict[str, tuple[Wrap, Callable[[nn.Module], Optimizer], str | None, str]] = {
    # what it makes of weights in high precision (None: it trains them), and of stored ones
    "DistributedDataParallel": (DistributedDataParallel, _sgd, None, JOINED),
    "replicate": (replicate, _sgd, None, JOINED),
    "replicate of FSDP2": (_replicated_by_fsdp2, _sgd, None, WHOLE),
    "FSDP1": (_fsdp1, _sgd, TAKEN, JOINED),
    "FSDP1 with parameters as they were": (_in_place, _sgd, ASSIGNED, JOINED),
    "tensor parallelism": (_tensor_parallel, _sgd, NOT_BUILT, SENT),
    "ZeroRedundancyOptimizer": (_itself, _zero, None, ROUNDED),
}


def _net(weights: Any) -> nn.Module:
    return lpq.convert(model(64, 128), "nvfp4", weights=weights)


def _trained(net: nn.Module, wrap: Wrap, optimizer_of: Callable[[nn.Module], Optimizer]) -> list[Tensor]:
    wrapped = wrap(net)
    optimizer = optimizer_of(wrapped)
    outputs = []
    for number in range(3):
        torch.manual_seed(number)  # of what is rounded stochastically
        outputs.append(wrapped(torch.randn(32, 64)))
        outputs[-1].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return outputs


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_two_ranks(rank: int, name: str) -> None:
    wrap, optimizer_of, kept, stored = CASES[name]
    if kept is None:
        ordinary = _trained(_net(None), wrap, optimizer_of)
        assert not torch.equal(ordinary[0], ordinary[2])
        found = _trained(_net("high_precision"), wrap, optimizer_of)
        assert equal(ordinary, found)
    else:
        with pytest.raises((RuntimeError, ValueError, TypeError), match=kept):
            _trained(_net("high_precision"), wrap, optimizer_of)
    net = _net("quantized")
    before = bytes_of(net)
    assert sum("row" in name or "col" in name for name in before) == 12
    with pytest.raises((RuntimeError, ValueError, TypeError), match=stored):
        _trained(net, wrap, optimizer_of)
    if stored is JOINED:
        assert equal_states(before, bytes_of(net))
    dist.barrier()  # nobody waits for anybody


@on_ranks(2)
def test_one_stored_weight_alone(rank: int) -> None:
    """Which is not joined with others, and sent as it is."""
    net = lpq.convert(nn.Linear(64, 64, bias=False), "nvfp4", weights="quantized")
    with pytest.raises(TypeError, match=r"would receive into a decoded copy"):
        DistributedDataParallel(net)


# ---------------------------------------------------------------------------------- what is assigned to ``data``


def test_what_is_assigned_to_the_data_of_a_weight_is_the_weight() -> None:
    net = _net("high_precision")
    weight = net[0].up.weight
    assert isinstance(weight, WeightShard)
    count = weight.write_count
    new = torch.randn(128, 64)
    weight.data = new
    assert weight.held.data_ptr() == new.data_ptr()
    assert weight.write_count > count
    x = torch.randn(32, 64)
    twin = _net(None)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin[0].up.weight, new)
    assert torch.equal(net(x), twin(x))
    weight.data = weight.data.bfloat16()
    assert (weight.dtype, weight.held.dtype) == (torch.bfloat16, torch.bfloat16)
    nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in net.parameters())), net.parameters())
    assert not any(p.detach().any() for p in net.parameters())


def test_another_shape_is_refused() -> None:
    for weights in ("high_precision", "quantized"):
        weight = _net(weights)[0].up.weight
        with pytest.raises(ValueError, match=r"0\.up\.weight: .*assigned to its data \[3\].*fully_shard"):
            weight.data = torch.zeros(3)
        assert weight.shape == (128, 64)


# ---------------------------------------------------------------------------------- where a weight lies


@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
def test_a_parameter_is_known_by_its_memory(weights: Any) -> None:
    """accelerate goes by it. A detached one has none, or PyTorch would copy the memory of tensors in a state dict."""
    wrapped = [p for p in _net(weights).parameters() if type(p) is not nn.Parameter]
    assert len(wrapped) == len({p.data_ptr() for p in wrapped} - {0}) == 4
    assert not any(p.detach().data_ptr() for p in wrapped)


def test_a_state_dict_is_staged() -> None:
    """As PyTorch does it before it saves asynchronously."""
    net = _net("high_precision")
    staged = StateDictStager(pin_memory=False, share_memory=False).stage(net.state_dict())
    for name, value in net.state_dict().items():
        copy = plain(staged[name])
        assert torch.equal(copy, plain(value)), name
        assert copy.data_ptr() != plain(value).data_ptr(), name


# ---------------------------------------------------------------------------------- weights that others compute

COMPUTED: dict[str, Callable[[nn.Module], object]] = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "parametrized": parametrizations.weight_norm,
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
@pytest.mark.parametrize("way", COMPUTED)
@on_ranks(2)
def test_a_weight_that_is_computed_of_a_prepared_one(rank: int, way: str, weights: Any) -> None:
    """fully_shard was named as missing. Before lpq.convert all of it works, and without FSDP2 after it, too."""
    x = torch.randn(32, 64)
    net = _net(weights)
    COMPUTED[way](net[0].up)
    net(x).sum().backward()
    whose = "ParametrizationList" if way == "parametrized" else r"layer 0\.up, .*"
    with pytest.raises(
        RuntimeError, match=rf"{whose}: it has a \[128, 64\] parameter .*weight_norm.* before lpq\.convert"
    ):
        fully_shard(net, mesh=mesh_of())(x)
    net = model(64, 128)
    COMPUTED[way](net[0].up)
    fully_shard(lpq.convert(net, "nvfp4", weights=weights), mesh=mesh_of())(x).sum().backward()


def test_a_view_that_a_parametrization_computes_is_no_part_of_a_flat_parameter() -> None:
    """FullyShardedDataParallel was named, which nobody used."""
    net, plain_net = _net("high_precision"), _net(None)
    plain_net.load_state_dict(net.state_dict())
    for each in (net, plain_net):
        torch.manual_seed(0)
        parametrizations.orthogonal(each[0].down)
    x = torch.randn(32, 64)
    assert torch.equal(net(x), plain_net(x))
