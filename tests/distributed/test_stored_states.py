"""Stored states of sharded parameters: the bytes that the states of whole parameters have, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import agreed, fully_shard, mesh_of, on_ranks, spawn
from sharded import How, give_gradients, same_weights, train
from support.comparing import equal_states
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, AdamW, Muon, NAdam, Optimizer

import lpq
from lpq.checkpoint.tensors import parts as saved_parts
from lpq.checkpoint.tensors import whole as gathered
from lpq.optim import MasterWeights, QuantizedStates
from lpq.tensor import QuantizedTensor
from lpq.torch_private.tensors import local_part

SECOND = "fp8(scaling=block, pow2=false)"
ADAM = {"exp_avg": "mxfp8", "exp_avg_sq": SECOND}
WHOLE = {"exp_avg": "fp8", "exp_avg_sq": "fp8"}
CASES: dict[str, tuple[Callable[[Any], Optimizer], dict[str, str]]] = {
    "blocks": (partial(AdamW, lr=1e-2), ADAM),
    "fused": (partial(AdamW, lr=1e-2, fused=True), {"exp_avg": "nvfp4(scaling=row)", "exp_avg_sq": SECOND}),
    "of the whole": (partial(AdamW, lr=1e-2), WHOLE),
    "nadam": (partial(NAdam, lr=1e-2), ADAM),
    "sgd": (partial(SGD, lr=1e-2, momentum=0.9), {"momentum_buffer": "mxfp8"}),
    "muon": (partial(Muon, lr=1e-2), {"momentum_buffer": "mxfp8"}),
}


class _Matrices(nn.Module):
    """Three matrices, of which two ranks do not hold as many."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 32, 64))


