"""``lpq.search``: which product of which layer gets which recipe, under a budget of time or of error.

The error is measured: each product of each layer is run by each recipe with all else in bf16, and the gradients are
compared with bf16's. The time is predicted, as by ``lpq advise``. Errors of different products are taken to be
independent, so their squares add up; the policy that is found is replayed as a whole to see.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import nn

from lpq import recipes as recipes_of
from lpq.bench.gpus import GPUS, key_of, predicted
from lpq.bench.knapsack import ROUNDING, Option, under_error, under_time
from lpq.bench.layers import LayerSize
from lpq.bench.searched_layers import Rows, StackShape, searched_layers
from lpq.files.outputs import writable
from lpq.nn.conversion import convert
from lpq.nn.conversion_plan import rule_names
from lpq.nn.first_argument import check_model, check_whole
from lpq.nn.observing import observing
from lpq.nn.restoring import restore
from lpq.nn.stateful_layer import StatefulLayer, stateful_layers
from lpq.observe.gradient_error import GradientError, OverRanks, Parts
from lpq.observe.readings import NumericsError, check_forgets, is_number
from lpq.observe.replay import Before, Closure, Replay
from lpq.observe.sharing import inside_of_replicas
from lpq.observe.sums import ITSELF
from lpq.recipes import Policy, Recipe, RecipeError, Rule
from lpq.recipes.gemms import GEMMS, Gemm
from lpq.recipes.globs import exactly
from lpq.registry.errors import OptionError, suggestion
from lpq.registry.showing import Readable, brief, listed
from lpq.registry.tables import drawn
from lpq.tensor import QuantizedTensor
from lpq.torch_private.tensors import local_part

BF16 = "bf16"
SAME = 0.01
"""The error by which gradients may differ between two runs of a batch, as a GPU may add in another order."""
USUAL = ("mxfp8", "nvfp4")
COLUMNS = ("layer", *GEMMS, "times as fast", "error")
Seconds = Callable[[str, Recipe | None], float]
"""The seconds of a step of the layer with this name by a recipe; None: as the layer is without lpq."""
Times = Mapping[tuple[str, ...], float]
"""The seconds of a layer by the recipes that fprop, dgrad and wgrad are taken from."""
Shapes = Mapping[str, Sequence[StackShape]]
Clock = Callable[[Shapes, Replay, Parts], Seconds]
"""Returns the seconds of the layers of these shapes. It takes a replay, and the recipes with which that is exact."""


@dataclass(frozen=True)
class Uniform:
    """A recipe for all layers, beside the choice."""

    recipe: str
    seconds: float
    predicted_error: float
    error: float


@dataclass(frozen=True)
class SearchResult(Readable):
    """The choice of ``lpq.search``."""

    choices: Mapping[str, Option]
    """The recipe of each layer, by its name."""
    plain: Mapping[str, float]
    """The seconds of each layer without a recipe."""
    predicted_error: float
    """The error of the gradients if the errors of all products are independent."""
    error: float
    """The error of the gradients with the policy, replayed: its length over the length of bf16's gradients."""
    uniform: tuple[Uniform, ...]
    """The recipes that were looked at, each for all layers."""
    names: Mapping[str, Sequence[str]]
    """All names of each layer: a module may be in several places of the model."""
    without_error: Sequence[str] = ()
    """The products, as ``fprop of 0``, in which no recipe makes an error, so that none saves time for them. Those that
    no pass makes, as wgrad of a frozen weight, are left out."""

    @property
    def seconds(self) -> float:
        """The seconds of all layers."""
        return _seconds(self.choices.values())

    @property
    def policy(self) -> Policy:
        """The policy: a rule for each recipe that some layers have, which names them."""
        layers: dict[Recipe | None, list[str]] = {}
        for name, one in self.choices.items():
            layers.setdefault(None if set(one.products) == {BF16} else one.recipe, []).extend(self.names[name])
        escaped = {recipe: tuple(map(exactly, names)) for recipe, names in layers.items()}
        return Policy(tuple(Rule(names, recipe) for recipe, names in escaped.items()))

    def write(self, path: str | Path) -> None:
        """Write the policy to a TOML file, for ``lpq.convert`` and ``python -m lpq train --policy``."""
        summary = "".join(f"# {line}\n" for line in self.summary().splitlines())
        with writable(path) as file:
            file.write_text(f"# made by lpq.search\n{summary}\n{self.policy.to_toml()}", encoding="utf-8")

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of a table of the layers."""
        return [
            (name or ITSELF, *one.products, f"{self.plain[name] / one.seconds:.2f}", f"{math.sqrt(one.square):.4f}")
            for name, one in self.choices.items()
        ]

    def as_dict(self) -> dict[str, object]:
        """Plain data: the choice of each layer, all together, and the uniform recipes."""
        plain = sum(self.plain.values())
        return {
            "times_as_fast": plain / self.seconds, "error": self.error, "predicted_error": self.predicted_error,
            "without_error": [*self.without_error],
            "layers": [
                {
                    "layer": name, **dict(zip(GEMMS, one.products, strict=True)), "recipe": str(one.recipe),
                    "seconds": one.seconds, "bf16_seconds": self.plain[name], "error": math.sqrt(one.square),
                }
                for name, one in self.choices.items()
            ],
            "uniform": [
                {
                    "recipe": one.recipe, "times_as_fast": plain / one.seconds, "error": one.error,
                    "predicted_error": one.predicted_error,
                }
                for one in self.uniform
            ],
        }  # fmt: skip

    def summary(self) -> str:
        """The whole choice beside the uniform recipes, in words."""
        plain = sum(self.plain.values())
        lines = [
            f"this choice: {plain / self.seconds:.2f} times as fast as bf16; error of the gradients {self.error:.4f}, "
            f"predicted {self.predicted_error:.4f}"
        ]
        lines += [
            f"{one.recipe} for all: {plain / one.seconds:.2f} times; error {one.error:.4f}, "
            f"predicted {one.predicted_error:.4f}"
            for one in self.uniform
        ]
        return "\n".join([*lines, *([_no_error(self.without_error)] if self.without_error else [])])

    def __str__(self) -> str:
        """A table for people to read."""
        return f"{drawn('products by layer', COLUMNS, self.rows())}\n{self.summary()}"


def search(
    model: nn.Module,
    closures: Closure | Sequence[Closure],
    *,
    time: float | str | None = None,
    error: float | str | None = None,
    recipes: Iterable[str] = USUAL,
    gpu: str | None = None,
    tokens: int = 8192,
    seconds: Seconds | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Choose the recipe of each product of each layer, under a budget of time or of error.

    The model is as before afterwards: weights, gradients, random bits and, if it was converted, recipes. The experts of
    a module have one recipe, as a layer. Where ranks share the model all of them call this.

    Args:
        model: The model, with the weights that it has in training. One that has no layer of lpq is converted meanwhile;
            one that was built with ``GroupedLinear`` must be converted before.
        closures: Each runs forward and backward of a batch, without the optimizer, and returns the loss.
        time: The most time that the layers may take, as a fraction of bf16's; or a recipe: as much as by it.
        error: In place of ``time``, the most error of the gradients over their length; or a recipe: as much as by it.
        recipes: The recipes that products are taken from. bf16 is always among them.
        gpu: The GPU for which times are predicted, a name that ``lpq advise --gpu`` takes; None: this machine's.
        tokens: The tokens of a step on each GPU, for the prediction.
        seconds: In place of predictions, for example from measurements.
        tell: Is called with the number of replays done and the number of all replays.
    """
    check_model(model)
    every = _batches(closures)
    check_whole("search", 1, NumericsError, tokens=tokens)
    if seconds is not None and not callable(seconds):
        raise OptionError(f"search: seconds = {brief(seconds)}: it is a function of a layer's name and a recipe")
    by_text = recipes_by_name(recipes)
    kept, budget = budget_of(time, error, by_text)
    clock: Clock = partial(_predicted, _by_size(gpu), tokens) if seconds is None else lambda *_: seconds
    before = Before(model)
    own = not stateful_layers(model)
    if own:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is left alone is left alone by the policy, too
            convert(inside_of_replicas(model), BF16)
    try:
        return _search(model, every, by_text, clock, kept, budget, tell or (lambda done, whole: None))
    finally:
        if own:
            restore(inside_of_replicas(model))
        before.restore()


