"""Weights that are stored quantized: what is held, how they begin, and what is saved of them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from operands import expected, gathered
from ranks import of_all, on_ranks
from sharded import (
    OPTIMIZERS,
    W8,
    How,
    built,
    bytes_of,
    give_gradients,
    local,
    model,
    optimizer_for,
    parts,
    same_parts,
    sharded,
    step,
    stored,
)
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
from torch.optim import AdamW, Optimizer

import lpq
from lpq.core import QuantizedTensor
from lpq.distributed.shard_groups import attach
from lpq.observe import collectives
from lpq.optim import MasterWeights, load_high_precision

SIZE = 128
HYBRID, BLOCKS = W8.format("hybrid(row=nvfp4, col=fp8)"), W8.format("nvfp4(block=16x16)")
OF_CODES = "hybrid(row=fp8, col=nvfp4, col_source=row)"
FP8 = stored("fp8-current", masters=True)


def _values(how: How = FP8) -> dict[str, Tensor]:
    """An ordinary checkpoint of the model."""
    torch.manual_seed(7)
    return {name: torch.randn_like(p) / 8 for name, p in model(how.width, how.inner).state_dict().items()}


# ---------------------------------------------------------------------------------- what is held


def _large() -> list[Any]:
    """The ordinary tensors with memory that are as large as a shard of a weight."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is Tensor and t.dtype in (torch.float32, torch.bfloat16)]
    return [(t.shape, t.dtype) for t in tensors if t.numel() >= 128 * 256 and t.untyped_storage().nbytes() >= t.numel()]


@on_ranks(2)
def test_nothing_in_high_precision(rank: int) -> None:
    """Also none that the model does not own: after a step no tensor of a weight's size is left."""
    before = _large()
    for recipe, share in (("fp8-current", 0.52), (BLOCKS, 0.29), ("fp8-block", 0.52)):
        how = stored(recipe, bf16=True, width=256, inner=256, optimizer=OPTIMIZERS["sgd"])
        net = built(how)
        weights = [layer.weight for layer in net.modules() if isinstance(layer, lpq.nn.Linear)]
        optimizer = optimizer_for(how, net)
        for number in range(2):
            step(net, optimizer, number, how)
        held = sum(local(w).held_bytes for w in weights)
        bf16 = sum(2 * w.numel() for w in weights)
        assert 0 < 2 * held <= share * bf16, (recipe, 2 * held / bf16)
        assert _large() == before
        kept = torch.zeros(128, 256)
        assert len(_large()) == len(before) + 1  # or it finds nothing at all
        del net, weights, optimizer, kept


# ---------------------------------------------------------------------------------- beginning


def _begun_on_meta(recipe: str) -> nn.Sequential:
    with torch.device("meta"):
        net = model(SIZE, SIZE)
    lpq.convert(net, recipe, weights="quantized")
    sharded(net, FP8)
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
    found = gathered(net, torch.randn(32, SIZE))
    quantizer = lpq.recipe(recipe).w
    for name, value in values.items():
        layer, _, leaf = name.rpartition(".")
        if (layer, "forward") in found and leaf == "weight":
            for when, direction in (("forward", "row"), ("backward", "col")):
                assert equal_states(found[layer, when], expected(quantizer, value, direction)), (recipe, name)
        else:
            assert torch.equal(net.get_parameter(name).full_tensor(), value), name
    assert len(found) == 8
    net.zero_grad()


@on_ranks(2)
def test_from_a_checkpoint(rank: int) -> None:
    for recipe in ("fp8-current", HYBRID):
        values, how = _values(), stored(recipe, masters=True)
        net = _begun_on_meta(recipe)
        optimizer: Any = optimizer_for(how, net)
        with collectives() as seen:
            load_high_precision(net, values, optimizer)
        assert [c.kind for c in seen].count("all_reduce") == 1, seen
        masters = {id(w): m for w, m in optimizer.masters.items()}
        for name, parameter in net.named_parameters():
            if id(parameter) in masters:
                assert torch.equal(masters.pop(id(parameter)).full_tensor(), values[name]), name
        assert not masters
        _encoded(net, recipe, values)

        direct = built(how)  # without masters, and over weights that are there
        rounded = MasterWeights(OPTIMIZERS["sgd"](direct.parameters()))
        with pytest.warns(UserWarning, match="masters begin with what weights decode to"):
            step(direct, rounded, 0, how)
        load_high_precision(direct, values)
        _encoded(direct, recipe, values)

        alone = replace(how, shard=False)
        unsharded = built(alone)
        its: Any = optimizer_for(alone, unsharded)
        load_high_precision(unsharded, values, its)
        for number in range(2):
            assert step(net, optimizer, number, how) == step(unsharded, its, number, alone)
        same_parts(net, unsharded, recipe)


