"""One all-reduce for all weights after an optimizer's step, whatever the optimizer does in the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import spawn
from sharded import How, batch, built
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, NAdam, Optimizer

import lpq
from lpq.core import QuantizedTensor
from lpq.observe import collectives
from lpq.optim import MasterWeights

RECIPES = ["fp8-current", "fp8-delayed", "nvfp4"]
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD, one write a weight": lambda p: SGD(p, lr=0.1, foreach=False),
    "AdamW, two writes a weight": lambda p: AdamW(p, lr=1e-2, weight_decay=0.5, foreach=False),
    "AdamW, two for all": lambda p: AdamW(p, lr=1e-2, weight_decay=0.5, foreach=True),
    "AdamW, one for all": lambda p: AdamW(p, lr=1e-2, weight_decay=0.5, fused=True),
    "NAdam, four writes a weight": lambda p: NAdam(p, lr=1e-2, weight_decay=0.5, foreach=False),
    "masters": lambda p: MasterWeights(AdamW(p, lr=1e-2, weight_decay=0.5)),
}


def _steps(how: How, make: Callable[[Any], Optimizer], rank: int) -> tuple[list[float], nn.Module]:
    net = built(how)
    optimizer = make(net.parameters())
    losses = []
    for number in range(3):
        x = batch(number, how)
        loss = (net(x) - x.roll(1, 0)).square().mean()
        loss.backward()
        losses.append(loss.item())
        with collectives() as seen:
            optimizer.step()
        if how.shard:
            reduced = [c.kind for c in seen]
            assert reduced == (["all_reduce"] if how.recipe != "mxfp8" else []), (how, make, reduced)
        optimizer.zero_grad()
    return losses, net


def _one_reduction_as_unsharded(rank: int) -> None:
    for recipe in [*RECIPES, "mxfp8"]:
        for name, make in OPTIMIZERS.items():
            how = How(recipe, weights="quantized", width=64, inner=128)
            losses, net = _steps(how, make, rank)
            alone, twin = _steps(replace(how, shard=False), make, rank)
            assert losses == alone, (recipe, name)
            for p, q in zip(net.parameters(), twin.parameters(), strict=True):
                rows = q.shape[0] // 2
                ours, theirs = p._local_tensor, q.detach()[rank * rows : (rank + 1) * rows]
                assert isinstance(ours, QuantizedTensor) == isinstance(theirs, QuantizedTensor)
                if isinstance(ours, QuantizedTensor):
                    assert ours.drafting is None
                    ours, theirs = ours.dequantize(torch.float32), theirs.dequantize(torch.float32)
                assert torch.equal(ours, theirs), (recipe, name)


def _mixed_with_masters(rank: int) -> None:
    """Stored weights and such as stay in high precision, under an optimizer that wraps another one."""
    how = How("nvfp4", weights="quantized", width=64, inner=16, ranks=2)
    net = built(how)  # 16 rows cannot be cut into blocks of 16 for two ranks
    stored = [isinstance(p._local_tensor, QuantizedTensor) for name, p in net.named_parameters() if p.dim() == 2]
    assert True in stored
    assert False in stored
    optimizer = MasterWeights(AdamW(net.parameters(), lr=1e-2))
    for number in range(2):
        net(batch(number, how)).square().mean().backward()
        with collectives() as seen:
            optimizer.step()
        assert [c.kind for c in seen] == ["all_reduce"]
        optimizer.zero_grad()


def test_stored_weights_are_reduced_once_a_step_by_any_optimizer() -> None:
    spawn(_one_reduction_as_unsharded, 2)


def test_one_reduction_where_only_some_weights_are_stored() -> None:
    spawn(_mixed_with_masters, 2)


def _layer(recipe: str = "fp8-current") -> lpq.nn.Linear:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(64, 32)), recipe, weights="quantized")[0]


def test_a_step_rounds_once() -> None:
    """AdamW's decay is too small to survive rounding by itself; a step rounds its sum with the update."""
    layer = _layer("mxfp8")
    before, gradient = layer.weight.dequantize(), torch.randn(32, 64)
    layer.weight.grad = gradient
    AdamW([layer.weight], lr=1e-2, weight_decay=0.5, foreach=False).step()
    ordinary = nn.Parameter(before.clone())
    ordinary.grad = gradient
    AdamW([ordinary], lr=1e-2, weight_decay=0.5, foreach=False).step()
    assert torch.equal(layer.weight.dequantize(), layer.weight.quantizer.quantize(ordinary.detach()).dequantize())
    decayed = layer.weight.quantizer.quantize(before * (1 - 5e-3)).dequantize()
    assert torch.equal(decayed, before)  # it would have been lost


