"""``lpq.observe.culprits``: which layer, product or operand brings the error into the gradients of a step.

The step is replayed with a part of the model in bf16. The culprit is the part that moves the gradients furthest towards
the gradients of the whole model in bf16. Layers are found by bisection: the half that moves them more is divided again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from lpq import recipes
from lpq.nn.first_argument import check_model, check_whole
from lpq.nn.names import plain_name
from lpq.nn.norm_groups import BeforeLayers
from lpq.nn.stateful_layer import StatefulLayer, stateful_layers
from lpq.nn.stepping import promote
from lpq.observe.course import Course
from lpq.observe.gradient_error import GradientError, OverRanks, Parts
from lpq.observe.readings import NumericsError, check_number
from lpq.observe.replay import Before, Closure, Replay, apart, gradient_norm
from lpq.observe.sharing import inside_of_replicas
from lpq.observe.sums import ITSELF
from lpq.recipes import Gemm, Recipe, RecipeError
from lpq.recipes.gemms import GEMMS, OPERANDS
from lpq.registry.showing import Readable, brief
from lpq.tensor import QuantizedTensor
from lpq.torch_private.tensors import local_part


@dataclass(frozen=True)
class Culprit:
    """A part of the model that was replayed in bf16."""

    layer: str
    part: str
    """A product, as ``wgrad``, or an operand, as ``wgrad.dy``; empty: the whole layer."""
    moved: float
    """How far that moves the gradients towards bf16's: 1 is all the way, 0 not at all. Where several layers each make
    them infinite or NaN, with the others in bf16."""
    recipe: Recipe
    """The recipe of the layer with this part in bf16."""

    @property
    def name(self) -> str:
        """The layer and the part."""
        return f"{self.layer or ITSELF} {self.part}".rstrip()


@dataclass(frozen=True)
class Culprits(Readable):
    """The culprits of a step; the first moves the gradients furthest."""

    found: tuple[Culprit, ...]
    """Whole layers."""
    parts: tuple[Culprit, ...]
    """Products of these layers, and operands of the product that moves them furthest."""
    error: float
    """The length of the error of the gradients over the length of the gradients of bf16."""
    loss: float
    """The mean over the ranks that share the model."""
    loss_in_bf16: float
    replays: bool | None
    """Whether the replay gave the gradients of the step to the bit; None: there were none to compare with, or they were
    added to ``main_grad``. A replay runs eagerly: it rounds otherwise in some places than a step that ran compiled."""
    off_in_bf16: str | None = None
    """Why the step is off its course in bf16 as well: then no layer was looked for. Without a course, the loss or the
    gradient norm is not finite in bf16. None: it is not so."""
    had_before: bool = False
    """Whether ``before=`` was given."""
    norm: float = math.nan
    """The norm of the replay's gradients, before anything is in bf16."""

    def promote(self, model: nn.Module, *, until: int) -> None:
        """Have rules of the model's policy give the layers in ``found`` to bf16 before a step; see
        ``lpq.nn.stepping.promote``. The loop calls ``lpq.set_step`` in each step."""
        check_whole("promote", 1, NumericsError, until=until)
        given, layers = self.promoted(model), stateful_layers(inside_of_replicas(model))
        for name in given:
            refuse_static(layers[name], f"at step {until}")
            stages = layers[name].model.stages
            if stages is not None and stages.was_set and until <= stages.step:
                raise NumericsError(
                    f"promote: until={until}: the model is at step {stages.step} already, so the rules would never "
                    "hold: give a later step, as lpq.set_step counts them"
                )
        promote(model, {layers[name]: recipe for name, recipe in given.items()}, until=until)

    def promoted(self, model: nn.Module) -> dict[str, Recipe]:
        """The recipes that ``promote`` gives layers: the layers in ``found``, and layers that remember the same inputs
        behind a norm that ``lpq.fuse`` joined to them. These begin afresh together, or could share no state then."""
        check_model(model)
        layers = stateful_layers(inside_of_replicas(model))
        for one in self.found:
            if one.layer not in layers:
                raise NumericsError(
                    f"promote: {type(model).__name__} has no layer {one.layer!r}, which was found: give the model "
                    "whose step was replayed"
                )
        recipes = {one.layer: one.recipe for one in self.found}
        norms = [one for one in model.modules() if isinstance(one, BeforeLayers)]
        norms += [norm for layer in layers.values() for norm in layer.passes.norms.values()]
        inputs = {layer: plan.x for layer in layers.values() if (plan := layer.passes.plan) and "x" in plan.moving}
        beside = {
            other
            for norm in norms
            for layer in {*norm.consumers} & inputs.keys() & {layers[name] for name in recipes}
            for other in {*norm.consumers} & inputs.keys()
            if inputs[other] == inputs[layer]
        }
        others = {name: layer.recipe for name, layer in layers.items() if layer in beside and name not in recipes}
        return recipes | {name: in_bf16(layers[name], own) for name, own in others.items() if own is not None}

    def __str__(self) -> str:
        """A table for people to read."""
        lines = [f"loss {self.loss:.6g}, in bf16 {self.loss_in_bf16:.6g}; error of the gradients {self.error:.3g}"]
        if self.replays is False:
            remedy = "" if self.had_before else "pass before=, made where the step began; "
            lines.append(
                f"the replay gave other gradients than the step: {remedy}bits differ where the step ran compiled, as a "
                "replay runs eagerly, or added to gradients from before it; where the closure takes another batch in "
                "each call, all numbers here are of batches and not of formats"
            )
        if self.off_in_bf16 is not None:
            in_words = "in bf16 the step is off its course as well: no layer's format is the cause"
            return "\n".join([*lines, f"{in_words} ({self.off_in_bf16})"])
        for one in self.found:
            lines.append(f"{one.moved:7.1%}  {one.layer or ITSELF}")
            lines += [f"{part.moved:7.1%}    {part.part}" for part in self.parts if part.layer == one.layer]
        return "\n".join(lines if self.found else [*lines, "no layer by itself moves the gradients towards bf16"])


