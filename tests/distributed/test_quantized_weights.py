"""Weights that are stored quantized: what is held and sent, how they begin, and what is saved of them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from operands import expected, gathered
from ranks import on_ranks, spawn
from sharded import model
from stored import W8, Way, converted, local, optimizer_of, parts, same_parts, sharded, step
from support.comparing import copy_bytes, equal, equal_states
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW

import lpq
from lpq.core import QuantizedTensor
from lpq.distributed.shard_groups import attach
from lpq.observe import collectives
from lpq.optim import MasterWeights, load_high_precision


def _values(seed: int = 7, blocks: int = 2) -> dict[str, Tensor]:
    """An ordinary checkpoint of the model."""
    torch.manual_seed(seed)
    return {name: torch.randn_like(p) / 8 for name, p in model(256, 256, blocks).state_dict().items()}


# ---------------------------------------------------------------------------------- what is held and what is sent


def _large() -> list[Any]:
    """The ordinary tensors with memory that are as large as a shard of a weight."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is Tensor and t.dtype in (torch.float32, torch.bfloat16)]
    return [(t.shape, t.dtype) for t in tensors if t.numel() >= 128 * 256 and t.untyped_storage().nbytes() >= t.numel()]


def _nothing_in_high_precision(rank: int) -> None:
    """Also none that the model does not own: after a step no tensor of a weight's size is left."""
    for recipe, share in (("fp8-current", 0.52), (W8.format("nvfp4(block=16x16)"), 0.29), ("fp8-block", 0.52)):
        net = sharded(converted(recipe, bf16=True))
        weights = [layer.weight for layer in net.modules() if isinstance(layer, lpq.nn.Linear)]
        optimizer = MasterWeights(SGD(net.parameters(), lr=0.1, foreach=False), keep=False)
        for number in range(2):
            step(net, optimizer, number, Way(recipe, bf16=True))
        held = sum(local(w).held_bytes for w in weights)
        bf16 = sum(2 * w.numel() for w in weights)
        assert 0 < 2 * held <= share * bf16, (recipe, 2 * held / bf16)
        assert not _large()
        kept = torch.zeros(128, 256)
        assert _large() == [(torch.Size([128, 256]), torch.float32)]  # or it finds nothing at all
        del net, weights, optimizer, kept


@on_ranks(2)
def test_one_reduction_a_step(rank: int) -> None:
    for recipe, count in (("fp8-current", 1), (W8.format("nvfp4(block=16x16)"), 1), ("mxfp8", 0), ("fp8-delayed", 1)):
        for blocks in (1, 3) if recipe == "fp8-current" else (2,):
            net = sharded(converted(recipe, blocks=blocks))
            optimizer = MasterWeights(AdamW(net.parameters(), lr=1e-3))
            for number in range(2):
                x = torch.randn(32, 256)
                with collectives() as forward:
                    loss = net(x).square().mean()
                loss.backward()
                with collectives() as update:
                    optimizer.step()
                assert "all_reduce" not in [c.kind for c in forward]
                kinds = [c.kind for c in update]
                assert kinds == ["all_reduce"] * count, (recipe, blocks, number, kinds)


@on_ranks(2)
def test_masters_are_an_fp32_run(rank: int) -> None:
    """Of the same gradients: what is rounded for the model does not come back into the masters."""
    net = sharded(converted("fp8-current", bf16=True))
    optimizer = MasterWeights(AdamW(net.parameters(), lr=1e-2))
    weights = list(optimizer.masters)
    assert [tuple(w.shape) for w in weights] == [(256, 256)] * 4
    ordinary = [nn.Parameter(local(w).dequantize(torch.float32)) for w in weights]
    reference = AdamW(ordinary, lr=1e-2)
    for number in range(5):
        net(torch.randn(32, 256, dtype=torch.bfloat16)).float().square().mean().backward()
        for w, o in zip(weights, ordinary, strict=True):
            o.grad = local(w.grad).float().clone()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        for w, o in zip(weights, ordinary, strict=True):
            assert torch.equal(local(optimizer.masters[w]), o), number
            assert not torch.equal(local(w).dequantize(torch.float32), o)


# ---------------------------------------------------------------------------------- beginning


def _begun_on_meta(recipe: str) -> nn.Sequential:
    with torch.device("meta"):
        net = model(256, 256)
    lpq.convert(net, recipe, weights="quantized")
    sharded(net)
    assert all(p.is_meta for p in net.parameters())
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        if isinstance(local(parameter), QuantizedTensor):
            for _, storage in local(parameter).operands:
                for buffer in storage.tensors():
                    buffer.view(-1).view(torch.uint8).fill_(0x7F)  # NaN, or large: nothing of it may be left
    return net


