"""A tensor that several layers are given is encoded once, and each gets what it would have encoded by itself."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from counting import encodings, kept_for_backward
from support.comparing import equal
from support.passes import (
    Run,
    autocast,
    compiled,
    evaluated,
    inferred,
    offloaded,
    plainly,
    recomputed,
    reentrant,
    step,
    within,
)
from support.small_models import Siblings
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lpq
from lpq.nn.linear import Layer
from lpq.nn.siblings import MOST, SharedInputs
from lpq.operations.encoder import EncoderSpec

ROWS, WIDTH, OUT = 48, 64, (96, 32, 32)
RECIPES = ("fp8-current", "fp8-row", "mxfp8", "nvfp4", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", "mxfp8-fwd-bf16-bwd")


def three(
    recipe: Any = "mxfp8",
    between: Callable[[Tensor], Any] = lambda x: None,
    outs: tuple[int, ...] = OUT,
    **options: Any,
) -> Any:
    torch.manual_seed(1)
    model: Any = lpq.convert(Siblings(WIDTH, *outs, bias=False), recipe, **options)
    model.between = between
    return model


def alone(model: Any) -> Any:
    """The same, with layers that share nothing."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.join(replace(module.model, inputs=SharedInputs()))
    return model


def given(seed: int = 2) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def numbers(model: Any, run: Run = plainly, x: Tensor | None = None) -> list[Tensor | None]:
    """A step of the model, which gets a tensor that is no leaf, unless it is given one."""
    return step(model, given(), lambda model, leaf: run(model, leaf * 2 if x is None else x))


def of_x(seen: list[EncoderSpec]) -> list[tuple[bool, bool]]:
    """For each encoding of an input whether the row and the column operand were made. Those of dy are of its width."""
    return [(w.row, w.col) for w in seen if w.shape == (ROWS, WIDTH) and w.row]


@pytest.mark.parametrize("recipe", RECIPES)
def test_three_layers_encode_their_input_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = encodings(monkeypatch)
    together = three(recipe)
    with torch.no_grad():
        together(given())
    assert of_x(seen) == [(True, False)]
    seen.clear()
    y, bytes_together = kept_for_backward(lambda: together(given()))
    assert of_x(seen) == [(True, True)]
    seen.clear()
    z, bytes_apart = kept_for_backward(lambda: alone(three(recipe))(given()))
    assert of_x(seen) == [(True, True)] * 3
    assert torch.equal(y, z)
    assert equal(numbers(together), numbers(alone(three(recipe))))
    x = together.q.recipe.x.quantize(given()).col
    of_col = sum(t.untyped_storage().nbytes() for t in x.row_major().tensors())
    assert bytes_apart - bytes_together == 2 * of_col


def unseen(x: Tensor) -> None:
    x.data.mul_(2)


def counted(x: Tensor) -> None:
    unseen(x)
    torch.autograd.graph.increment_version(x)


def replaced(x: Tensor) -> None:
    version = x._version
    x.data = x.detach() * 3
    assert x._version == version


@pytest.mark.parametrize(
    ("write", "noticed"),
    [
        (lambda x: x.mul_(2), True), (lambda x: x.view(-1)[:WIDTH].zero_(), True), (replaced, True),
        (unseen, False), (counted, True),
    ],
    ids=["doubled", "through a view", "other memory", "that autograd does not count", "the way out of the page"],
)  # fmt: skip
def test_a_write_between_two_layers_is_noticed(write: Callable[[Tensor], Any], noticed: bool) -> None:
    """One that autograd does not count is not: so these would fail if writes were not looked at."""
    assert equal(numbers(three(between=write)), numbers(alone(three(between=write)))) == noticed