def culprits(
    model: nn.Module,
    closure: Closure,
    *,
    before: Before | None = None,
    course: Course | None = None,
    most: int = 3,
    least: float = 0.1,
    replays: int = 64,
) -> Culprits:
    """Find the layers, products and operands that bring the error into the gradients of a step.

    Where ranks share the model all of them call this. Recipes, states, gradients and random bits are as before
    afterwards.

    Args:
        model: A converted model.
        closure: Runs forward and backward of the step's batch, without the optimizer, and returns the loss.
        before: The random bits and states before the step, ``lpq.observe.Before(model)``; None: the present ones.
        course: The course that the step left. Where the step is off it in bf16 as well, low precision is not the cause,
            and no layer is found.
        most: The most layers to find.
        least: How far a part must move the gradients to be looked into.
        replays: The most replays in the search for layers; thrice as many where gradients are not finite.
    """
    check_model(model)
    if not callable(closure):
        raise NumericsError(
            f"culprits: closure={brief(closure)}: it is a function that runs forward and backward of the step's batch, "
            "and returns the loss"
        )
    if not isinstance(before, Before | None):
        raise NumericsError(f"culprits: before={brief(before)}: it is lpq.observe.Before(model), or None")
    check_search("culprits", course, most=most, least=least, replays=replays)
    steps = {} if course is None else course.state_dict()  # a fact for each loss: where ranks differ, one is named
    given = [
        f"a course with {what} {x}" for what, one in steps.items() for x in (one if isinstance(one, list) else [one])
    ]
    ranks = OverRanks(model, [f"most={most}, least={least}, replays={replays}", *(given or ["no course"])])
    replay = Replay(model, closure, before)
    names = {id(m): plain_name(name) for name, m in inside_of_replicas(model).named_modules()}
    ours = [local_part(apart(p.grad)) for p in model.parameters() if p.requires_grad and p.grad is not None]
    if not replay.layers:
        raise NumericsError(f"{type(model).__name__} has no layer with a recipe of lpq: convert it first, lpq.convert")

    def alike(run: Sequence[Tensor]) -> bool:
        """Whether all ranks have the gradients of the step in this run, the last one."""
        there = [g for g, p in zip(run, replay.parameters, strict=True) if p.grad is not None]
        return ranks.sum([_differ(ours, there)]) == 0

    with replay.running():
        loss, base = replay.run({})
        if all(p.grad is None for p in replay.parameters):
            raise NumericsError("culprits: the closure left no gradient: it runs backward, too, as loss.backward()")
        same = None
        if ranks.sum([torch.tensor(float(not ours or bool(replay.in_main_grad)))]) == 0 and not (same := alike(base)):
            replay.aligns = False  # fused layers may have run as one
            again = replay.run({})
            same = alike(again[1])
            replay.aligns = replay.draws or not same
            loss, base = (loss, base) if replay.aligns else again
        norm = ranks.mean(float(gradient_norm(model)))
        whole = {layer: in_bf16(layer, recipe) for layer, recipe in replay.layers.items()}
        error = GradientError(ranks, [replay], whole)
        start, loss = error.between([base]), ranks.mean(loss)
        norm_in_bf16, off = ranks.mean(float(gradient_norm(model))), None
        if course is not None:
            off = course.why_as_well((loss, norm), (error.loss, norm_in_bf16))
        elif not (math.isfinite(error.loss) and math.isfinite(norm_in_bf16)):
            off = f"the loss is {error.loss:.4g}, the gradient norm {norm_in_bf16:.4g}"

        def moved(part: Parts) -> float:
            now = error.of(part)
            if math.isinf(start):
                others = {layer: recipe for layer, recipe in whole.items() if layer not in part}
                if math.isinf(now) and math.isinf(error.of(others)):  # others make them infinite, too
                    now = error.of({**whole, **part})
                return 1 / (1 + now)
            return 1 - now / start if start and math.isfinite(now) else 0.0

        search = _Search(moved, whole, most, least, replays)
        layers = search.layers([*whole]) if start and off is None else []
        layer_culprits = [Culprit(names[id(layer)], "", how, whole[layer]) for layer, how in layers]
        parts = [
            Culprit(names[id(layer)], part, how, recipe)
            for layer, _ in layers
            for part, how, recipe in _parts(layer, replay.layers[layer], moved)
        ]
    return Culprits(tuple(layer_culprits), tuple(parts), start, loss, error.loss, same, off, before is not None, norm)