def _encoded(net: nn.Sequential, recipe: str, values: dict[str, Tensor]) -> None:
    """The model has these values: quantized where it is converted, themselves elsewhere."""
    found = gathered(net, torch.randn(32, 256))
    quantizer = lpq.recipe(recipe).w
    for name, value in values.items():
        layer, _, leaf = name.rpartition(".")
        if (layer, "forward") in found and leaf == "weight":
            for when, direction in (("forward", "row"), ("backward", "col")):
                assert equal_states(found[layer, when], expected(quantizer, value, direction)), (recipe, name)
        else:
            assert torch.equal(net.get_parameter(name).full_tensor(), value), name
    assert len(found) == 8
    for parameter in net.parameters():
        parameter.grad = None


@on_ranks(2)
def test_from_a_checkpoint(rank: int) -> None:
    for recipe in ("fp8-current", W8.format("hybrid(row=nvfp4, col=fp8)")):
        values = _values()
        net = _begun_on_meta(recipe)
        optimizer = MasterWeights(AdamW(net.parameters(), lr=1e-2))
        with collectives() as seen:
            load_high_precision(net, values, optimizer)
        assert [c.kind for c in seen].count("all_reduce") == 1, seen
        masters = {id(w): m for w, m in optimizer.masters.items()}
        for name, parameter in net.named_parameters():
            if id(parameter) in masters:
                assert torch.equal(masters.pop(id(parameter)).full_tensor(), values[name]), name
        assert not masters
        _encoded(net, recipe, values)

        direct = sharded(converted(recipe))  # without masters, and over weights that are there
        rounded = MasterWeights(SGD(direct.parameters(), lr=0.1))
        with pytest.warns(UserWarning, match="masters begin with what weights decode to"):
            step(direct, rounded, 0, Way(recipe, masters=True))
        load_high_precision(direct, values)
        _encoded(direct, recipe, values)

        unsharded = converted(recipe)
        its = MasterWeights(AdamW(unsharded.parameters(), lr=1e-2))
        load_high_precision(unsharded, values, its)
        for number in range(2):
            way = Way(recipe, masters=True)
            assert step(net, optimizer, number, way) == step(unsharded, its, number, way)
        same_parts(net, unsharded, recipe)


@on_ranks(2)
def test_from_a_full_state_dict(rank: int) -> None:
    """By PyTorch's own functions, before any forward; ranks may have all of it, or rank 0 alone."""
    values = _values()
    for recipe in ("fp8-current", W8.format("hybrid(row=nvfp4, col=fp8)")):
        for alone in (False, True):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=alone)
            for net in (_begun_on_meta(recipe), sharded(converted(recipe))):
                set_model_state_dict(net, {} if alone and rank else dict(values), options=options)
                _encoded(net, recipe, values)
        direct = sharded(converted(recipe))
        direct.load_state_dict(get_model_state_dict(net))
        _encoded(direct, recipe, values)