@on_ranks(2)
def test_from_a_full_state_dict(rank: int) -> None:
    """By PyTorch's own functions, before any forward; ranks may have all of it, or rank 0 alone."""
    values = _values()
    for recipe in ("fp8-current", HYBRID):
        for alone in (False, True):
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=alone)
            for net in (_begun_on_meta(recipe), built(stored(recipe))):
                set_model_state_dict(net, {} if alone and rank else dict(values), options=options)
                _encoded(net, recipe, values)
        direct = built(stored(recipe))
        direct.load_state_dict(get_model_state_dict(net))
        _encoded(direct, recipe, values)


@on_ranks(2)
def test_initialised(rank: int) -> None:
    """``reset_parameters`` of what was on meta; every rank draws for its shard, and all have one scale."""
    for recipe in ("fp8-current", BLOCKS, HYBRID):
        net, most = _begun_on_meta(recipe), SIZE**-0.5
        torch.manual_seed(rank)
        for module in net.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()
        scales = []
        for layer in (layer for block in net for layer in (block.up, block.down)):
            values = layer.weight.full_tensor().dequantize()
            assert 0.9 * most < values.abs().max() < 1.1 * most
            assert 0.9 * most / 3**0.5 < values.std() < 1.1 * most / 3**0.5
            assert not torch.equal(*values.chunk(2))
            scales += [copy_bytes(t) for _, s in local(layer.weight).operands for t in s.tensors() if t.dim() == 0]
        assert scales
        assert equal(*of_all(scales))
        step(net, optimizer_for(how := stored(recipe), net), 0, how)


def _stepped(net: nn.Sequential, optimizer: Optimizer) -> None:
    for _ in range(2):
        give_gradients(net)
        optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_a_model_that_was_loaded(rank: int, tmp_path: Path) -> None:
    """By a checkpoint, which attaches what it writes to; or whole, unpickled or copied before it was sharded. It is
    stepped before FSDP2 has ever gathered a weight."""
    how = stored("fp8-current")
    unsharded = replace(how, shard=False)
    alone, trained = built(unsharded), built(how)
    for net in (alone, trained):
        _stepped(net, optimizer_for(how, net))
    lpq.checkpoint.save(trained, tmp_path / "run", step=1)

    def restored(net: nn.Sequential) -> nn.Sequential:
        lpq.checkpoint.load(sharded(net, how), tmp_path / "run")
        return net

    def unpickled(net: nn.Sequential) -> nn.Sequential:
        return sharded(pickle.loads(pickle.dumps(net)), how)

    def copied(net: nn.Sequential) -> nn.Sequential:
        return sharded(copy.deepcopy(net), how)

    makes: list[Callable[[nn.Sequential], nn.Sequential]] = [restored, unpickled, copied]
    for make in makes:
        net, expected = make(built(unsharded)), copy.deepcopy(alone) if make is restored else built(unsharded)
        for one in (net, expected):
            _stepped(one, optimizer_for(how, one))
        same_parts(net, expected, make.__name__)


# ---------------------------------------------------------------------------------- saving, loading and the group