def refuse_static(layer: StatefulLayer, then: str) -> None:
    """Raise an error for a layer that no promotion may end for. ``then``: when it would."""
    if layer.static_values():
        raise NumericsError(
            f"promote: {layer.title} has static scales, which it would not have any more {then}: leave it in bf16, or "
            "calibrate the model again by lpq.calibrate"
        )


def check_search(owner: str, course: object, *, most: object, least: object, replays: object) -> None:
    """Refuse what ``culprits`` does not take; ``owner`` names what got it."""
    if not isinstance(course, Course | None):
        raise NumericsError(f"{owner}: course={brief(course)}: it is an lpq.observe.Course, or None")
    check_whole(owner, 1, NumericsError, most=most, replays=replays)
    check_number(owner, 1.0, least=least)


def _differ(ours: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """1 where gradients are not equal to the bit."""
    alike = len(ours) == len(others) and all(
        a.shape == b.shape
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(0, math.inf, -math.inf), b.nan_to_num(0, math.inf, -math.inf))
        for a, b in zip(ours, others, strict=False)
    )
    return torch.tensor(0.0 if alike else 1.0)


class _Search:
    """Bisection of the layers: what moves the gradients further is divided first."""

    def __init__(self, moved: Callable[[Parts], float], whole: Parts, most: int, least: float, replays: int) -> None:
        self._moved, self._whole, self._most, self._least, self._budget = moved, whole, most, least, replays

    def layers(self, every: list[StatefulLayer]) -> list[tuple[StatefulLayer, float]]:
        """Return layers, and how far each moves the gradients, the furthest first."""
        order = count()
        heap: list[tuple[float, int, list[StatefulLayer]]] = [(-1.0, next(order), every)]
        culprits: list[tuple[StatefulLayer, float]] = []
        while heap and len(culprits) < self._most and self._budget > 0:
            how, _, group = heapq.heappop(heap)
            if -how < self._least:
                break
            if len(group) == 1:
                culprits.append((group[0], -how))
                continue
            middle = len(group) // 2
            for half in (group[:middle], group[middle:]):
                self._budget -= 1
                heapq.heappush(heap, (-self._moved({x: self._whole[x] for x in half}), next(order), half))
        return sorted(culprits, key=lambda one: -one[1])


def in_bf16(layer: StatefulLayer, recipe: Recipe) -> Recipe:
    """The recipe of a layer that is in bf16, but for a weight that is stored quantized. Where it is rotated, what is
    multiplied by it stays, too, as bf16 is not rotated."""
    exact = recipes.recipe("bf16")
    if not isinstance(local_part(layer.shared_weight()), QuantizedTensor):
        return exact
    rotated = {o.gemm for o, q in recipe.operands.items() if o.tensor == "w" and q.side(o.side).basis is not None}
    stay = {o: q for o, q in recipe.operands.items() if o.tensor == "w" or o.gemm in rotated}
    return _with(recipe, {**exact.operands, **stay})


def _with(recipe: Recipe, operands: Mapping[Any, Any]) -> Recipe:
    """The recipe with these quantizers of its operands."""
    pairs = zip(OPERANDS[::2], OPERANDS[1::2], strict=True)
    gemms = {a.gemm: Gemm(operands[a], operands[b], recipe.gemm(a.gemm).fast_accumulate) for a, b in pairs}
    return replace(recipe, name=None, fprop=gemms["fprop"], dgrad=gemms["dgrad"], wgrad=gemms["wgrad"])


def _parts(
    layer: StatefulLayer, recipe: Recipe, moved: Callable[[Parts], float]
) -> Iterator[tuple[str, float, Recipe]]:
    """The products of a layer, and then the operands of the one that moves the gradients furthest. Parts that no
    recipe may have, as one of two rotated operands, are left out."""
    exact = in_bf16(layer, recipe).operands
    best = -math.inf, ""
    for product in GEMMS:
        if (other := _replaced(recipe, exact, product)) is not None:
            how = moved({layer: other})
            best = max(best, (how, product))
            yield product, how, other
    for operand in OPERANDS:
        if operand.gemm == best[1] and (other := _replaced(recipe, exact, str(operand))) is not None:
            yield str(operand), moved({layer: other}), other


def _replaced(recipe: Recipe, exact: Mapping[Any, Any], part: str) -> Recipe | None:
    """The recipe with one part in bf16; None if that changes nothing, or if no recipe may have it."""
    operands = {o: exact[o] if o.belongs_to(part) else q for o, q in recipe.operands.items()}
    if operands == dict(recipe.operands):
        return None
    try:
        return _with(recipe, operands)
    except RecipeError:
        return None
