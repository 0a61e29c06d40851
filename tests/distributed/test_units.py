"""Weights of all kinds in one unit of FSDP2 are what each is in its own unit, to the bit, whatever happens between.

That a unit of one kind is as if its weights were gathered in high precision is shown for every recipe elsewhere
(``test_fsdp.py``, ``test_gathered_bytes.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import fully_shard, on_ranks
from sharded import decoded
from support.comparing import equal
from support.modes import Watched
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import lpq
from lpq.distributed import gather_loads
from lpq.distributed.gather_unit import Unit
from lpq.nn import GroupedLinear
from lpq.optim import MasterWeights

WIDTH, COUNTS = 128, [40, 0, 7, 17]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
GATHERED = {
    "tensor": "fp8-current", "rows": "fp8-row", "delayed": "fp8-delayed", "none": "mxfp8", "blocks": "mxfp8",
    "sixteen": "nvfp4", "both": "x=mxfp8(), w=hybrid(row=fp8, col=nvfp4, col_source=row), dy=mxfp8()",
    "plain": "x=mxfp8(), w=identity(dtype=bfloat16), dy=mxfp8()",
}  # fmt: skip
"""The recipe of each layer whose weight is gathered from high precision, in the order in which FSDP2 asks them."""
FEW: dict[str, Any] = {"names": ["tensor", "rows", "delayed", "blocks", "sixteen", "both"], "stored": False}


class Mixed(nn.Module):
    """Layers one after the other, then experts, with a norm and a bias: all in one unit, or each in its own."""

    def __init__(self, names: Any = GATHERED, stored: bool = True, again: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=name == "tensor") for name in names})
        self.stored = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False)] if stored else [])
        self.experts = GroupedLinear(len(COUNTS), WIDTH, WIDTH, bias=False, recipe=None)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for name, layer in self.layers.items():
            x = x + (checkpoint(layer, x, use_reentrant=False) if name == self.again else layer(x))
        for layer in self.stored:
            x = x + layer(x)
        y: Tensor = self.experts(x, torch.tensor(COUNTS).cumsum(0, dtype=torch.int32))
        return y


def built(together: bool, weights: Any = "high_precision", compiled: bool = False, **options: Any) -> Any:
    """A model of these, converted and sharded, with the same values each time."""
    torch.manual_seed(0)
    net = Mixed(**{key: options.pop(key) for key in ("names", "stored", "again") if key in options})
    lpq.convert(net.layers, {"rules": [{"match": n, "recipe": GATHERED[n]} for n in net.layers]}, weights=weights)
    if "none" in net.layers:
        net.layers["none"].recipe = None
    lpq.convert(net.experts, "mxfp8", weights=weights)
    if net.stored:
        lpq.convert(net.stored, "fp8-current", weights="quantized", ranks=2)
    layers = [*net.layers.values(), *net.stored]
    for layer in layers if compiled and dist.get_rank() == 0 else ():  # the other rank does the same collectives
        layer.compile(backend="aot_eager")
    for layer in [] if together else [*layers, net.experts]:
        fully_shard(layer, **options)
    return fully_shard(net, **{"reshard_after_forward": True, **options})


def batch(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(sum(COUNTS), WIDTH, generator=torch.Generator().manual_seed(number))
    return x.to(dtype).requires_grad_()


Between = Callable[[Any], None]


def trained(net: Any, between: Between | None = None, dtype: torch.dtype = torch.float32) -> list[Any]:
    """All that three steps compute; ``between``: done after each step."""
    plain = torch.optim.SGD(net.parameters(), lr=0.5)
    optimizer: Any = MasterWeights(plain, keep=False) if net.stored else plain
    found = []
    torch.manual_seed(1)  # of random bits
    for number in range(3):
        x = batch(number, dtype)
        y = net(x)
        y.float().square().mean().backward()
        found += [y.detach(), x.grad, *_gradients(net)]
        optimizer.step()
        optimizer.zero_grad()
        found += map(decoded, net.parameters())
        if between is not None:
            between(net)
    return found


def _gradients(net: Any) -> list[Tensor]:
    return [decoded(p.grad) for p in net.parameters() if p.grad is not None]


# ---------------------------------------------------------------------------------- kinds of weights

KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "resharded": ({"mp_policy": BF16}, ["EncodedLoad 9", "Ordinary 1"]),
    "kept gathered": (
        {"mp_policy": BF16, "reshard_after_forward": False},
        ["EncodedLoad 6", "High 1", "Ordinary 1", "High 1", "High 1"],
    ),
    "offloaded": (
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        ["EncodedLoad 1"] * 3 + ["Ordinary 1"] + ["EncodedLoad 1"] * 6,
    ),
    "compiled": ({"compiled": True, "names": FEW["names"]}, ["EncodedLoad 8"]),
}
"""Options, and the loads of each plan. The weight without a recipe travels as it is, and a weight whose operands
together have more bytes than the weight in bf16 travels in high precision; where shards are offloaded, FSDP2 moves each
by itself."""


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_weights_of_all_kinds_are_as_each_alone(rank: int, kind: str) -> None:
    options, loads = KINDS[kind]
    dtype = torch.bfloat16 if "mp_policy" in options else torch.float32
    found = trained(one := built(True, **options), dtype=dtype)
    alone = {name: option for name, option in options.items() if name != "compiled"}
    assert equal(found, trained(built(False, **alone), dtype=dtype), nan=True)
    assert not any(t.isnan().any() for t in found)
    unit: Any = one.layers["tensor"].gather.unit
    plans = [[f"{type(load).__name__} {len(load.gathers)}" for load in p.loads.values()] for p in unit._plans.values()]
    assert plans == [loads] * (1 if kind == "kept gathered" else 2)


# ---------------------------------------------------------------------------------- what happens between


def _nan(net: Any) -> None:
    """In the last rows of all."""
    with torch.no_grad():
        net.layers["tensor"].weight.to_local()[-1] = torch.nan if dist.get_rank() == 1 else 0.5


@on_ranks(2)
def test_nan_on_one_rank(rank: int) -> None:
    found, ordinary = (trained(built(True, weights, **FEW), _nan) for weights in ("high_precision", None))
    assert equal(found, ordinary, nan=True)
    assert any(t.isnan().all() for t in found), "it reaches the scale of all rows"


@on_ranks(2)
def test_gathered_before_the_step(rank: int) -> None:
    """By hand, while the optimizer writes to the shards."""
    found: dict[Any, list[Tensor]] = {"high_precision": [], None: []}
    for weights, seen in found.items():
        net = built(True, weights, **FEW)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        for number in range(3):
            y = net(batch(number))
            y.square().sum().backward()
            net.unshard()
            optimizer.step()
            net.reshard()
            optimizer.zero_grad()
            seen += [y.detach(), *map(decoded, net.parameters())]
    assert equal(*found.values(), nan=True)


@on_ranks(2)
def test_statistics_are_found_where_a_recorded_step_reads_them(rank: int) -> None:
    """The step measures after the optimizer's, and forward reads before it: a CUDA graph reads the same memory."""
    net, places, values = built(True, **FEW), [], []

    def note(net: Any) -> None:
        found = [stat for layer in net.layers.values() for stat in layer.gather.stats if stat is not None]
        places.append([stat.data_ptr() for stat in found])
        values.append([stat.clone() for stat in found])

    trained(net, between=note)
    assert places[0] == places[1] == places[2] != []
    assert not any(torch.equal(a, b) for a, b in zip(values[1], values[2], strict=True))