def _model(rows: int = 130, stored: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    linear = nn.Linear(4096, 2, bias=False), nn.Linear(128, rows, bias=False), nn.Linear(32, 128)
    net = nn.Sequential(*linear, _Matrices())
    return lpq.convert(net, "mxfp8", weights="quantized", ranks=2) if stored else net


def _optimizer(net: nn.Module, case: str = "blocks", stored: bool = False) -> Any:
    make, formats = CASES[case]
    params = [p for p in net.parameters() if p.dim() == 2 or case != "muon"]
    optimizer = QuantizedStates(make(params), **formats)
    return MasterWeights(optimizer) if stored else optimizer


def _step(net: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        give_gradients(net)
        optimizer.step()


def _held(tensor: Tensor) -> dict[str, Tensor]:
    """The bytes of a state, gathered from all ranks."""
    return {name: gathered(part) for name, part in saved_parts("state", tensor).items()}


def _states(net: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    names = {id(p): name for name, p in net.named_parameters()}
    return {
        f"{names[id(p)]}.{key}.{part}": held
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
        for part, held in _held(value).items()
    }


def _weights(net: nn.Module) -> dict[str, Tensor]:
    return {f"{n}.{part}": held for n, p in net.named_parameters() for part, held in _held(p.detach()).items()}


@pytest.mark.filterwarnings("ignore:masters begin with")
@pytest.mark.parametrize(
    ("ranks", "case", "rows", "stored"),
    [*((2, case, 130, False) for case in CASES), (2, "blocks", 131, False), (2, "blocks", 128, True),
     (4, "blocks", 128, False), (4, "of the whole", 128, False), (4, "blocks", 128, True)],
)  # fmt: skip
@on_ranks()
def test_shards_hold_the_bytes_that_the_whole_would(rank: int, ranks: int, case: str, rows: int, stored: bool) -> None:
    """With as many rows on each rank, and with one row more on the first; inside masters, where weights are stored.
    Four ranks are two replicas, each with all shards and with scales of all."""
    mesh = mesh_of("replicate", "shard") if ranks == 4 else mesh_of()
    ours, theirs = fully_shard(_model(rows, stored), mesh=mesh), _model(rows, stored)
    optimizer, alone = _optimizer(ours, case, stored), _optimizer(theirs, case, stored)
    for net, one in ((ours, optimizer), (theirs, alone)):
        _step(net, one)
    mine, other = _states(ours, optimizer), _states(theirs, alone)
    assert any(".data" in name for name in mine)
    if case == "muon":  # its matrices are products, which sum in another order
        mine, other = ({n: v for n, v in s.items() if "momentum" in n} for s in (mine, other))
        ours, theirs = fully_shard(_model(rows), mesh=mesh), _model(rows)
        for net in (ours, theirs):
            _step(net, Muon([p for p in net.parameters() if p.dim() == 2], lr=1e-2))
        assert not equal_states(_weights(ours), _weights(theirs)), "torch's own is equal: say so on the page"
    else:
        assert equal_states(_weights(ours), _weights(theirs))
    assert equal_states(mine, other)


def _of_blocks(params: Any) -> Optimizer:
    return QuantizedStates(AdamW(params, lr=1e-2), **ADAM)


@on_ranks(2)
def test_a_weight_that_is_gathered_quantized_is_gathered_anew_after_a_step(rank: int) -> None:
    how = How("mxfp8", "high_precision", width=128, inner=128, blocks=1, vectors=False, optimizer=_of_blocks)
    losses, net = train(how, 3)
    their_losses, theirs = train(replace(how, weights=None, shard=False), 3)
    assert losses == their_losses
    same_weights(net, theirs)


@on_ranks(2)
def test_shards_that_would_cut_blocks_are_refused_on_all_ranks_alike(rank: int) -> None:
    net = fully_shard(nn.Linear(128, 128, bias=False))
    blocks = "fp8(scaling=block, block=128x128, pow2=false)"
    said = agreed(lambda: QuantizedStates(AdamW(net.parameters()), exp_avg_sq=blocks))
    assert len({*said}) == 1
    assert "shards of 64 rows cut the blocks of 128" in said[0]
    assert "choose another format for all" in said[0]


@on_ranks(2)
def test_columns_that_tensor_parallelism_shares_out(rank: int) -> None:
    random = torch.Generator().manual_seed(0)
    value, gradient = (torch.randn(64, 256, generator=random) for _ in range(2))
    held = []
    for shared in (True, False):

        def cut(x: Tensor, shared: bool = shared) -> Tensor:
            return distribute_tensor(x, mesh_of(), [Shard(1)], src_data_rank=None) if shared else x.clone()

        p = nn.Parameter(cut(value))
        optimizer = QuantizedStates(AdamW([p], lr=1e-2), **ADAM)
        for _ in range(2):
            p.grad = cut(gradient)
            optimizer.step()
        held.append({**_held(p.detach()), **_states(nn.ParameterList([p]), optimizer)})
    assert equal_states(*held)
    narrow = nn.Parameter(distribute_tensor(value[:, :128], mesh_of(), [Shard(1)], src_data_rank=None))
    said = agreed(lambda: QuantizedStates(AdamW([narrow]), **ADAM))
    assert "shards of 64 columns cut the blocks of 128" in said[0]


@pytest.mark.filterwarnings("ignore::lpq.tensor.PrecisionWarning")
@on_ranks(2)
def test_whole_states_that_torch_decodes_are_encoded_again(rank: int) -> None:
    net = fully_shard(_model())
    optimizer = _trained(net, "blocks", stored=False)
    state = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    assert type(state["state"]["1.weight"]["exp_avg_sq_root"]) is Tensor
    net.zero_grad()
    other = _optimizer(net)
    set_optimizer_state_dict(net, other, state, options=StateDictOptions(full_state_dict=True))
    for p, its in other.state.items():
        assert its.keys() == optimizer.state[p].keys()
        for key in its:
            mine, theirs = (local_part(one[key]) for one in (its, optimizer.state[p]))
            assert type(mine) is type(theirs), key
            values = [v.dequantize() if isinstance(v, QuantizedTensor) else v for v in (mine, theirs)]
            torch.testing.assert_close(*values, rtol=1e-6, atol=0)
    _step(net, other)


class _Shared(nn.Module):
    """Two layers of which tensor parallelism cuts rows and columns, and FSDP2 the rows once more."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)
        if shared:
            mesh = mesh_of("fsdp", "tensor")
            parallelize_module(self, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(self, mesh=mesh["fsdp"])

    def optimizer(self, steps: int) -> QuantizedStates:
        optimizer = QuantizedStates(AdamW(self.parameters(), lr=1e-2), **ADAM)
        random = torch.Generator().manual_seed(1)
        for _ in range(steps):
            for p in self.parameters():
                p.grad = torch.randn(p.shape, generator=random)
                if isinstance(p, DTensor):
                    whole = DTensor.from_local(p.grad, p.device_mesh, [Replicate()] * 2, run_check=False)
                    p.grad = whole.redistribute(placements=p.placements)
            optimizer.step()
        return optimizer


def _on_four(rank: int, path: Path) -> None:
    alone, net, other = (_Shared(shared) for shared in (False, True, True))
    its, optimizer, loaded = alone.optimizer(2), net.optimizer(2), other.optimizer(0)
    lpq.checkpoint.save(net, path, optimizer)
    lpq.checkpoint.load(other, path, loaded)
    for one, states in ((net, optimizer), (other, loaded)):
        assert equal_states(_weights(one), _weights(alone))
        assert equal_states(_states(one, states), _states(alone, its))
    with pytest.raises(ValueError, match="its statistic 'amax' is of more than a part"):
        QuantizedStates(AdamW(net.parameters()), exp_avg="fp8")


@pytest.mark.filterwarnings("ignore:QuantizedStates stores")
def test_states_that_fsdp2_and_tensor_parallelism_cut_are_those_of_the_whole(tmp_path: Path) -> None:
    spawn(_on_four, 4, tmp_path / "four")
    alone, net = (_Shared(shared=False) for _ in range(2))
    its, optimizer = alone.optimizer(2), net.optimizer(0)
    lpq.checkpoint.load(net, tmp_path / "four", optimizer)
    assert equal_states(_weights(net) | _states(net, optimizer), _weights(alone) | _states(alone, its))


def _trained(net: nn.Module, case: str, stored: bool, steps: int = 2) -> Any:
    optimizer = _optimizer(net, case, stored)
    _step(net, optimizer, steps)
    return optimizer


def _goes_on(path: Path, net: nn.Module, case: str, stored: bool, took_a_step: bool = False) -> None:
    """Load, compare with the run that was never sharded and never saved, and go on beside it."""
    alone = _model(128, stored)
    other = _trained(alone, case, stored)
    optimizer = _trained(net, case, stored, 1) if took_a_step else _optimizer(net, case, stored)
    lpq.checkpoint.load(net, path, optimizer)
    assert equal_states(_states(net, optimizer), _states(alone, other))
    for one, its in ((net, optimizer), (alone, other)):
        _step(one, its)
    assert equal_states(_weights(net), _weights(alone))
    assert equal_states(_states(net, optimizer), _states(alone, other))


def _on_two(rank: int, path: Path, case: str, stored: bool) -> None:
    net = fully_shard(_model(128, stored))
    lpq.checkpoint.save(net, path / "two", _trained(net, case, stored))
    _goes_on(path / "two", fully_shard(_model(128, stored)), case, stored, took_a_step=True)


def _on_two_again(rank: int, path: Path, case: str, stored: bool) -> None:
    _goes_on(path / "one", fully_shard(_model(128, stored)), case, stored)


@pytest.mark.filterwarnings("ignore:masters begin with")
@pytest.mark.parametrize(("case", "stored"), [("blocks", False), ("blocks", True), ("of the whole", False)])
def test_saved_on_two_ranks_and_loaded_on_one_and_back(tmp_path: Path, case: str, stored: bool) -> None:
    spawn(_on_two, 2, tmp_path, case, stored)
    net = _model(128, stored)
    _goes_on(tmp_path / "two", net, case, stored)
    net = _model(128, stored)
    lpq.checkpoint.save(net, tmp_path / "one", _trained(net, case, stored))
    spawn(_on_two_again, 2, tmp_path, case, stored)


def test_states_in_another_format_and_in_none_are_loaded_or_refused_in_words(tmp_path: Path) -> None:
    net = _model(128)
    optimizer = _trained(net, "blocks", stored=False)
    lpq.checkpoint.save(net, tmp_path / "stored", optimizer)
    for taken in (0, 1):  # one that took a step has states already
        rows = QuantizedStates(AdamW(net.parameters(), lr=1e-2), exp_avg="fp8(scaling=row)", exp_avg_sq=SECOND)
        _step(net, rows, taken)
        lpq.checkpoint.load(net, tmp_path / "stored", rows)
        found, truth = _states(net, rows), _states(net, optimizer)
        same = [name for name in truth if "exp_avg.state.row" not in name]
        assert equal_states({name: found[name] for name in same}, {name: truth[name] for name in same})
        assert {str(s["exp_avg"].quantizer) for s in rows.state.values() if "exp_avg_sq_root" in s} == {
            "fp8(scaling=row)"
        }
    plain = AdamW(net.parameters(), lr=1e-2)
    with pytest.raises(lpq.checkpoint.CheckpointError, match=r"exp_avg was stored as mxfp8.*wrap it in lpq\.optim\.Q"):
        lpq.checkpoint.load(net, tmp_path / "stored", plain)
    _step(net, plain)
    lpq.checkpoint.save(net, tmp_path / "plain", plain)
    wrapped = QuantizedStates(AdamW(net.parameters(), lr=1e-2), **ADAM)
    lpq.checkpoint.load(net, tmp_path / "plain", wrapped)
    assert equal_states(_states(net, wrapped), _states(net, QuantizedStates(plain, **ADAM)))