@pytest.mark.parametrize("recipe", ["fp8-current", "x=mxfp8, w=mxfp8, dy=nvfp4(stochastic=true)"])
def test_a_write_between_two_layers_is_noticed_when_compiled(recipe: str) -> None:
    """A compiler makes the column operand later, of what the input was when the first layer got it."""
    two = partial(three, recipe, outs=OUT[:2])  # each takes a compiler half a second
    written = numbers(two(lambda x: x.mul_(2)), compiled)
    assert equal(numbers(two(lambda x: x.mul_(2))), written)
    assert not equal(written, numbers(two()))


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8"])
def test_between_two_passes_it_may_be_written_to_in_any_way(recipe: str) -> None:
    """As a program does that fills one batch again and again through numpy, or from another process."""
    rules = [{"match": "q", "recipe": "fp8-row"}, {"match": "*", "recipe": recipe}]
    for made in (recipe, {"rules": rules}):
        model, apart, memory = three(made), alone(three(made)), given().detach().numpy()
        x = torch.from_numpy(memory)
        for number in range(3):
            version = x._version
            memory[:] = given(number).detach().numpy()
            assert x._version == version
            with torch.no_grad():
                assert torch.equal(model(x), apart(x.clone()))
        memory[:] = given(7).detach().numpy()
        assert equal(numbers(model, x=x), numbers(apart, x=x.clone()))


def rules(k: str, others: str) -> Any:
    return {"rules": [{"match": "k", "recipe": k}, {"match": "*", "recipe": others}]}


def hooked() -> Any:
    model = three()
    model.k.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


def made_by_hand() -> Any:
    model = three()
    for name in "qkv":
        layer = lpq.nn.Linear(WIDTH, getattr(model, name).out_features, bias=False, recipe="mxfp8")
        layer.weight = getattr(model, name).weight
        setattr(model, name, layer)
    return model


DERIVED = "x=hybrid(row=nvfp4, col=mxfp8, col_source=row), w=mxfp8(), dy=mxfp8()"
APART: dict[str, tuple[Callable[[], Any], int]] = {
    "random bits": (lambda: three("x=nvfp4(stochastic=true), w=mxfp8(), dy=mxfp8()"), 3),
    "states": (lambda: three("fp8-delayed"), 3),
    "two formats": (lambda: three(rules("fp8-current", "mxfp8")), 2),
    "a hook": (hooked, 2),
    "derived and not": (lambda: three(rules(DERIVED, DERIVED.replace(", col_source=row", ""))), 2),
    "made by hand": (made_by_hand, 3),
}