@on_ranks(2)
def test_watched(rank: int) -> None:
    """A dispatch mode around backward, in which lpq runs as operators."""
    found = []
    for mode in (Watched(), torch.enable_grad()):
        net, x = built(True, **FEW), batch(0)
        loss = net(x).square().sum()
        with mode:
            loss.backward()
        found.append([x.grad, *_gradients(net)])
    assert equal(*found, nan=True)


@on_ranks(2)
def test_one_runs_again(rank: int) -> None:
    """One layer of the unit is checkpointed: its row operand is there in backward, and the others' are not."""
    there: dict[str, bool] = {}
    found = []
    for weights in ("high_precision", None):
        net = built(True, weights, again="rows", mp_policy=BF16, **FEW)
        for name in ("tensor", "rows", "sixteen") if weights else ():

            def see(layer: Any, *_: Any, name: str = name) -> None:
                there[name] = all(t.untyped_storage().size() for t in layer.weight.row.tensors())

            net.layers[name].register_full_backward_hook(see)
        found.append(trained(net, dtype=torch.bfloat16))
    assert equal(*found, nan=True)
    assert there == {"tensor": False, "rows": True, "sixteen": False}


@on_ranks(2)
def test_a_caught_error(rank: int) -> None:
    """What was encoded before it is not used after it."""

    def begin(self: Unit, *args: Any) -> Any:
        usual(self, *args)
        raise ZeroDivisionError

    found, usual = [], Unit.begin_all
    for fails in (True, False):
        net = built(True, **FEW)
        net(batch(0)).square().sum().backward()
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(Unit, "begin_all", begin)
                with pytest.raises(ZeroDivisionError):
                    net(batch(1))
                for module in net.modules():
                    assert not hasattr(module, "unshard") or module.reshard() is None
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(2.0)
        found.append(trained(net))
    assert equal(*found, nan=True)


