"""Private parts of FSDP2, for ``lpq.torch_private.fsdp``, are there and do as relied on, in torch 2.11 and 2.13.

Each failure here says what torch changed. Nothing else in lpq touches these.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import fully_shard, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor, Shard

import lpq
from lpq.distributed.shard import as_shard, plain
from lpq.torch_private import fsdp

HERE = Path(fsdp.__file__)
ROOT = Path(lpq.__file__).parents[1]
PARAM = {
    "_sharded_param_data", "_unsharded_param", "_unsharded_inner_tensors", "_module_info", "all_gather_outputs",
    "fsdp_placement", "is_dtensor", "mesh_info", "offload_to_cpu", "padded_sharded_param_size", "shard_mesh",
    "sharded_param", "unsharded_accumulated_grad",
}  # fmt: skip
GROUP = {"_reshard_after_forward", "_training_state", "_use_post_forward_mesh", "fsdp_params"}
STATE = {"_auto_reshard_after_forward", "_fsdp_param_group", "_fsdp_param_groups"}
DTENSOR = {"_local_tensor"}
"""Which others may touch: DTensor has it in every version."""
ROWS, COLS = 8, 4
"""Of the weight; 6 rows of it, in the uneven case."""


# ---------------------------------------------------------------------------------- one file


def _attributes(file: Path) -> Iterator[tuple[str, ast.Attribute]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr, node
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield name.value, ast.Attribute(node.args[0], name.value)


def test_what_is_listed_here_is_what_is_used() -> None:
    used = {
        name for name, node in _attributes(HERE)
        if name.startswith("_") and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }  # fmt: skip
    private = {name for name in PARAM | GROUP | STATE | DTENSOR if name.startswith("_")}
    assert used == private
    every = {name for name, _ in _attributes(HERE)}
    assert every >= PARAM | GROUP | STATE


def test_nothing_else_touches_it() -> None:
    names = PARAM | GROUP | STATE
    files = [*(ROOT / "lpq").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]
    assert HERE in files
    for file in files:
        if file != HERE:
            touched = {name for name, _ in _attributes(file)} & names
            assert not touched, f"{file.relative_to(ROOT)} touches {touched}: use lpq.torch_private.fsdp"
            assert not re.search(r"\b_fully_shard\b|\b_fsdp_\w+", file.read_text()), file.relative_to(ROOT)


# ---------------------------------------------------------------------------------- what it does


class Recorder:
    """Gathers one byte for each element in forward and two in backward, and writes down what FSDP2 does with them."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.inner: list[Tensor] = []
        self.begun: list[tuple[bool, bool, bool]] = []
        self.finished: list[tuple[list[int], bool]] = []

    @property
    def site(self) -> fsdp.Site:
        return fsdp.sites(self.layer, "weight")[self.layer]

    def begin(self, shard: Tensor) -> tuple[Tensor, ...]:
        site = self.site
        self.begun.append((*site.directions, torch._C._current_graph_task_id() != -1))
        width = 2 if site.directions == (False, True) else 1
        rank, ranks = site.group.rank(), site.group.size()
        fsdp.gather_into([(site, [torch.empty(0, dtype=torch.uint8).new_empty(ranks * width * 16)], self.inner)])
        return (torch.full((width * 16,), 10 * width + rank, dtype=torch.uint8),)

    def finish(self, outputs: tuple[Tensor, ...], out: Tensor | None) -> Any:
        (arrived,) = outputs
        self.finished.append((arrived.tolist(), out is not None))
        if out is None:
            whole = torch.full((ROWS, COLS), 2.0)
            self.inner.append(whole)
            return whole, self.inner
        assert out is self.layer.weight or out is self.last
        fsdp.allocate(self.inner)
        self.inner[0].data.fill_(2.0)
        return None

    last: Any = None