@pytest.mark.parametrize("case", APART)
def test_only_the_same_is_shared(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, (made, count) = encodings(monkeypatch), APART[case]
    found = numbers(made())
    assert len(of_x(seen)) == count
    assert equal(found, numbers(alone(made())))


@pytest.mark.parametrize(
    ("frozen", "made"),
    [("q", [(True, False), (True, True)]), ("k", [(True, True)]), ("qk", [(True, False), (True, True)]),
     ("qkv", [(True, False)])],
)  # fmt: skip
def test_a_frozen_layer_takes_part(frozen: str, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no column operand: what one of the others made serves it, and not the other way round."""
    seen = encodings(monkeypatch)
    models = three(), alone(three())
    for model in models:
        for name in frozen:
            getattr(model, name).weight.requires_grad_(False)
    found = numbers(models[0])
    assert of_x(seen) == made
    assert equal(found, numbers(models[1]))


def counted_operators(model: Any, x: Tensor) -> Tensor:
    """An operand made before a mode watches would be a constant to a tracer."""
    return within(lambda: FlopCounterMode(display=False), model, x)


ONCE, TWICE = [(True, True)], [(True, False), (True, True)]
WAYS: dict[str, tuple[Run, list[tuple[bool, bool]]]] = {
    "autocast": (autocast, ONCE), "reentrant": (reentrant, TWICE), "recomputed": (recomputed, ONCE * 2),
    "in a region": (lambda model, x: recomputed(lambda x: model(x * 2), x), ONCE * 2), "offloaded": (offloaded, ONCE),
    "evaluated": (evaluated, TWICE[:1]),
    "inferred": (lambda model, x: inferred(lambda x: model(x * 2), x), TWICE[:1] * 3),  # PyTorch counts no writes
}  # fmt: skip


@pytest.mark.parametrize(("way", "recipe"), [*zip(WAYS, cycle(["nvfp4", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16"]))])
def test_ways_to_run(recipe: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, (run, made) = encodings(monkeypatch), WAYS[way]
    found = numbers(three(recipe), run)
    assert of_x(seen) == made
    assert equal(found, numbers(alone(three(recipe)), run))
    assert equal(found, numbers(three(recipe), run))


@pytest.mark.parametrize("x", ["fp8()", "mxfp8", "hybrid(row=identity, col=fp8)", "hybrid(row=fp8, col=identity)"])
def test_an_input_that_is_kept_in_place_of_its_operand(x: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers keep as many tensors whether they encoded it or found it. Activation checkpointing counts them: here
    the second layer encodes it in forward, and finds it when forward runs again."""

    def before_a_product(model: Any, x: Tensor) -> Tensor:
        times = iter("once")
        model.between = lambda x: model.q.model.inputs.clear() if next(times) == "o" else None
        return recomputed(lambda x: nn.functional.silu(model(x)), x)

    def without(model: Any, x: Tensor) -> Tensor:
        return nn.functional.silu(model(x))

    seen, recipe = encodings(monkeypatch), f"x={x}, w=mxfp8(), dy=mxfp8()"
    found = numbers(three(f"{recipe}, x.save=input"), before_a_product)
    assert [w for w in of_x(seen) if w[0]] == [(True, False)] * 3
    assert equal(found, numbers(three(f"{recipe}, x.save=input"), without))
    assert equal(found, numbers(alone(three(recipe)), without))


def test_what_a_mode_watches_is_not_shared() -> None:
    assert equal(numbers(three(), counted_operators), numbers(three()))


class Weight(Tensor):
    """A class that is not PyTorch's own, for which nothing is bound."""


def test_operators_share_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = encodings(monkeypatch)
    model = three()
    for name in "qkv":
        layer = getattr(model, name)
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Weight))
    found = numbers(model)
    assert model.q.passes.calls[1] == {}
    assert of_x(seen) == [(True, True)]
    assert equal(found, numbers(three()))


# ------------------------------------------------------------------------------------------ how long it is kept


def inputs_of(model: Siblings) -> SharedInputs:
    inputs = model.q.model.inputs
    assert inputs is not None
    return inputs


def buffers_of(model: Siblings) -> tuple[list[weakref.ref[Tensor]], list[weakref.ref[Tensor]]]:
    """Return references to the row and the column buffers of the input that was encoded last."""
    *_, (row, col) = [*inputs_of(model).values()][-1].value
    return [weakref.ref(t) for t in row], [weakref.ref(t) for t in col]


def dead(references: list[weakref.ref[Tensor]]) -> bool:
    return all(reference() is None for reference in references)


def test_the_operands_die_with_the_tensor_and_the_graph() -> None:
    model = three()
    x = given() * 2
    y = model(x)
    row, col = buffers_of(model)
    del x
    assert inputs_of(model) == {}
    assert dead(row)
    assert not any(map(dead, ([c] for c in col)))
    y.sum().backward()
    del y
    assert dead(col)