@on_ranks(2)
def test_a_unit_travels_as_one_tensor_and_its_other_weights_send_none(rank: int) -> None:
    """FSDP2 pairs what a parameter sends with what it receives, one to one."""
    sent: list[tuple[Tensor, ...]] = []

    def begin(self: Unit, *args: Any) -> Any:
        sent.append(usual(self, *args))
        assert self.begun is not None
        assert [*self.begun] == self.gathers[:1], "one weight sends for all"
        return sent[-1]

    usual, net = Unit.begin_all, built(True, **FEW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unit, "begin_all", begin)
        net(batch(0)).square().sum().backward()
    assert [len(tensors) for tensors in sent] == [1, 1], "forward and backward"
    assert all(tensors[0].dim() == 1 and tensors[0].dtype == torch.uint8 for tensors in sent)


@on_ranks(2)
def test_what_stays_is_kept_once_for_each_stream(rank: int) -> None:
    """At fixed addresses; memory that was allocated anew is kept for each gather."""
    net, kept = built(True, **FEW), []
    net(batch(0))
    unit: Any = net.layers["tensor"].gather.unit
    load: Any = next(iter(unit._plans.values())).loads[unit.gathers[0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_loads, "_read_on_this_stream", kept.append)
        for anew, expected in ((False, 2), (True, 4)):
            load._anew = anew
            kept.clear()
            for stream in (1, 1, 2, 1):
                patch.setattr(gather_loads.cuda, "current_stream", lambda device, stream=stream: stream)
                load._keep([])
            assert len(kept) == expected


@on_ranks(2)
def test_views_and_copies_of_a_shard_have_no_hook(rank: int) -> None:
    """The hook is an attribute of the shard, and would gather the shard for them."""
    net = built(True, **FEW)
    net(batch(0))
    shard = net.layers["rows"].weight._local_tensor
    assert "fsdp_pre_all_gather" in vars(shard)
    for other in (shard.detach(), shard[:1], shard.clone(), copy.deepcopy(shard.detach())):
        assert "fsdp_pre_all_gather" not in vars(other)


@on_ranks(2)
def test_ordinary_in_the_first_place(rank: int) -> None:
    """Somebody puts an ordinary parameter where the first weight of the unit was: it is gathered as it is."""
    found = []
    for together in (True, False):
        torch.manual_seed(0)
        net: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
        lpq.convert(net, "fp8-current", weights="high_precision")
        net[0].weight = nn.Parameter(torch.eye(WIDTH))
        for layer in () if together else net:
            fully_shard(layer)
        y = fully_shard(net)(batch(0))
        y.square().sum().backward()
        found.append([y.detach(), *_gradients(net)])
    assert equal(*found, nan=True)