@on_ranks(2)
def test_what_is_missing_is_said(rank: int) -> None:
    values = _values()
    net = sharded(converted("fp8-current"))
    less = {name: value for name, value in values.items() if name != "1.up.weight"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "1.up.weight"'):
        load_high_precision(net, less)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "2.up.weight"'):
        load_high_precision(net, {**values, "2.up.weight": values["1.up.weight"]})
    for rows in (1, 128):
        with pytest.raises(RuntimeError, match=r"size mismatch for 1\.up\.weight"):
            load_high_precision(net, {**values, "1.up.weight": values["1.up.weight"][:rows]})


@on_ranks(2)
def test_initialised(rank: int) -> None:
    """``reset_parameters`` of what was on meta; every rank draws for its shard, and all have one scale."""
    for recipe in ("fp8-current", W8.format("nvfp4(block=16x16)"), W8.format("hybrid(row=nvfp4, col=fp8)")):
        net = _begun_on_meta(recipe)
        torch.manual_seed(rank)
        for module in net.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()
        scales = []
        for block in net:
            for layer in (block.up, block.down):
                values = layer.weight.full_tensor().dequantize()
                assert 0.9 / 16 < values.abs().max() < 1.1 / 16
                assert 0.9 / 16 / 3**0.5 < values.std() < 1.1 / 16 / 3**0.5
                assert not torch.equal(values[:128], values[128:])
                scales += [copy_bytes(t) for _, s in local(layer.weight).operands for t in s.tensors() if t.dim() == 0]
        every: list[Any] = [None, None]
        dist.all_gather_object(every, scales)
        assert scales
        assert equal(*every)
        step(net, MasterWeights(AdamW(net.parameters(), lr=1e-2), keep=False), 0, Way(recipe))


# ---------------------------------------------------------------------------------- saving, loading and the group


@on_ranks(2)
def test_continued(rank: int) -> None:
    """The state of an optimizer with masters, loaded into another: nothing tells the runs apart."""
    recipes = ("fp8-current", "fp8-delayed", W8.format("nvfp4(block=16x16)"))
    for recipe, kind in zip(recipes, ("foreach", "fused", "sgd"), strict=True):
        way = Way(recipe, kind, masters=True)
        net = sharded(converted(recipe))
        optimizer = optimizer_of(net, way)
        for number in range(2):
            step(net, optimizer, number, way)
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        assert all("master" in state for state in saved[1]["state"].values() if "exp_avg" not in state)
        uninterrupted = [step(net, optimizer, number, way) for number in (2, 3)]

        other = sharded(converted(recipe))
        load_high_precision(other, _values())
        its = optimizer_of(other, way)
        step(other, its, 9, way)
        other.load_state_dict(saved[0])
        its.load_state_dict(saved[1])
        assert [step(other, its, number, way) for number in (2, 3)] == uninterrupted, way
        for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
            assert equal_states(parts(local(p)), parts(local(q))), (way, name)
        for a, b in zip(optimizer.masters.values(), its.masters.values(), strict=True):
            assert torch.equal(local(a), local(b))


def _by_torchs_own_functions(rank: int, folder: str) -> None:
    """``get_state_dict`` and what sets it, with DCP between them: to ask changes nothing, and the run goes on."""
    way = Way(W8.format("nvfp4(block=16x16)"), masters=True)

    def everything(net: nn.Module, optimizer: Any) -> list[dict[str, Tensor]]:
        moments = [optimizer.optimizer.state[p] for p in optimizer.optimizer.param_groups[0]["params"]]
        return [parts(local(p.detach())) for p in (*net.parameters(), *optimizer.masters.values())] + [
            {name: copy_bytes(local(value)) for name, value in state.items()} for state in moments
        ]

    net = sharded(converted(way.recipe))
    optimizer = optimizer_of(net, way)
    for number in range(2):
        step(net, optimizer, number, way)
    before = copy.deepcopy(everything(net, optimizer))
    model_state, state = get_state_dict(net, optimizer)
    again = everything(net, optimizer)
    assert len(before) == 10 + 4 + 10
    assert all(equal_states(a, b) for a, b in zip(before, again, strict=True)), "asking took a step"
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)
    full = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    saved = copy.deepcopy((model_state, full))
    uninterrupted = [step(net, optimizer, number, way) for number in (2, 3)]

    for used in (False, True):
        for by_dcp in (False, True):
            other = sharded(converted(way.recipe))
            load_high_precision(other, _values())
            its = optimizer_of(other, way)
            if used:
                step(other, its, 9, way)
            if by_dcp:
                found = dict(zip(("model", "optimizer"), get_state_dict(other, its), strict=True))
                dcp.load(found, checkpoint_id=folder)
                given, options = (found["model"], found["optimizer"]), None
            else:
                given, options = copy.deepcopy(saved), StateDictOptions(full_state_dict=True)
                get_optimizer_state_dict(other, its)  # it begins moments, while weights are what masters were made of
            set_model_state_dict(other, given[0])
            set_optimizer_state_dict(other, its, given[1], options=options)
            assert [step(other, its, number, way) for number in (2, 3)] == uninterrupted, (used, by_dcp)
            pairs = zip(everything(net, optimizer), everything(other, its), strict=True)
            assert all(equal_states(a, b) for a, b in pairs), (used, by_dcp)

    model_state, state = get_state_dict(net, optimizer)
    set_state_dict(net, optimizer, model_state_dict=model_state, optim_state_dict=state)  # in the other order
    with pytest.raises(RuntimeError, match=r"^0\.up\.weight: .* load its state after them"):
        step(net, optimizer, 4, way)
    for weight in optimizer.masters:
        optimizer.seen(weight)
    assert step(net, optimizer, 4, way) == step(other, its, 4, way)


