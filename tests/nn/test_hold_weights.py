"""lpq.hold_weights: which weights may be held, and what is refused of one that is changed meanwhile."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from counting import encodings
from support.small_models import converted
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import lpq
from lpq.distributed import cast_master_weights, finish_gather
from lpq.nn import linear
from lpq.optim import MasterWeights

CHANGED = r"Linear\(64, 32\): the weight was changed while its encoded form is held, or has another (format|now)"


def layer(recipe: str = "mxfp8", **how: Any) -> Any:
    return converted(recipe, 64, 32, **how)[0]


def x() -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def refused(module: Any, inside: Callable[[], object], run: Any = None) -> None:
    """Change the weight between two passes, of which the second is refused: only the first one is run."""
    passes = []

    def two() -> None:
        with lpq.hold_weights(module):
            for _ in range(2):
                passes.append((run or module)(x()))
                inside()

    with pytest.raises(RuntimeError, match=CHANGED):
        two()
    assert len(passes) == 1


def test_a_stored_weight_whose_format_remembers_is_held() -> None:
    module = layer("fp8-delayed")
    module.weight = nn.Parameter(module.recipe.w.quantize(module.weight.detach()))
    module(x())
    expected = module(x())
    with lpq.hold_weights(module):
        y = module(x())
        y.sum().backward()
    assert torch.equal(y, expected)
    assert not module.w_amax_history.any()  # nothing was measured of it


def test_observers_see_a_held_weight_as_it_was_encoded() -> None:
    """Its state moves when it is released, once for all passes."""
    module, seen = layer("fp8-delayed"), list[Any]()

    class Take:
        def observe(self, one: Any) -> None:
            seen.extend(one.decoded() if one.name == "w" else ())

    with lpq.hold_weights(module):
        held, side = module.held_weight(), module.recipe.w.side("row")
        for _ in range(2):
            with lpq.observe.observing(module, Take()):
                module(x()).sum().backward()
        row = side.storage.from_tensors([*held.row], side, (32, 64), torch.float32).decode()
        assert [torch.equal(seen[i], row) for i in (0, 2)] == [True, True]
    assert module.w_amax_history.count_nonzero() == 1


def test_a_compiled_layer_whose_held_weight_was_changed_is_refused_on_leaving() -> None:
    torch._dynamo.reset()
    module = layer("fp8-current")
    compiled = torch.compile(module, backend="eager", fullgraph=True)

    def steps() -> None:
        with lpq.hold_weights(module), torch.no_grad():
            compiled(x())
            module.weight.mul_(2)
            compiled(x())  # which multiplies the weight as it was: what is compiled does not look

    with pytest.raises(RuntimeError, match=CHANGED):
        steps()
    assert torch.equal(compiled(x()), module(x()))  # it is held no more


def test_leaving_says_nothing_beside_another_error() -> None:
    module = layer()
    with pytest.raises(KeyError, match="mine"), lpq.hold_weights(module), torch.no_grad():  # noqa: PT012
        module.weight.mul_(2)
        raise KeyError("mine")


FLAT = torch.randn(64, 64)
CHANGES: dict[str, Callable[[Any], object]] = {
    "written to": lambda m: m.weight.data.mul_(2),
    "other data": lambda m: setattr(m.weight, "data", torch.randn(32, 64)),
    "another dtype": lambda m: setattr(m.weight, "data", m.weight.data.bfloat16()),
    "the first gives way": lambda m: [setattr(m.weight, "data", torch.randn(32, 64)) for _ in range(2)],
    "another part of memory": lambda m: setattr(m.weight, "data", FLAT[32:]),
    "another recipe": lambda m: setattr(m, "recipe", "nvfp4"),
    "another parameter": lambda m: setattr(m, "weight", nn.Parameter(torch.randn(32, 64))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_was_changed_is_refused_by_the_next_pass(change: str) -> None:
    module = layer()
    module.weight.data = FLAT[:32]
    with torch.no_grad():
        if change == "written to":
            refused(module, lambda: module.weight.mul_(2))
        else:
            refused(module, lambda: CHANGES[change](module))
    module(x().to(module.weight.dtype))  # it is held no more


def test_what_changes_nothing_of_the_held_weight_is_let_through() -> None:
    """Another recipe may have the weight in the same format, or none."""
    module = layer("fp8-current")
    with lpq.hold_weights(module):
        for recipe in ("fp8-current", "x=mxfp8(), w=fp8(), dy=mxfp8()", None):
            module.recipe = recipe
            y = module(x())
    assert torch.equal(y, nn.functional.linear(x(), module.weight, module.bias))


def test_stored_weights_that_are_written_to_through_data_are_refused() -> None:
    module = layer(weights="quantized")
    refused(module, lambda: module.weight.data.fill_(2))
    weight = (module := layer("fp8-current", weights="quantized")).weight.data
    refused(module, lambda: finish_gather(cast_master_weights([weight], [torch.randn(2048) * 3], [0], None)))


def test_copies_hold_nothing() -> None:
    """Nobody would release what they held."""
    module = layer()
    with lpq.hold_weights(module):
        copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        assert module.passes.held_weight is not None
    for one in copies:
        assert one.passes.held_weight is None
        with torch.no_grad():
            one.weight.mul_(-2)
        assert not torch.equal(one(x()), module(x()))


@pytest.mark.parametrize("weights", [None, "high_precision", "quantized"])
def test_weights_that_inference_mode_made_are_held(weights: Any) -> None:
    with torch.inference_mode():
        module = layer(weights=weights)
        expected = module(x())
        with lpq.hold_weights(module):
            assert torch.equal(module(x()), expected)
        if weights is not None:  # else nothing counts the write
            refused(module, module.weight.zero_)


def test_what_is_held_under_inference_mode_serves_training() -> None:
    once, again = layer(), layer()
    with ExitStack() as held:
        with torch.inference_mode():
            held.enter_context(lpq.hold_weights(once))
        for module in (once, again):
            module(x().requires_grad_()).square().sum().backward()
    assert torch.equal(once.weight.grad, again.weight.grad)


def test_inside_of_another_hold_weights_the_outer_one_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    original, made = linear.encode_operands, encodings(monkeypatch)
    monkeypatch.setattr(linear, "encode_operands", lambda *a, **k: (held.append(1), original(*a, **k))[1])
    model = converted("mxfp8", 64, 96, 64)

    def calls() -> int:
        return len(held) + sum(wanted.shape in ((96, 64), (64, 96)) for wanted in made if wanted.row)

    with torch.no_grad():
        with lpq.hold_weights(model[1]):
            for _ in range(2):
                with lpq.hold_weights(model):
                    model(x())
            assert calls() == 3  # the last layer's once
            model(x())
            assert calls() == 4
        model(x())
        assert calls() == 6


@pytest.mark.parametrize("weights", [None, "high_precision", "quantized"])
@pytest.mark.parametrize("kind", ["fused", "foreach", "alone"])
def test_a_step_inside_is_refused_whatever_autograd_counts(weights: Any, kind: str) -> None:
    """Fused optimizers write to weights that stand in lists, and so do foreach ones to those that FSDP2 may shard."""
    module = layer("fp8-current", weights=weights)
    optimizer: Any = torch.optim.AdamW(module.parameters(), lr=1.0, **({kind: True} if kind != "alone" else {}))
    optimizer = MasterWeights(optimizer, keep=False) if weights == "quantized" else optimizer
    refused(module, optimizer.step, lambda x: module(x).sum().backward())
    with lpq.hold_weights(module):  # other optimizers' steps concern it as little as weights without a gradient
        optimizer.zero_grad()
        optimizer.step()
        other = nn.Parameter(torch.ones(3))
        other.grad = torch.ones(3)
        torch.optim.SGD([other], lr=1.0).step()
        module(x())


@pytest.mark.parametrize("computed", [lambda m: prune.l1_unstructured(m, "weight", 0.5), parametrizations.weight_norm])
def test_a_weight_that_is_computed_again_is_refused_in_words(computed: Callable[[Any], object]) -> None:
    module = layer()
    computed(module)
    expected = module(x())
    words = r"Linear\(64, 32\): its weight is computed again before each pass.*cached"
    with pytest.raises(RuntimeError, match=words), lpq.hold_weights(module):
        module(x())
    if computed is parametrizations.weight_norm:
        with parametrize.cached(), lpq.hold_weights(module):
            assert torch.equal(module(x()), expected)
    assert torch.equal(module(x()), expected)