class Layer(nn.Module):
    """A weight that is gathered by a recorder."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(as_shard(torch.zeros(ROWS, COLS)))
        self.recorder = Recorder(self)
        self.seen: list[Tensor] = []

    def weight_gather(self) -> Recorder:
        return self.recorder

    def forward(self, x: Tensor) -> Tensor:
        self.recorder.last = self.weight
        assert torch.equal(self.weight, torch.full((ROWS, COLS), 2.0))
        return x @ self.weight.t()


def _what_a_site_reads(rank: int, layer: Any) -> None:
    (site,) = fsdp.sites(layer, "weight").values()
    assert fsdp.sites(layer, "bias") == {}
    assert isinstance(site.param, DTensor)
    assert site.param is layer.weight
    assert site.local is layer.weight._local_tensor
    assert torch.equal(plain(site.padded), torch.zeros(ROWS // 2, COLS))
    assert site.dtype == torch.float32
    assert site.device == torch.device("cpu")
    assert (site.group.size(), site.group.rank()) == (2, rank)
    assert site.refusal is None
    assert not site.reshards_to_fewer_ranks


def _which_is_outermost(rank: int) -> None:
    """Also for a part of what was sharded, and for what is not sharded itself."""
    net = nn.Sequential(nn.Sequential(Layer(), Layer()), Layer())
    alone = Layer()
    assert fsdp.outermost(net[0][0]) is net[0][0], "a module that is not sharded"
    for module in (net[0][1], net[0]):
        fully_shard(module)
        assert fsdp.outermost(net[0][0]) is (net[0][0] if module is net[0][1] else net[0])
        assert fsdp.outermost(net[0][1]) is module
    assert fsdp.outermost(net) is net
    fully_shard(net)
    assert all(fsdp.outermost(module) is net for module in net.modules()), "torch lists what it shards elsewhere now"
    assert fsdp.outermost(alone) is alone


def _what_two_passes_do(rank: int, layer: Any, param: Any, group: Any) -> None:
    record = layer.recorder
    for number in range(2):
        record.begun.clear()
        record.finished.clear()
        assert group._training_state == TrainingState.IDLE
        x = torch.ones(3, COLS, requires_grad=True)
        y = layer(x)
        # forward: the state, what is gathered, whether it is the first time
        assert record.begun == [(True, False, False)], "forward is no longer told by the training state"
        assert record.finished == [([10] * 16 + [11] * 16, number > 0)]
        assert record.inner[0].untyped_storage().size() == 0, "inner tensors are not freed when it is sharded again"
        assert all(t.untyped_storage().size() == 0 for t in param.all_gather_outputs)
        assert isinstance(layer.weight, DTensor)
        y.sum().backward()
        # backward: twice the bytes, into the tensors that the hook gave
        assert record.begun[1:] == [(False, True, True)], "backward is no longer told by the training state"
        assert record.finished[1:] == [([20] * 32 + [21] * 32, True)]
        assert torch.equal(x.grad, torch.full((3, COLS), 2.0 * ROWS))
        assert record.inner[0].untyped_storage().size() == 0
        assert param._unsharded_inner_tensors is record.inner, "the list of inner tensors is copied now"
        assert torch.equal(layer.weight.grad.full_tensor(), torch.full((ROWS, COLS), 3.0))
        layer.weight.grad = None


def _how_it_is_made_to_ask_anew(layer: Any, param: Any) -> None:
    """``forget``: the next gather makes another unsharded parameter."""
    record = layer.recorder
    old = param._unsharded_param
    assert isinstance(old, nn.Parameter)
    assert param.unsharded_accumulated_grad is None
    record.site.forget()
    record.inner.clear()
    record.finished.clear()
    layer(torch.ones(3, COLS)).sum().backward()
    assert [again for _, again in record.finished] == [False, True]
    assert param._unsharded_param is not old
    # a gradient that waits for more micro-batches is in one of the two places that forget looks at
    layer.set_requires_gradient_sync(False)
    layer(torch.ones(3, COLS)).sum().backward()
    waiting = param.unsharded_accumulated_grad is not None or param._unsharded_param.grad is not None
    assert waiting, "gradients are accumulated elsewhere now"
    with pytest.raises(RuntimeError, match="while its gradient is being accumulated"):
        record.site.forget()


def _who_stays_gathered() -> None:
    """The choice that FSDP2 makes for the outermost module in its first forward is foreseen."""
    for option, stays in ((None, True), (True, False), (False, True)):
        inner, outer = nn.Sequential(Layer()), nn.Sequential(nn.Identity(), Layer())
        net = nn.Sequential(fully_shard(inner), *outer)
        fully_shard(net, reshard_after_forward=option)
        state, sites = _get_module_fsdp_state(net), fsdp.sites(net, "weight")
        assert [sites[m].stays for m in (inner[0], outer[1])] == [False, stays], option
        state._lazy_init()
        assert [sites[m].stays for m in (inner[0], outer[1])] == [False, stays], option
        assert [not sites[m]._group._reshard_after_forward for m in (inner[0], outer[1])] == [False, stays], option


@on_ranks(2)
def test_two_ranks(rank: int) -> None:
    layer = fully_shard(Layer(), reshard_after_forward=True)
    state = _get_module_fsdp_state(layer)
    assert hasattr(state, "_fsdp_param_groups") or hasattr(state, "_fsdp_param_group")
    (group,) = fsdp._groups(layer)
    (param,) = group.fsdp_params
    assert [name for name in PARAM if not hasattr(param, name)] == ["_unsharded_param"]  # which a gather makes
    assert not [name for name in GROUP if not hasattr(group, name)]
    _what_a_site_reads(rank, layer)
    _what_two_passes_do(rank, layer, param, group)
    _how_it_is_made_to_ask_anew(layer, param)
    _which_is_outermost(rank)


@on_ranks(4)
def test_four_ranks(rank: int) -> None:
    layer = fully_shard(Layer(), reshard_after_forward=2)
    (site,) = fsdp.sites(layer, "weight").values()
    assert site.reshards_to_fewer_ranks
    layer = fully_shard(Layer(), reshard_after_forward=False)
    (group,) = fsdp._groups(layer)
    assert not group._reshard_after_forward
    (site,) = fsdp.sites(layer, "weight").values()
    assert site.directions == (True, True)
    assert site.stays
    _who_stays_gathered()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    (site,) = fsdp.sites(fully_shard(Layer(), mesh=mesh), "weight").values()
    assert isinstance(site.fsdp_param.shard_mesh, DeviceMesh)
    assert site.group == mesh.get_group("shard")
    layer = fully_shard(Layer(), shard_placement_fn=lambda parameter: Shard(1))
    (site,) = fsdp.sites(layer, "weight").values()
    assert "dimension 0" in (site.refusal or "")


def test_the_signature_that_fsdp2_reads_at_every_gather_is_not_worked_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each weight and gather that takes 10 to 27 µs."""

    def worked_out(*_: Any, **__: Any) -> None:
        raise AssertionError("worked out")

    monkeypatch.setattr(inspect, "_signature_from_function", worked_out)
    monkeypatch.setattr(inspect, "_signature_bound_method", worked_out)
    shard = as_shard(torch.zeros(2, 2))
    names = list(inspect.signature(shard.fsdp_pre_all_gather).parameters)
    assert names == ["mesh", "outer_size", "outer_stride", "module", "mp_policy"]
    with pytest.raises(AssertionError, match="worked out"):  # as it is for any other function
        inspect.signature(_what_a_site_reads)