def _batches(closures: Closure | Sequence[Closure]) -> list[Closure]:
    """The closures, at least one."""
    every = [closures] if callable(closures) or not isinstance(closures, Iterable) else [*closures]
    if not every:
        raise OptionError("search needs a batch: closures is empty")
    for closure in every:
        if not callable(closure):
            raise OptionError(
                f"search: {brief(closure)} is no closure: give a function that runs forward and backward of a batch "
                "and returns the loss, or a list of such"
            )
    return every


def recipes_by_name(names: Iterable[str]) -> dict[str, Recipe]:
    """The recipes by their names, bf16 among them."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise OptionError(f"search: recipes = {brief(names)}: it is a list, as recipes=['mxfp8', 'nvfp4']")
    by_text = {BF16: recipes_of.recipe(BF16)}
    for text in names:
        by_text[text] = recipes_of.recipe(text)
        check_forgets("search", by_text[text])
    return by_text


def _by_size(gpu: str | None) -> Callable[[LayerSize, Recipe | None], float]:
    """The predicted seconds of a step of a layer of some size."""
    name = gpu or (key_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None)
    if name is None:
        raise OptionError(f"search: this machine has no GPU that is known; name one of {', '.join(GPUS)}: gpu='h100'")
    if name not in GPUS:
        raise OptionError(f"search: gpu = {name!r}: {suggestion(name, GPUS)}")
    card = GPUS[name]
    return lru_cache(None)(lambda size, recipe: predicted(card, size, recipe))


def _search(
    model: nn.Module,
    closures: Sequence[Closure],
    by_text: Mapping[str, Recipe],
    clock: Clock,
    kept: str,
    budget: float | str,
    tell: Callable[[int, int], None],
) -> SearchResult:
    """Search in a converted model. ``kept``: "time" or "error", which stays within the budget."""
    inside = inside_of_replicas(model)
    shapes = searched_layers(inside)
    every = stateful_layers(inside).items()
    layers = {name: layer for name, layer in every if name in shapes and layer.recipe is not None}
    if not layers:
        built = ": convert it first, lpq.convert(model, 'bf16')" if shapes else ""
        words = "no layer of {} has a recipe" if shapes else "lpq.convert reaches no linear layer of {}"
        raise NumericsError(f"search: {words.format(type(model).__name__)}{built}")
    for name, layer in layers.items():
        if isinstance(local_part(layer.shared_weight()), QuantizedTensor):
            raise NumericsError(
                f"search: the weight of {name} is stored quantized: convert without weights='quantized'"
            )
    replays = []
    for number, closure in enumerate(closures, 1):
        torch.manual_seed(torch.initial_seed() + number)  # random bits of its own for each
        replays.append(Replay(model, closure, Before(model)))
    with ExitStack() as stack:
        for replay in replays:
            stack.enter_context(replay.running())
        exact = dict.fromkeys(replays[0].layers, by_text[BF16])
        took = _checked(clock({name: shapes[name] for name in layers}, replays[0], exact))
        plain = {name: took(name, None) for name in layers}
        composed = {
            products: _composed(by_text, products) for products in itertools.product(by_text, repeat=len(GEMMS))
        }
        whole = {products: recipe for products, recipe in composed.items() if recipe is not None}
        timed: dict[str, Times] = {
            name: {products: took(name, recipe) for products, recipe in whole.items()} for name in layers
        }
        limit_of = partial(_time_limit, budget, plain)
        if kept == "time":
            limit_of(timed)
        alike = [f"{len(closures)} closures, {kept} within {budget}", *map(str, by_text)]
        gradients = GradientError(OverRanks(model, alike), replays, exact)
        _refuse_no_gradient(gradients, any(p.grad is not None for p in model.parameters()))
        _refuse_other_gradients(gradients.of(exact))
        squares = _squares(layers, by_text, lambda layer, recipe: gradients.of({**exact, layer: recipe}) ** 2, tell)
        made = {(name, product) for (name, product, _), square in squares.items() if square}
        timed = {name: _of_made(times, [p for p in GEMMS if (name, p) in made]) for name, times in timed.items()}
        inexact = {(name, product) for name, product, gemm in squares if gemm != by_text[BF16].gemm(product)}
        without_error = [
            f"{product} of {name or ITSELF}"
            for name, product in itertools.product(layers, GEMMS)
            if (name, product) in inexact - made and _is_made(layers[name], product)
        ]

        def options(name: str) -> list[Option]:
            own = []
            for products, recipe in whole.items():
                square = sum(squares[name, p, recipe.gemm(p)] for p in GEMMS)
                own.append(Option(products, recipe, timed[name][products], square))
            return own

        by_layer = {name: options(name) for name in layers}
        uniform = {text: [_uniform(each, text) for each in by_layer.values()] for text in by_text}
        if kept == "time":
            choice = under_time([*by_layer.values()], limit_of(timed, without_error))
        else:
            limit = _limit(budget, {text: _error(each) for text, each in uniform.items()}, 1.0)
            choice = under_error([*by_layer.values()], limit)

        def error_of(options: Sequence[Option]) -> float:
            return gradients.of({**exact, **{layers[name]: o.recipe for name, o in zip(layers, options, strict=True)}})

        beside = tuple(
            Uniform(text, _seconds(each), _error(each), error_of(each))
            for text, each in uniform.items()
            if text != BF16
        )
        choices, names = dict(zip(layers, choice, strict=True)), rule_names(inside)
        own_names = {name: names[name] for name in choices}
        return SearchResult(choices, plain, _error(choice), error_of(choice), beside, own_names, without_error)


def _checked(took: Seconds) -> Seconds:
    """A clock whose times are refused where they are none."""

    def checked(name: str, recipe: Recipe | None) -> float:
        value = took(name, recipe)
        if not is_number(value) or not 0 < value < math.inf:
            raise OptionError(
                f"search: seconds({name!r}, {recipe and recipe.text}) = {brief(value)}: it must return the time of a "
                "step of the layer, a number above 0"
            )
        return float(value)

    return checked


def _is_made(layer: StatefulLayer, product: Gemm | str) -> bool:
    """Whether a layer that runs certainly makes a product. Whether it makes dgrad, its inputs decide."""
    return product == "fprop" or (product == "wgrad" and layer.shared_weight().requires_grad)


def _no_error(products: Sequence[str]) -> str:
    return (
        f"no recipe makes an error in {listed(products)}, so they count as in bf16 and save no time: they multiply "
        "zeros, as before and behind a layer whose weight is 0, or the batches leave them out. Search with the weights "
        "of a run"
    )


def _time_limit(
    budget: float | str, plain: Mapping[str, float], timed: Mapping[str, Times], without_error: Sequence[str] = ()
) -> float:
    """The seconds that the budget allows; an error if no choice takes so little."""
    texts = dict.fromkeys(text for times in timed.values() for products in times for text in products)
    of_text = {text: sum(times[(text,) * len(GEMMS)] for times in timed.values()) for text in texts}
    limit = _limit(budget, of_text, sum(plain.values()))
    least = sum(min(times.values()) for times in timed.values())
    if least > limit * (1 + ROUNDING):
        raise OptionError(
            f"search: no choice among {', '.join(texts)} takes less than {least / sum(plain.values()):.3f} of bf16's "
            f"time, and the budget is {budget!r}: allow as much, or add a recipe"
            f"{'; ' + _no_error(without_error) if without_error else ''}"
        )
    return limit


def _of_made(times: Times, made: Collection[str]) -> Times:
    """The seconds where only these products are made, and no recipe saves time for the others, as for wgrad of a frozen
    weight: they have no error by any."""

    def run(products: tuple[str, ...]) -> tuple[str, ...]:
        texts = tuple(text if p in made else BF16 for p, text in zip(GEMMS, products, strict=True))
        return texts if texts in times else products

    return {products: times[run(products)] for products in times}


def _refuse_no_gradient(gradients: GradientError, is_there: bool) -> None:
    """Refuse gradients beside which there is no error to measure. ``is_there``: whether any parameter has one."""
    if not gradients.size and not is_there:
        raise NumericsError("search: the closures left no gradient: they run backward, too, as loss.backward()")
    if not gradients.size or not math.isfinite(gradients.size):
        raise NumericsError(
            f"search: in bf16 the gradients have the length {gradients.size:g}, and the loss is {gradients.loss:g}: no "
            "error can be measured beside them. Search with batches whose gradients are finite and not all 0"
        )


def _refuse_other_gradients(error: float) -> None:
    """Refuse closures whose gradients differ from run to run in bf16 by ``error``, beside which no other is seen."""
    if not error < SAME:
        raise NumericsError(
            f"search: the closures were run twice in bf16, and the gradients differ by {error:.2g} of their length: "
            "have each closure keep its batch, and take no new one in each call"
        )


def _predicted(
    of_size: Callable[[LayerSize, Recipe | None], float], tokens: int, shapes: Shapes, replay: Replay, exact: Parts
) -> Seconds:
    """Predict the seconds of each layer. Experts have as many rows for each token as they had in the replay."""
    rows, every = Rows(), [one for shape in shapes.values() for one in shape]
    if any(one.experts is not None for one in every):
        with observing([*replay.layers], rows):
            replay.run(exact)
    whole = max((rows.of(one) for one in every if one.experts is None), default=0)
    sizes = {name: [one.size(tokens, rows.of(one), whole) for one in shape] for name, shape in shapes.items()}
    return lambda name, recipe: sum(of_size(size, recipe) for size in sizes[name])


def _squares(
    layers: Mapping[str, StatefulLayer],
    by_text: Mapping[str, Recipe],
    square: Callable[[StatefulLayer, Recipe], float],
    tell: Callable[[int, int], None],
) -> dict[tuple[str, str, Gemm], float]:
    """The squared error that each product of each layer brings in by each recipe, with all else in bf16."""
    exact = by_text[BF16]
    alone: dict[tuple[str, Gemm], Recipe] = {}
    for place, product in enumerate(GEMMS):
        for text, recipe in by_text.items():
            texts = [BF16] * len(GEMMS)
            texts[place] = text
            if (composed := _composed(by_text, texts)) is None:
                raise OptionError(f"search: {product} of {text} cannot be had without the rest of it: leave {text} out")
            alone[product, recipe.gemm(product)] = composed
    squares = {}
    whole = len(layers) * len(alone)
    for number, (name, (product, gemm)) in enumerate(itertools.product(layers, alone), 1):
        is_exact = gemm == exact.gemm(product)
        squares[name, product, gemm] = 0.0 if is_exact else square(layers[name], alone[product, gemm])
        tell(number, whole)
    return squares


def _composed(by_text: Mapping[str, Recipe], texts: Sequence[str]) -> Recipe | None:
    """The recipe whose products are taken from these; None if no recipe may have them."""
    if len({*texts}) == 1:
        return by_text[texts[0]]
    try:
        fprop, dgrad, wgrad = (by_text[text].gemm(product) for product, text in zip(GEMMS, texts, strict=True))
        return Recipe(fprop, dgrad, wgrad)
    except RecipeError:
        return None


def _uniform(options: Iterable[Option], text: str) -> Option:
    """The option that takes all products from one recipe."""
    return next(one for one in options if {*one.products} == {text})


def _seconds(options: Iterable[Option]) -> float:
    return sum(one.seconds for one in options)


def _error(options: Iterable[Option]) -> float:
    return math.sqrt(sum(one.square for one in options))


def budget_of(
    time: float | str | None, error: float | str | None, recipes: Iterable[str], spelled: str = "search: {} = {}"
) -> tuple[str, float | str]:
    """Return whether time or error has a budget, and the budget. A wrong one is refused here, before the replays, in
    words that begin with its name and value as they are ``spelled``."""
    if (time is None) == (error is None):
        raise OptionError("search needs one budget: time=0.6 or time='nvfp4', or else error=0.1 or error='nvfp4'")
    name, budget = ("time", time) if time is not None else ("error", error)
    given = spelled.format(name, brief(budget))
    if isinstance(budget, str):
        if budget in recipes:
            return name, budget
        raise OptionError(f"{given} is none of the recipes: {suggestion(budget, recipes)}")
    if not isinstance(budget, (int, float)) or isinstance(budget, bool) or not 0 <= budget < math.inf:
        raise OptionError(f"{given}: it must be a number from 0 on, or one of {', '.join(recipes)}")
    return name, budget


def _limit(budget: float | str, of: Mapping[str, float], unit: float) -> float:
    """A budget as a number: the time or error of a recipe, or ``budget`` times the ``unit``."""
    return of[budget] if isinstance(budget, str) else budget * unit
