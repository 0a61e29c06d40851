"""lpq.hold_weights: which weights may be held, and what is refused of one that is changed meanwhile."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import lpq
from lpq.distributed import cast_master_weights, finish_gather
from lpq.optim import MasterWeights


def layer(recipe: str) -> lpq.nn.Linear:
    torch.manual_seed(3)
    return lpq.nn.Linear(64, 32, recipe=recipe)


def test_a_stored_weight_whose_format_remembers_is_held() -> None:
    module, x = layer("fp8-delayed"), torch.randn(4, 64)
    module.weight = nn.Parameter(module.recipe.w.quantize(module.weight.detach()))
    module(x)
    expected = module(x)
    with lpq.hold_weights(module):
        y = module(x)
        y.sum().backward()
    assert torch.equal(y, expected)
    assert not module.w_amax_history.any()  # nothing was measured of it


CHANGED = r"Linear\(64, 32\): the weight was changed while its encoded form is held, or has another format now"


def test_a_compiled_layer_whose_held_weight_was_changed_is_refused_on_leaving() -> None:
    torch._dynamo.reset()
    module, x = layer("fp8-current"), torch.randn(4, 64)
    compiled = torch.compile(module, backend="eager", fullgraph=True)

    def steps() -> None:
        with lpq.hold_weights(module), torch.no_grad():
            compiled(x)
            module.weight.mul_(2)
            compiled(x)  # which multiplies the weight as it was: what is compiled does not look

    with pytest.raises(RuntimeError, match=CHANGED):
        steps()
    assert torch.equal(compiled(x), module(x))  # it is held no more


def test_leaving_says_nothing_beside_another_error() -> None:
    module = layer("mxfp8")

    def fails() -> None:
        with lpq.hold_weights(module), torch.no_grad():
            module.weight.mul_(2)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(2),
        lambda weight: setattr(weight, "data", torch.randn(32, 64)),
        lambda weight: setattr(weight, "data", weight.data.bfloat16()),
        lambda weight: [setattr(weight, "data", torch.randn(32, 64)) for _ in range(2)],  # the first gives way
        lambda weight: setattr(weight, "data", torch.randn(64, 64)[32:]),
    ],
)
def test_a_weight_that_was_changed_is_refused_by_the_next_pass(change: Callable[[Any], object]) -> None:
    module = layer("mxfp8")
    passes = []

    def two() -> None:
        with lpq.hold_weights(module), torch.no_grad():
            for _ in range(2):
                passes.append(module(torch.randn(4, 64)))
                change(module.weight)

    with pytest.raises(RuntimeError, match=CHANGED):
        two()
    assert len(passes) == 1
    module(torch.randn(4, 64))  # it is held no more


def test_a_stored_weight_that_was_written_to_through_data_is_refused() -> None:
    module = lpq.convert(layer("mxfp8"), "mxfp8", weights="quantized")

    def passes() -> None:
        with lpq.hold_weights(module):
            module.weight.data.fill_(2)
            module(torch.randn(4, 64))
            pytest.fail("the pass must say it")

    with pytest.raises(RuntimeError, match=CHANGED):
        passes()


def test_copies_hold_nothing() -> None:
    """Nobody would release what they held."""
    module, x = layer("mxfp8"), torch.randn(4, 64)
    with lpq.hold_weights(module):
        copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        assert module.passes.held is not None
    for one in copies:
        assert one.passes.held is None
        with torch.no_grad():
            one.weight.mul_(-2)
        assert not torch.equal(one(x), module(x))


def test_weights_that_inference_mode_made_are_held() -> None:
    x = torch.randn(4, 64)
    with torch.inference_mode():
        module = layer("mxfp8")
        expected = module(x)
        with lpq.hold_weights(module):
            assert torch.equal(module(x), expected)


def test_inside_of_another_hold_weights_the_outer_one_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    from lpq.nn import linear, step

    model, x = nn.Sequential(layer("mxfp8"), nn.Linear(32, 64), layer("mxfp8")), torch.randn(4, 64)
    calls: list[Any] = []
    original, bind = linear.encode_operands, step.bind_encoder

    def encoder(wanted: Any) -> Any:
        made = bind(wanted)
        weight = wanted.shape == tuple(model[0].weight.shape)
        return made._replace(encode=lambda *a: ([calls.append(1)] if weight else [], made.encode(*a))[1])

    monkeypatch.setattr(linear, "encode_operands", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    monkeypatch.setattr(step, "bind_encoder", encoder)
    monkeypatch.setattr(linear, "bind_few", step.bind)
    with lpq.hold_weights(model[2]):
        for _ in range(2):
            with lpq.hold_weights(model):
                model(x)
        assert len(calls) == 3  # the last layer's once
        model(x)
        assert len(calls) == 4
    model(x)
    assert len(calls) == 6


def test_another_part_of_the_same_memory_is_another_weight() -> None:
    module, flat = layer("mxfp8"), torch.randn(64, 64)
    module.weight.data = flat[:32]

    def passes() -> None:
        with lpq.hold_weights(module):
            module.weight.data = flat[32:]
            module(torch.randn(4, 64))
            pytest.fail("the pass must say it")

    with pytest.raises(RuntimeError, match=CHANGED):
        passes()


@pytest.mark.parametrize("weights", [None, "high_precision", "quantized"])
@pytest.mark.parametrize("kind", ["fused", "foreach", "alone"])
def test_a_step_inside_is_refused_whatever_autograd_counts(weights: Any, kind: str) -> None:
    """Fused optimizers write to weights that stand in lists, and so do foreach ones to those that FSDP2 may shard."""
    layer = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "fp8-current", **({"weights": weights} if weights else {}))
    options = {kind: True} if kind != "alone" else {}
    optimizer: Any = torch.optim.AdamW(layer.parameters(), lr=1.0, **options)  # type: ignore[arg-type]
    optimizer = MasterWeights(optimizer, keep=False) if weights == "quantized" else optimizer
    x = torch.randn(8, 64)

    def step() -> None:
        with lpq.hold_weights(layer):
            layer(x).sum().backward()
            optimizer.step()
            layer(x)

    with pytest.raises(RuntimeError, match=r"changed while its encoded form is held"):
        step()
    with lpq.hold_weights(layer):  # other optimizers' steps concern it as little as weights without a gradient
        optimizer.zero_grad()
        optimizer.step()
        other = nn.Parameter(torch.ones(3))
        other.grad = torch.ones(3)
        torch.optim.SGD([other], lr=1.0).step()
        layer(x)


def test_a_cast_into_the_data_of_a_held_weight_is_refused() -> None:
    layer = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "fp8-current", weights="quantized")

    def cast() -> None:
        with lpq.hold_weights(layer):
            finish_gather(cast_master_weights([layer[0].weight.data], [torch.randn(4096) * 3], [0], None))
            layer(torch.randn(8, 64))

    with pytest.raises(RuntimeError, match=r"changed while its encoded form is held"):
        cast()


def test_what_is_no_module_is_refused_in_words() -> None:
    with (
        pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list: pass"),
        lpq.hold_weights([1]),
    ):  # type: ignore[arg-type]
        raise AssertionError


@pytest.mark.parametrize("computed", [lambda m: prune.l1_unstructured(m, "weight", 0.5), parametrizations.weight_norm])
def test_a_weight_that_is_computed_again_is_refused_in_words(computed: Callable[[Any], object]) -> None:
    module, x = layer("mxfp8"), torch.randn(4, 64)
    computed(module)
    expected = module(x)
    with (
        pytest.raises(RuntimeError, match=r"Linear\(64, 32\): its weight is computed again before each pass.*cached"),
        lpq.hold_weights(module),
    ):
        module(x)
    if computed is parametrizations.weight_norm:
        with parametrize.cached(), lpq.hold_weights(module):
            assert torch.equal(module(x), expected)
    assert torch.equal(module(x), expected)
