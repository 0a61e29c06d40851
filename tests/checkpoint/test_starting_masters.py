"""From high precision to stored weights with masters and back: through a checkpoint, with and without the optimizer.

The values stay what they were, to the bit, and so does the run that goes on from there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from killed import untold
from ranks import fully_shard, spawn
from sharded import How, built, local, step
from support.comparing import as_bytes, equal
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import lpq
from lpq import checkpoint
from lpq.checkpoint import CheckpointError, CheckpointWarning
from lpq.core import QuantizedTensor
from lpq.observe import collectives
from lpq.optim import MasterWeights

RECIPES = ["fp8-current", "x=mxfp8(), w=hybrid(row=fp8, col=nvfp4), dy=mxfp8()"]
WEIGHTS = ["0.up.weight", "0.down.weight", "1.up.weight", "1.down.weight"]
"""The weights that are converted."""


def how(recipe: str, weights: str | None) -> How:
    return How(recipe, weights=weights, width=64, inner=128)


def made(recipe: str, weights: str | None) -> nn.Module:
    return built(how(recipe, weights))


def adam(net: nn.Module) -> AdamW:
    return AdamW(net.parameters(), lr=1e-2)


def trained(recipe: str, weights: str | None, first: int = 0) -> tuple[nn.Module, Optimizer]:
    """A model after two steps, with masters if its weights are stored."""
    net = made(recipe, weights)
    optimizer = MasterWeights(adam(net)) if weights == "quantized" else adam(net)
    for number in range(first, first + 2):
        step(net, optimizer, number, how(recipe, weights))
    return net, optimizer


def goes_on(net: nn.Module, optimizer: Optimizer) -> list[float]:
    """The losses of the steps that follow."""
    losses = [step(net, optimizer, number, how("", None)) for number in range(2, 5)]
    assert len(set(losses)) == 3
    return losses


def values(net: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each converted weight, as it is."""
    found = {name: local(p.detach()) for name, p in net.named_parameters() if name in WEIGHTS}
    assert list(found) == WEIGHTS
    return {name: getattr(p, "held", p) for name, p in found.items()}


def codes(weight: Any) -> list[Tensor]:
    """The bytes of a stored weight as they are now."""
    return [as_bytes(buffer).clone() for _, operand in weight.operands for buffer in operand.tensors()]


def masters(net: nn.Module, optimizer: MasterWeights) -> dict[str, Tensor]:
    return {name: local(optimizer.masters[p]) for name, p in net.named_parameters() if name in WEIGHTS}