@pytest.mark.parametrize("recipe", ["mxfp8", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", "mxfp8-fwd-bf16-bwd"])
def test_the_tensor_is_not_kept_alive(recipe: str) -> None:
    """Nor by the operand of a format that is a view of it."""
    model = three(recipe)
    with torch.no_grad():
        x = given() * 2
        model(x)
    gone = weakref.ref(x)
    row, _ = buffers_of(model)
    del x
    assert dead([gone, *row])


def test_nothing_is_kept_after_backward_of_a_tensor_that_lives() -> None:
    model, x = three(), given()
    y = model(x)
    row, col = buffers_of(model)
    y.sum().backward()
    del y
    assert dead(row + col)


def test_few_inputs_are_kept_that_live() -> None:
    """As where autograd keeps them for a layer that is not converted."""
    model, xs = three(), [given(seed) * 2 for seed in range(5)]
    ys, rows = [], []
    for x in xs:
        ys.append(model(x))
        rows.append(buffers_of(model)[0])
    assert [dead(row) for row in rows] == [True] * (len(xs) - MOST) + [False] * MOST


def test_siblings_with_another_layer_between_them_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """As low-rank projections have."""
    seen = encodings(monkeypatch)
    model, other, kept = three(), given(5) * 2, []
    model.between = lambda x: kept.append(model.v(other))
    model(given())
    assert len(of_x(seen)) == 2


def test_copies_share_among_themselves() -> None:
    model = three()
    model(given())
    for made in (copy.deepcopy(model.double().float()), pickle.loads(pickle.dumps([model.q, model.k]))):
        layers = [m for m in (made if isinstance(made, list) else made.modules()) if isinstance(m, Layer)]
        assert len({id(layer.model.inputs) for layer in layers}) == 1
        assert layers[0].model.inputs == {}
        assert layers[0].model.inputs is not model.q.model.inputs


# ------------------------------------------------------------------------------------------ static inputs

STATIC = (
    "x=fp8(static=true), w=fp8(static=true), dy=fp8(dtype=e5m2)",
    "x=nvfp4(rht=true, static=true), w=nvfp4, dy=nvfp4(rht=true)",
    "fprop=nvfp4(static=true), dgrad=mxfp8, wgrad=fp8(static=true)",
    "x=fp8(static=true), w=fp8(static=true), dy=fp8(dtype=e5m2), x.save=input",
)


def calibrated(recipe: str, **own: float) -> Siblings:
    """Layers with one scale of their inputs, but for those that are named."""
    model = three(recipe)
    for name in "qkv":
        layer = getattr(model, name)
        for key, value in layer.static_values().items():
            value.fill_(own.get(name, 3.0) if key.startswith("x") else 0.25)
        layer.passes.forget()
    return model


@pytest.mark.parametrize("recipe", STATIC)
def test_static_inputs_with_one_scale_are_encoded_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: with another scale a layer encodes its input by itself, and to other bits."""
    seen = encodings(monkeypatch)
    found = {}
    for own, count in (({}, 1), ({"k": 1.0}, 2)):
        found[count] = numbers(calibrated(recipe, **own))
        assert len([w for w in of_x(seen) if w[0]]) == count
        assert equal(found[count], numbers(alone(calibrated(recipe, **own))))
        seen.clear()
    assert not equal(found[1], found[2])


@pytest.mark.parametrize("way", ["in place", "anew", "loaded"])
def test_static_values_that_change_are_noticed(way: str) -> None:
    models = calibrated(STATIC[0]), alone(calibrated(STATIC[0]))
    before = [numbers(model) for model in models]
    for model in models:
        if way == "in place":
            model.k.x_amax.fill_(1.0)
        elif way == "anew":
            model.k.x_amax = torch.ones_like(model.k.x_amax)
        else:
            model.load_state_dict(calibrated(STATIC[0], k=1.0).state_dict())
        model.zero_grad()
    after = [numbers(model) for model in models]
    assert equal(*before)
    assert equal(*after)
    assert not equal(before[0], after[0])


def test_static_values_that_change_under_inference_mode_are_noticed() -> None:
    """torch counts no writes to tensors that were made there."""
    found, x = [], given().detach()
    with torch.inference_mode():
        model = calibrated(STATIC[0])
    for value in (3.0, 1.0):
        with torch.inference_mode():
            model.k.x_amax.fill_(value)
        with torch.no_grad():
            model.q(x)
            found.append(model.k(x))
            assert torch.equal(found[-1], model.k(x.clone()))
    assert not torch.equal(*found)