class Reads(Optimizer):
    """Writes, and then does something else with the weight in the middle of a step."""

    def __init__(self, params: Any, read: Callable[[Tensor], Any]) -> None:
        super().__init__(params, {})
        self.read = read
        self.found: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (weight,) = self.param_groups[0]["params"]
        weight.mul_(0.3)
        self.found = self.read(weight)
        weight.add_(0.01)


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w.dequantize(),
        lambda w: w.detach().dequantize(),
        lambda w: w.clone().dequantize(),
        lambda w: w[:16].dequantize(),
        lambda w: w.view(-1).dequantize().view(w.shape),
        lambda w: w.t().dequantize().t(),
        lambda w: torch.cat([w, w]).dequantize(),
        lambda w: w.to(torch.bfloat16).float().dequantize(),
        lambda w: w + 0,
    ],
)
@pytest.mark.filterwarnings("ignore::lpq.core.tensor.PrecisionWarning")
def test_what_was_written_in_a_step_is_seen_in_it(read: Callable[[Tensor], Any]) -> None:
    layer = _layer()
    expected = layer.weight.dequantize() * 0.3
    optimizer = Reads([layer.weight], read)
    optimizer.step()
    found = optimizer.found[: expected.shape[0]]
    assert torch.allclose(found, expected[: found.shape[0]], rtol=0.07, atol=1e-3)
    assert torch.allclose(layer.weight.dequantize(), expected + 0.01, rtol=0.07, atol=2e-3)
    assert layer.weight.drafting is None


def test_a_step_that_fails_leaves_what_it_wrote() -> None:
    layer = _layer()
    before = layer.weight.dequantize()

    def fail(weight: Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Reads([layer.weight], fail).step()
    eye = torch.eye(64)
    written = layer.weight.quantizer.quantize(before * 0.3, col=False).dequantize()
    assert torch.equal(layer.weight.dequantize(), before * 0.3)  # not encoded yet
    layer(eye)
    assert torch.equal(layer.weight.dequantize(), written)


def test_a_weight_that_a_step_changed_is_noticed_by_backward() -> None:
    """Negative control: what is encoded after the step was counted when it was written."""
    layer = _layer("mxfp8")
    out = layer(torch.randn(8, 64, requires_grad=True))
    layer.weight.grad = torch.ones(32, 64)
    SGD([layer.weight], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_weight_of_no_conversion_is_written_at_once() -> None:
    weight = nn.Parameter(lpq.quantizer("fp8").quantize(torch.randn(32, 64)))
    found = []
    Reads([weight], lambda w: found.append(w.drafting)).step()
    assert found == [None]


def test_writes_outside_of_a_step_are_encoded_at_once() -> None:
    layer = _layer()
    with torch.no_grad():
        layer.weight.mul_(0.3)
    assert layer.weight.drafting is None
    decoded = layer.weight.dequantize()
    assert torch.equal(layer.weight.quantizer.quantize(decoded).dequantize(), decoded)


def test_the_same_of_a_copy_of_the_model() -> None:
    import copy

    net = nn.Sequential(_layer())
    twin = copy.deepcopy(net)
    for model in (net, twin):
        optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.5, foreach=False)
        for number in range(2):
            model(batch(number, How("", width=64))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(net[0].weight.dequantize(), twin[0].weight.dequantize())


@pytest.mark.filterwarnings("ignore::lpq.core.tensor.PrecisionWarning")
def test_adafactor_and_what_reads_the_weight() -> None:
    layer = _layer()
    layer.weight.grad = torch.randn(32, 64)
    before = layer.weight.dequantize()
    Adafactor([layer.weight], lr=1e-2).step()
    assert not torch.equal(before, layer.weight.dequantize())