def moments(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """All state but the masters, in the order of the parameters."""
    state = optimizer.state_dict()["state"].values()
    return [(name, local(t)) for of_one in state for name, t in of_one.items() if name != "master"]


def same_moments(one: Optimizer, other: Optimizer) -> bool:
    (found, a), (expected, b) = (zip(*moments(optimizer), strict=True) for optimizer in (one, other))
    return found == expected and equal(a, b)


def hold(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


def encoded(net: nn.Module, of: dict[str, Tensor]) -> None:
    """The weights are what their quantizer makes of these values, with the statistics of the whole weights."""
    for name, weight in values(net).items():
        assert isinstance(weight, QuantizedTensor)
        whole = of[name]
        parts = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, whole.contiguous())
        whole = torch.cat(parts)
        truth = weight.quantizer.quantize(whole)
        rows = weight.shape[0]
        start = rows * dist.get_rank()
        for (direction, a), (_, b) in zip(weight.operands, truth.operands, strict=False):
            part = b.narrow(0 if direction == "row" else 1, start, start + rows)
            assert part is not None
            for x, y in zip(a.tensors(), part.tensors(), strict=True):
                assert torch.equal(as_bytes(x), as_bytes(y)), (name, direction)


def quietly(path: Path, net: nn.Module, optimizer: Optimizer | None) -> None:
    with untold():
        checkpoint.load(net, path, optimizer)


def _masters_of_high_precision(folder: Path, recipe: str) -> None:
    net, optimizer = trained(recipe, "high_precision")
    saved = {name: value.clone() for name, value in values(net).items()}
    checkpoint.save(net, folder / "with", optimizer)
    checkpoint.save(net, folder / "without")

    for used in (False, True):  # masters that took steps of their own are overwritten, too
        stored = made(recipe, "quantized")
        resumed = MasterWeights(adam(stored))
        if used:
            stored, resumed = trained(recipe, "quantized", first=7)
        with collectives() as seen:
            quietly(folder / "with", stored, resumed)
        assert [c.kind for c in seen].count("all_reduce") == 1, "one reduction for all"
        hold(masters(stored, resumed), saved)
        encoded(stored, saved)
        decoded = {name: value.dequantize() for name, value in values(stored).items()}
        assert not any(torch.equal(decoded[name], saved[name]) for name in WEIGHTS), "or it would not matter"
        assert same_moments(resumed, optimizer)

    fresh = made(recipe, "quantized")
    alone = MasterWeights(adam(fresh))
    with collectives() as seen:
        quietly(folder / "without", fresh, alone)
    assert [c.kind for c in seen].count("all_reduce") == 1
    hold(masters(fresh, alone), saved)
    encoded(fresh, saved)
    assert moments(alone) == []

    twin = made(recipe, "high_precision")
    quietly(folder / "with", twin, None)
    anew = goes_on(twin, adam(twin))
    truth = goes_on(net, optimizer)
    assert anew != truth
    assert goes_on(stored, resumed) == truth
    assert goes_on(fresh, alone) == anew


def _high_precision_of_masters(folder: Path, recipe: str) -> None:
    stored, optimizer = trained(recipe, "quantized")
    kept = {name: value.clone() for name, value in masters(stored, optimizer).items()}
    checkpoint.save(stored, folder / "masters", optimizer)

    net = made(recipe, "high_precision")
    resumed = adam(net)
    quietly(folder / "masters", net, resumed)
    hold(values(net), kept)
    assert all("master" not in state for state in resumed.state.values())
    assert same_moments(resumed, optimizer)

    plain = made(recipe, None)
    quietly(folder / "masters", plain, None)
    hold(values(plain), kept)

    assert goes_on(net, resumed) == goes_on(stored, optimizer)


def _masters_without_a_place(folder: Path, recipe: str) -> None:
    stored, optimizer = trained(recipe, "quantized")
    checkpoint.save(stored, folder / "dropped", optimizer)
    before = {name: codes(weight) for name, weight in values(stored).items()}
    net = made(recipe, "quantized")
    ordinary = MasterWeights(adam(net), keep=False)
    with pytest.warns(CheckpointWarning) as told:
        checkpoint.load(net, folder / "dropped", ordinary)
    (line,) = [str(w.message) for w in told]
    assert f"the fp32 masters of 4 weights are left out ({', '.join(WEIGHTS)})" in line
    assert "wrap it in lpq.optim.MasterWeights before loading" in line
    for name, weight in values(net).items():
        assert equal(codes(weight), before[name]), name
    assert same_moments(ordinary, optimizer)
    assert all("master" not in state for state in ordinary.state.values())
    goes_on(net, ordinary)
    quietly(folder / "dropped", made(recipe, "quantized"), None)  # for evaluation: nobody wants masters


def _masters_of_stored_weights(folder: Path, recipe: str) -> None:
    """Saved without masters: they start from what the weights decode to, as if they were made after loading."""
    stored = made(recipe, "quantized")
    ordinary = MasterWeights(adam(stored), keep=False)
    step(stored, ordinary, 0, how(recipe, "quantized"))
    checkpoint.save(stored, folder / "plain", ordinary)
    net = made(recipe, "quantized")
    optimizer = MasterWeights(adam(net))
    quietly(folder / "plain", net, optimizer)
    hold(masters(net, optimizer), {name: w.dequantize(torch.float32) for name, w in values(stored).items()})
    assert same_moments(optimizer, ordinary)
    goes_on(net, optimizer)


def _frozen_weights(folder: Path, recipe: str) -> None:
    """Stored, and given to no optimizer: what they decode to is all there is of them. The others take their masters."""

    def frozen(weights: str | None) -> tuple[nn.Module, list[Tensor]]:
        net = made(recipe, weights)
        net[0].up.requires_grad_(False)
        net[0].down.requires_grad_(False)
        return net, [p for p in net.parameters() if p.requires_grad]

    stored, params = frozen("quantized")
    optimizer = MasterWeights(AdamW(params, lr=1e-2))
    step(stored, optimizer, 0, how(recipe, "quantized"))
    checkpoint.save(stored, folder / "frozen", optimizer)
    decoded = {name: weight.dequantize() for name, weight in values(stored).items()}
    kept = {name: local(optimizer.masters[p]) for name, p in stored.named_parameters() if p in optimizer.masters}
    assert list(kept) == WEIGHTS[2:]
    assert not any(torch.equal(decoded[name], kept[name]) for name in kept), "or it would not matter which is taken"
    for weights in (None, "high_precision"):
        net, params = frozen(weights)
        resumed = AdamW(params, lr=1e-2)
        with collectives() as seen:
            quietly(folder / "frozen", net, resumed)
        assert "all_reduce" not in [c.kind for c in seen], "there is nothing to encode"
        hold(values(net), {**decoded, **kept})
        goes_on(net, resumed)


Check = Callable[[Path, str], None]
CHECKS: list[Check] = [
    _masters_of_high_precision, _high_precision_of_masters, _masters_without_a_place, _masters_of_stored_weights,
    _frozen_weights,
]  # fmt: skip


def _sharded(rank: int, check: Check, folder: Path, recipe: str) -> None:
    check(folder, recipe)


@pytest.mark.parametrize(("check", "recipe"), zip(CHECKS, cycle(RECIPES)))
def test_two_ranks(check: Check, recipe: str, tmp_path: Path) -> None:
    spawn(_sharded, 2, check, tmp_path, recipe)


BLOCKS = "fp8(scaling=block, block=128x128)"
"""Shards of 96 rows cut its blocks, and have as many of them as shards of whole blocks would."""


def _loaded_in_shards(rank: int, folder: Path, truth: Tensor) -> None:
    net = nn.Sequential(nn.Linear(128, 192))
    fully_shard(net)
    quietly(folder, net, None)
    assert torch.equal(local(net[0].weight), truth.chunk(2)[rank])


def test_a_frozen_weight_is_decoded_whole_where_shards_cut_its_blocks(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(128, 192))
    values = torch.randn(192, 128) * torch.arange(1, 193)[:, None]
    net[0].weight = nn.Parameter(lpq.quantizer(BLOCKS).quantize(values), requires_grad=False)
    checkpoint.save(net, tmp_path, SGD([net[0].bias], 0.1))
    spawn(_loaded_in_shards, 2, tmp_path, net[0].weight.dequantize())


# ------------------------------------------------------------------------------------ in one process


def layer(weights: str | None = "quantized", recipe: str = "mxfp8", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return lpq.convert(nn.Sequential(nn.Linear(64, 32, dtype=dtype)), recipe, weights=weights)


def stepped(net: nn.Module, optimizer: Optimizer) -> Optimizer:
    net(torch.randn(8, 64, dtype=net[0].bias.dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_an_ordinary_model_in_bf16_gives_masters_its_very_values(tmp_path: Path) -> None:
    """And moments, which the masters' optimizer keeps in fp32, as it keeps its own."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16))
    first = stepped(plain, adam(plain))
    checkpoint.save(plain, tmp_path, first)
    net = layer(dtype=torch.bfloat16)
    optimizer = MasterWeights(adam(net))
    checkpoint.load(net, tmp_path, optimizer)
    assert torch.equal(optimizer.masters[net[0].weight], plain[0].weight.float())
    state = optimizer.state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert state[name].dtype == torch.float32
        assert torch.equal(state[name], first.state[plain[0].weight][name].float())
    stepped(net, optimizer)


def test_a_model_in_bf16_takes_masters_rounded(tmp_path: Path) -> None:
    net = layer(dtype=torch.bfloat16)
    optimizer = MasterWeights(adam(net))
    stepped(net, optimizer)
    checkpoint.save(net, tmp_path, optimizer)
    other = layer("high_precision", dtype=torch.bfloat16)
    version = other[0].weight._version
    quietly(tmp_path, other, None)
    master = optimizer.masters[net[0].weight]
    assert torch.equal(other[0].weight, master.bfloat16())
    assert not torch.equal(master.bfloat16().float(), master)
    assert not torch.equal(other[0].weight, net[0].weight.dequantize())
    assert other[0].weight._version > version, "what was derived from it is out of date"
    plain = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16))
    checkpoint.load(plain, tmp_path, any_policy=True)
    assert torch.equal(plain[0].weight, other[0].weight)


@pytest.mark.parametrize("wrap", [MasterWeights, lambda optimizer: optimizer])
@pytest.mark.parametrize("sides", [{}, {"row": False}])
def test_a_frozen_stored_layer_loads_into_an_ordinary_model(tmp_path: Path, wrap: Any, sides: dict[str, bool]) -> None:
    """With masters of other weights or without any: it is in no saved optimizer."""
    net = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    weight = lpq.quantizer("mxfp8").quantize(torch.randn(32, 64), **sides)
    net[0].weight = nn.Parameter(weight, requires_grad=False)
    optimizer = wrap(adam(net[1]))
    checkpoint.save(net, tmp_path, optimizer)
    other = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    version = other[0].weight._version
    quietly(tmp_path, other, adam(other[1]))
    assert torch.equal(other[0].weight, weight.dequantize())
    assert other[0].weight._version > version, "what was derived from it is out of date"
    rounded = nn.Linear(64, 32).bfloat16()
    mixed = nn.Sequential(rounded, nn.Linear(32, 32))
    mixed[0].bias.data = mixed[0].bias.data.float()
    quietly(tmp_path, mixed, None)
    assert torch.equal(rounded.weight, weight.dequantize().bfloat16())
    with pytest.raises(CheckpointError, match=r"0\.weight was saved with shape \[32, 64\] and is \[48, 64\]"):
        checkpoint.load(nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32)), tmp_path)


def test_a_stored_weight_that_may_have_been_trained_is_not_decoded(tmp_path: Path) -> None:
    net = layer()
    checkpoint.save(net, tmp_path / "trained", stepped(net, MasterWeights(adam(net), keep=False)))
    checkpoint.save(net, tmp_path / "unknown")
    for name in ("trained", "unknown"):
        with pytest.raises(
            CheckpointError, match=r"0\.weight was saved as mxfp8, .*lpq\.export\(…, layout=\"lpq\", decode=True\)"
        ):
            checkpoint.load(layer(None), tmp_path / name)


def test_a_master_of_somebody_else_stays_the_optimizers_own(tmp_path: Path) -> None:
    """State of this name beside a weight in high precision is no master of lpq's."""
    net = layer("high_precision")
    optimizer = SGD(net.parameters(), 0.1)
    optimizer.state[net[0].weight] = {"master": torch.full((32, 64), 7.0)}
    checkpoint.save(net, tmp_path, optimizer)
    other = layer("high_precision")
    resumed = SGD(other.parameters(), 0.1)
    checkpoint.load(other, tmp_path, resumed)
    assert torch.equal(other[0].weight, net[0].weight)
    assert torch.equal(resumed.state[other[0].weight]["master"], torch.full((32, 64), 7.0))


def test_an_optimizer_that_took_steps_is_no_new_one(tmp_path: Path) -> None:
    checkpoint.save(layer("high_precision"), tmp_path)
    net = layer()
    optimizer = stepped(net, MasterWeights(adam(net)))
    with pytest.raises(CheckpointError, match="it was saved without an optimizer: load it without, or start"):
        checkpoint.load(net, tmp_path, optimizer)


def deeper() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (deeper, r"it has nothing for these tensors of the model: 1\.weight, 1\.bias"),
        (wider, r"0\.weight was saved with shape \[32, 64\] and is \[48, 64\] in the model"),
    ],
)
def test_of_a_model_that_differs_the_model_is_spoken_of(tmp_path: Path, make: type[nn.Module], words: str) -> None:
    """Its optimizer differs as well, because of that."""
    plain = nn.Sequential(nn.Linear(64, 32))
    checkpoint.save(plain, tmp_path / "with", stepped(plain, adam(plain)))
    checkpoint.save(plain, tmp_path / "without")
    for name in ("with", "without"):
        net = make()
        for optimizer in (adam(net), adam(wider())):  # the latter is not of this model at all
            with pytest.raises(CheckpointError, match=words):
                checkpoint.load(net, tmp_path / name, optimizer)


def test_what_an_optimizer_has_no_place_for_is_said_of_the_optimizer(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(64, 32))
    weight, bias = plain.parameters()
    groups = [stepped(plain, AdamW([weight])), stepped(plain, AdamW([bias]))]
    checkpoint.save(plain, tmp_path, groups)
    with pytest.raises(CheckpointError, match=r"tensors for which the optimizer has no place: optimizer\.state\.0\.b"):
        checkpoint.load(plain, tmp_path, groups[:1])


# ------------------------------------------------------------------------------------ a step without gradients


@pytest.mark.parametrize(
    "recipe", ["fp8-current", "nvfp4", RECIPES[1], "x=mxfp8(), w=nvfp4(stochastic=true), dy=mxfp8()"]
)
def test_a_step_without_gradients_changes_nothing(recipe: str) -> None:
    """As of any optimizer of torch: no decay, no state, and no weight is encoded anew of less than it was."""
    net = layer(recipe=recipe)
    optimizer = MasterWeights(AdamW(net.parameters(), weight_decay=0.5))
    weight = net[0].weight

    def everything() -> list[Tensor]:
        return [*codes(weight), *(as_bytes(t).clone() for t in (optimizer.masters[weight], net[0].bias))]

    before, state = everything(), copy.deepcopy(moments(optimizer))
    versions = weight._version, weight.row.data._version
    random = torch.get_rng_state()
    optimizer.step()
    assert equal(everything(), before)
    assert (weight._version, weight.row.data._version) == versions
    assert moments(optimizer) == state == []
    assert torch.equal(torch.get_rng_state(), random)
    stepped(net, optimizer)
    assert not torch.equal(everything()[0], before[0]), "with gradients it does"


def test_only_weights_with_a_gradient_are_encoded() -> None:
    torch.manual_seed(0)
    net = lpq.convert(nn.ModuleList(nn.Linear(64, 32) for _ in range(2)), RECIPES[1], weights="quantized")
    optimizer = MasterWeights(AdamW(net.parameters(), weight_decay=0.5))
    before = [codes(layer.weight) for layer in net]
    net[0](torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    after = [codes(layer.weight) for layer in net]
    assert not equal(after[0], before[0])
    assert equal(after[1], before[1])


def test_a_master_that_is_written_to_without_a_gradient_counts() -> None:
    class Shrinks(Optimizer):
        """It goes by no gradient."""

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.5)

    net = layer(recipe="fp8-current")
    optimizer = MasterWeights(Shrinks(net.parameters(), {}))
    before = net[0].weight.dequantize()
    optimizer.step()
    assert torch.equal(net[0].weight.dequantize(), before / 2)