def _everything(net: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The bytes of parameters, masters and what the optimizer keeps."""
    state = [t for p in optimizer.optimizer.param_groups[0]["params"] for t in optimizer.optimizer.state[p].values()]
    return bytes_of([*net.parameters(), *optimizer.masters.values(), *(t for t in state if isinstance(t, Tensor))])


@on_ranks(2)
def test_continued(rank: int) -> None:
    """The state of an optimizer, loaded into another: nothing tells the runs apart."""
    for recipe, name, masters in (
        ("fp8-current", "foreach", True), ("fp8-delayed", "fused", True), (BLOCKS, "sgd", True),
        ("fp8-current", "loop", False), ("fp8-current", "momentum", False),
    ):  # fmt: skip
        how = stored(recipe, optimizer=OPTIMIZERS[name], masters=masters)
        net = built(how)
        optimizer: Any = optimizer_for(how, net)
        for number in range(2):
            step(net, optimizer, number, how)
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        assert sum("master" in state for state in saved[1]["state"].values()) == 4 * masters
        uninterrupted = [step(net, optimizer, number, how) for number in (2, 3)]

        other = built(how)
        load_high_precision(other, _values(how))
        its: Any = optimizer_for(how, other)
        step(other, its, 9, how)
        other.load_state_dict(saved[0])
        its.load_state_dict(saved[1])
        assert [step(other, its, number, how) for number in (2, 3)] == uninterrupted, how
        assert equal_states(bytes_of(net), bytes_of(other))
        assert equal_states(_everything(net, optimizer), _everything(other, its))


@on_ranks(2)
def test_torchs_own_functions(rank: int, tmp_path: Path) -> None:
    """``get_state_dict`` and what sets it, with DCP between them: to ask changes nothing, and the run goes on."""
    how = stored(BLOCKS, masters=True)
    net = built(how)
    optimizer: Any = optimizer_for(how, net)
    for number in range(2):
        step(net, optimizer, number, how)
    before = _everything(net, optimizer)
    model_state, state = get_state_dict(net, optimizer)
    assert equal_states(before, _everything(net, optimizer)), "asking took a step"
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=tmp_path / "dcp")
    full = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    saved = copy.deepcopy((model_state, full))
    uninterrupted = [step(net, optimizer, number, how) for number in (2, 3)]

    for used, by_dcp in ((False, False), (True, False), (True, True)):
        other = built(how)
        load_high_precision(other, _values(how))
        its: Any = optimizer_for(how, other)
        if used:
            step(other, its, 9, how)
        if by_dcp:
            found = dict(zip(("model", "optimizer"), get_state_dict(other, its), strict=True))
            dcp.load(found, checkpoint_id=tmp_path / "dcp")
            given, options = (found["model"], found["optimizer"]), None
        else:
            given, options = copy.deepcopy(saved), StateDictOptions(full_state_dict=True)
            get_optimizer_state_dict(other, its)  # it begins moments, while weights are what masters were made of
        set_model_state_dict(other, given[0])
        set_optimizer_state_dict(other, its, given[1], options=options)
        assert [step(other, its, number, how) for number in (2, 3)] == uninterrupted, (used, by_dcp)
        assert equal_states(_everything(net, optimizer), _everything(other, its)), (used, by_dcp)

    model_state, state = get_state_dict(net, optimizer)
    set_state_dict(net, optimizer, model_state_dict=model_state, optim_state_dict=state)  # in the other order
    with pytest.raises(RuntimeError, match=r"^0\.up\.weight: .* load its state after them"):
        step(net, optimizer, 4, how)
    for weight in optimizer.masters:
        optimizer.seen(weight)
    assert step(net, optimizer, 4, how) == step(other, its, 4, how)


@on_ranks(2)
def test_masters_that_do_not_fit(rank: int) -> None:
    """There are none in the state, or whole ones."""
    net = built(FP8)
    ordinary = AdamW(net.parameters(), lr=1e-2)
    without, optimizer = MasterWeights(ordinary, keep=False), optimizer_for(FP8, net)
    saved = optimizer.state_dict()
    state = next(state for state in saved["state"].values() if "master" in state)
    state["master"] = state["master"].full_tensor()
    with pytest.raises(ValueError, match=r"^0\.up\.weight: the state has a master of shape \[.*\] on this rank\)"):
        optimizer.load_state_dict(saved)
    step(net, without, 0, FP8)
    with pytest.raises(ValueError, match=r"^0\.up\.weight: the state has no master for parameter"):
        MasterWeights(AdamW(net.parameters(), lr=1e-2)).load_state_dict(without.state_dict())
    with pytest.raises(ValueError, match="an optimizer that has not taken a step yet"):
        MasterWeights(ordinary)


@on_ranks(2)
def test_nothing_saves_the_group(rank: int) -> None:
    """Of a shard, of the parameter, of the whole state: what comes back has no group, and says so at a write."""
    net = built(how := stored("fp8-current"))
    weight, rows = net[0].up.weight, SIZE // 2
    refused = "is a shard, and the group that holds the others is not known yet: call lpq.distributed.attach"
    assert weight._local_tensor.amax_group == "unattached"
    with torch.no_grad():
        weight.fill_(2)  # finds it
    assert weight._local_tensor.amax_group is weight.device_mesh.get_group()
    step(net, optimizer_for(how, net), 0, how)
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
        for write in (lambda t: t.fill_(2), lambda t: t.copy_(torch.ones(rows, SIZE)), lambda t: t[:16].zero_()):
            with pytest.raises(RuntimeError, match=refused):
                write(back)
        assert equal_states(parts(back), parts(before))
        parameter = DTensor.from_local(back, weight.device_mesh, weight.placements, run_check=False)
        attach(parameter)
        assert parameter._local_tensor.amax_group is not None
        parameter.fill_(2)
    # the write uses the group: rank 1 alone has the large values, and rank 0 knows of them
    part = DTensor.from_local(unpickled, weight.device_mesh, weight.placements, run_check=False)
    attach(part)
    part._local_tensor.copy_(torch.full((rows, SIZE), 1000.0 if rank else 1.0))
    whole = torch.cat([torch.ones(rows, SIZE), torch.full((rows, SIZE), 1000.0)])
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