@on_ranks(2)
def test_without_masters_in_the_state(rank: int) -> None:
    net = sharded(converted("fp8-current"))
    ordinary = AdamW(net.parameters(), lr=1e-2)
    without = MasterWeights(ordinary, keep=False)
    step(net, without, 0, Way("fp8-current"))
    with pytest.raises(ValueError, match=r"^0\.up\.weight: the state has no master for parameter"):
        MasterWeights(AdamW(net.parameters(), lr=1e-2)).load_state_dict(without.state_dict())
    with pytest.raises(ValueError, match="an optimizer that has not taken a step yet"):
        MasterWeights(ordinary)


@on_ranks(2)
def test_a_master_that_is_not_sharded(rank: int) -> None:
    net = sharded(converted("fp8-current"))
    optimizer = MasterWeights(AdamW(net.parameters(), lr=1e-2))
    saved = optimizer.state_dict()
    state = next(state for state in saved["state"].values() if "master" in state)
    state["master"] = state["master"].full_tensor()
    with pytest.raises(ValueError, match=r"^0\.up\.weight: the state has a master of shape \[.*\] on this rank\)"):
        optimizer.load_state_dict(saved)


@on_ranks(2)
def test_nothing_saves_the_group(rank: int) -> None:
    """Of a shard, of the parameter, of the whole state: what comes back has no group, and says so at a write."""
    net = sharded(converted("fp8-current"))
    weight = net[0].up.weight
    refused = "is a shard, and the group that holds the others is not known yet: call lpq.distributed.attach"
    assert weight._local_tensor.amax_group == "unattached"
    with torch.no_grad():
        weight.fill_(2)  # finds it
    assert weight._local_tensor.amax_group is weight.device_mesh.get_group()
    step(net, MasterWeights(SGD(net.parameters(), lr=0.1), keep=False), 0, Way("fp8-current"))
    group = weight._local_tensor.amax_group
    assert isinstance(group, dist.ProcessGroup)
    before = weight._local_tensor.detach().clone()
    assert before.amax_group is group

    pickled = pickle.dumps(before)
    assert b"ProcessGroup" not in pickled
    assert b"c10d" not in pickled
    saved = io.BytesIO()
    torch.save({"shard": before, "state": {n: local(t) for n, t in net.state_dict().items()}}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    unpickled: Any = pickle.loads(pickled)
    for back in (unpickled, loaded["shard"], loaded["state"]["0.up.weight"]):
        assert isinstance(back, QuantizedTensor)
        assert back.amax_group == "unattached"
        assert equal_states(parts(back), parts(before))
        for write in (lambda t: t.fill_(2), lambda t: t.copy_(torch.ones(128, 256)), lambda t: t[:16].zero_()):
            with pytest.raises(RuntimeError, match=refused):
                write(back)
        assert equal_states(parts(back), parts(before))
        parameter = DTensor.from_local(back, weight.device_mesh, weight.placements, run_check=False)
        attach(parameter)
        assert parameter._local_tensor.amax_group is not None
        parameter.fill_(2)
    # the write uses the group: rank 1 alone has the large values, and rank 0 knows of them
    values = torch.ones(128, 256) * (1000.0 if rank else 1.0)
    part = DTensor.from_local(unpickled, weight.device_mesh, weight.placements, run_check=False)
    attach(part)
    part._local_tensor.copy_(values)
    whole = torch.cat([torch.ones(128, 256), torch.full((128, 256), 1000.0)])
    assert torch.equal(part._local_tensor.row.scale, lpq.quantizer("fp8").quantize(whole).row.scale)


@on_ranks(2)
def test_received(rank: int) -> None:
    """A collective that would receive into a decoded copy says so; into the buffers it receives."""
    weight = lpq.quantizer("fp8").quantize(torch.full((32, 32), 1.0 + rank))
    for collective in (lambda t: dist.broadcast(t, 0), dist.all_reduce):
        with pytest.raises(TypeError, match="would receive into a decoded copy of a QuantizedTensor"):
            collective(weight.data)
    for _, operand in weight.operands:
        for buffer in operand.tensors():
            dist.broadcast(buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer, 0)
    assert torch.equal(weight.dequantize(), torch.ones(32, 32))


def test_nothing_in_high_precision() -> None:
    """Ranks that ran other tests may have something of theirs."""
    spawn(_nothing_in_high_precision, 2, fresh=True)


def test_torchs_own_functions(tmp_path: Path) -> None:
    spawn(_by_torchs_own_functions, 2, str(tmp_path / "dcp"))
