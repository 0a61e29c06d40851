"""Which product of which layer gets which recipe: a planted product stays exact, and a budget is kept."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparing import equal
from support.small_models import Experts, Planted
from torch import Tensor, nn

import lpq
from lpq.bench.gpus import GPUS, predicted
from lpq.bench.knapsack import Option, hull, under_error, under_time
from lpq.bench.layers import LayerSize, StackSize
from lpq.observe.readings import NumericsError
from lpq.registry.errors import OptionError

LAYERS, BF16 = 4, lpq.recipe("bf16")


def model(planted: int = 2) -> Any:
    """Layers behind something that is trained, so that all have a dgrad."""
    torch.manual_seed(0)
    with torch.no_grad():
        net = nn.Sequential(*(Planted(64, i == planted) for i in range(LAYERS)))
    net.register_parameter("shift", nn.Parameter(torch.zeros(64)))
    return net


def closures(net: Any, count: int = 1) -> list[Any]:
    def of(seed: int) -> Any:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))

        def closure() -> Tensor:
            loss: Tensor = net(x + getattr(net, "shift", 0)).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return closure

    return [of(seed) for seed in range(1, 1 + count)]


def exact_products(_: str, recipe: Any) -> float:
    """A clock by which each product in bf16 takes a second, and others half of one."""
    return 3.0 if recipe is None else sum(1.0 if a.plain and b.plain else 0.5 for a, b in recipe.products.values())


def one_exact(planted: int) -> float:
    """The time in which one of the twelve products may be exact, beside wgrad of the planted layer, which is frozen."""
    return (6 + 0.5 + 0.5 * (planted >= 0)) / 12


def kept(found: Any) -> set[tuple[str, str]]:
    return {
        (name, product)
        for name, one in found.choices.items()
        for product, text in zip(("fprop", "dgrad", "wgrad"), one.products, strict=True)
        if text == "bf16"
    }


@pytest.mark.parametrize("planted", [1, 2])
@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
def test_the_product_with_outliers_stays_exact(planted: int, recipe: str) -> None:
    """Wherever it is. All is as before afterwards."""
    net = model(planted)
    closures(net)[0]()
    trained = [p for p in net.parameters() if p.requires_grad]
    held = [*net.state_dict().values(), *(p.grad for p in trained), torch.get_rng_state()]
    expected = [value.clone() for value in held]
    classes = [type(module) for module in net.modules()]
    found = lpq.search(net, closures(net, 2), recipes=[recipe], time=one_exact(planted), seconds=exact_products)
    assert kept(found) == {(f"{planted}.layer", "fprop"), (f"{planted}.layer", "wgrad")}
    assert found.seconds == 7.0
    assert found.error < found.uniform[0].error / 2
    now = [*net.state_dict().values(), *(p.grad for p in trained), torch.get_rng_state()]
    assert equal(now, expected)
    assert [type(module) for module in net.modules()] == classes


def test_without_outliers_no_product_stands_out() -> None:
    """The control: what one exact product gains is then a small part of the error."""
    gains = {}
    for planted in (2, -1):
        net = model(planted)
        found = lpq.search(net, closures(net), recipes=["fp8-current"], time=one_exact(planted), seconds=exact_products)
        assert len(kept(found)) == (1 if planted < 0 else 2)
        gains[planted] = 1 - found.error / found.uniform[0].error
    assert gains[2] > 0.8 > 0.2 > gains[-1]


def test_a_budget_of_error_leaves_out_what_is_too_much(tmp_path: Path) -> None:
    """And the policy in its file is the one that was found."""
    net = model()
    found = lpq.search(net, closures(net), recipes=["fp8-current", "nvfp4"], error=0.06, seconds=exact_products)
    assert ("2.layer", "fprop") in kept(found)
    assert len(kept(found)) < 6
    assert found.predicted_error <= 0.06
    assert found.error == pytest.approx(found.predicted_error, rel=0.2)
    assert "error of the gradients" in str(found)
    found.write(tmp_path / "policy.toml")
    policy = lpq.policy(tmp_path / "policy.toml")
    assert policy == found.policy
    lpq.convert(net, tmp_path / "policy.toml")
    assert {name: net.get_submodule(name).recipe for name in found.choices} == {
        name: one.recipe for name, one in found.choices.items()
    }


def test_products_that_no_pass_makes_save_no_time() -> None:
    """Frozen layers before all that is trained have neither dgrad nor wgrad, and the layer behind them has no dgrad."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    net[:2].requires_grad_(False)
    least = 9 - 4 * 0.5
    found = lpq.search(net, closures(net), recipes=["mxfp8"], time=least / 9, seconds=exact_products)
    assert {one.recipe for one in found.choices.values()} == {lpq.recipe("mxfp8")}, "of equal choices the whole recipe"
    assert found.seconds == found.uniform[0].seconds == least
    with pytest.raises(OptionError, match=r"takes less than 0\.778 of bf16's time, and the budget is 0\.6"):
        lpq.search(net, closures(net), recipes=["mxfp8"], time=0.6, seconds=exact_products)
    exact = lpq.search(net, closures(net), recipes=["mxfp8"], error=0, seconds=exact_products)
    assert {one.products for one in exact.choices.values()} == {("bf16",) * 3}


def test_products_of_zeros_are_told_as_such() -> None:
    """As of a model whose last layer begins with zeros: no recipe makes an error, whatever it will make in a run."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    nn.init.zeros_(net[2].weight)
    options: dict[str, Any] = {"recipes": ["nvfp4"], "seconds": exact_products}

    def closure() -> Tensor:
        loss: Tensor = (net(torch.randn(32, 64)) - torch.randn(32, 64)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    found = lpq.search(net, closure, error="nvfp4", **options)
    assert found.without_error == ["wgrad of 0", "wgrad of 1", "fprop of 2"]
    words = "no recipe makes an error in wgrad of 0, wgrad of 1, fprop of 2, so they count as in bf16 and save no time"
    assert words in str(found)
    assert found.as_dict()["without_error"] == found.without_error
    with pytest.raises(OptionError, match=rf"the budget is 0\.6: allow as much, or add a recipe; {words}"):
        lpq.search(net, closure, time=0.6, **options)
    nn.init.normal_(net[2].weight)
    assert lpq.search(net, closure, error="nvfp4", **options).without_error == []


def test_the_layers_of_replicas_have_the_names_that_rules_know() -> None:
    """Also where the search converts the model by itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for recipe in (None, "bf16"):
            built = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            net = nn.parallel.DistributedDataParallel(built if recipe is None else lpq.convert(built, recipe))
            classes = [type(module) for module in net.modules()]
            found = lpq.search(net, closures(net), recipes=["nvfp4"], time="nvfp4", seconds=exact_products)
            assert [rule.match for rule in found.policy.rules] == [("0", "1")]
            assert [type(module) for module in net.modules()] == classes
    finally:
        dist.destroy_process_group()


def test_a_recipe_is_a_budget_and_a_converted_model_is_as_before() -> None:
    net = lpq.convert(model(-1), "mxfp8")
    by_time = lpq.search(net, closures(net), recipes=["nvfp4"], time="nvfp4", seconds=exact_products)
    assert {one.recipe for one in by_time.choices.values()} == {lpq.recipe("nvfp4")}
    assert [rule.match for rule in by_time.policy.rules] == [tuple(f"{i}.layer" for i in range(LAYERS))]
    by_error = lpq.search(net, closures(net), recipes=["nvfp4"], error="bf16", seconds=exact_products)
    assert by_error.error == 0.0
    products = set(itertools.product((f"{i}.layer" for i in range(LAYERS)), ("fprop", "dgrad", "wgrad")))
    assert kept(by_error) == products
    assert None in {rule.recipe for rule in by_error.policy.rules}
    assert {m.recipe for m in net.modules() if isinstance(m, lpq.nn.Layer)} == {lpq.recipe("mxfp8")}


def test_the_policy_is_for_the_layers_that_were_searched_and_no_others() -> None:
    """Whatever their names, and whatever the policy was by which the model was converted."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("a[0]", "a0", "gate", "left")})
            self.again = self.layers["a0"]

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return x

    def recipes(net: nn.Module) -> dict[str, Any]:
        layers = {name.partition(".")[2]: m for name, m in net.named_modules() if isinstance(m, nn.Linear)}
        return {name: getattr(m, "recipe", None) for name, m in layers.items()}

    rules = [{"match": "*.left", "recipe": "skip"}, {"match": "*", "recipe": "mxfp8"}]
    net = lpq.convert(Net(), {"rules": rules})
    assert recipes(net)["gate"] is not None
    found = lpq.search(net, closures(net), recipes=["nvfp4"], time="nvfp4", seconds=exact_products)
    nvfp4 = lpq.recipe("nvfp4")
    assert recipes(lpq.convert(Net(), found.policy)) == {"a[0]": nvfp4, "a0": nvfp4, "gate": nvfp4, "left": None}


def test_times_are_predicted_for_a_gpu() -> None:
    """As ``lpq advise`` does; one that multiplies no codes leaves all in bf16."""
    net = nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.Linear(2048, 2048, bias=False))
    x = torch.randn(16, 2048)
    times = {}
    for gpu in ("b200", "a100"):
        found = lpq.search(
            net,
            lambda: net(x).square().mean().backward() or 0.0,
            recipes=["mxfp8"],
            error="mxfp8",
            gpu=gpu,
            tokens=1 << 16,
        )
        times[gpu] = found.seconds / sum(found.plain.values())
    assert times["b200"] < 0.8
    assert times["a100"] == pytest.approx(1.0)


class Mixture(nn.Module):
    """A layer, then experts, the inputs of one stack of which may have outliers that do not count: its weights for them
    are 0 and stay so. Each of 64 rows goes to two experts."""

    def __init__(self, planted: bool, recipe: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift, self.first = nn.Parameter(torch.zeros(64)), nn.Linear(64, 64)
        self.experts = Experts(4, 64, 64, recipe=recipe)
        self.planted = planted
        if planted:
            with torch.no_grad():
                self.experts.up.weight[..., ::16] = 0.0
            self.experts.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.shift).tanh().repeat(2, 1)
        if self.planted:
            x = x * torch.ones(64).index_fill(0, torch.arange(0, 64, 16), 0.0)
            x = x + torch.zeros(64).index_fill(0, torch.arange(0, 64, 16), 1e6)
        y: Tensor = self.experts(x, torch.tensor([48, 48, 100, 128], dtype=torch.int32))
        return y


@pytest.mark.parametrize("planted", [True, False])
def test_experts_are_searched_as_layers(planted: bool, tmp_path: Path) -> None:
    """The stack with outliers keeps its product, and the policy gives each stack its recipe."""
    net = Mixture(planted)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))

    def closure() -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with pytest.raises(NumericsError, match=r"no layer of Mixture has a recipe: convert it first"):
        lpq.search(net, closure, recipes=["mxfp8"], time="mxfp8", seconds=exact_products)
    lpq.convert(net, "fp8-current")
    found = lpq.search(
        net, closure, recipes=["mxfp8", "nvfp4"], time=(4.5 + 0.5 + 0.5 * planted) / 9, seconds=exact_products
    )
    assert {*found.choices} == {"first", "experts.up", "experts.down"}
    assert {m.recipe for m in net.modules() if isinstance(m, lpq.nn.Layer)} == {lpq.recipe("fp8-current")}
    assert (("experts.up", "fprop") in kept(found)) == planted
    found.write(tmp_path / "policy.toml")
    lpq.convert(net, tmp_path / "policy.toml")
    assert (net.experts.up.recipe == net.experts.down.recipe) != planted
    assert net.experts.up.recipe == found.choices["experts.up"].recipe
    assert found.as_dict()["layers"][1]["fprop"] == ("bf16" if planted else "mxfp8")


def test_the_time_of_experts_is_of_their_rows_and_of_all_their_weights() -> None:
    net, x = lpq.convert(Mixture(False), "fp8-current"), torch.randn(64, 64)
    found = lpq.search(
        net, lambda: net(x).square().mean().backward() or 0.0, recipes=["mxfp8"], error=1.0, gpu="b200", tokens=1 << 20
    )
    recipe, gpu = lpq.recipe("mxfp8"), GPUS["b200"]
    twice = StackSize(2 << 20, 64, 64, 4)
    assert found.plain["first"] == predicted(gpu, LayerSize(1 << 20, 64, 64), None)
    assert found.plain["experts.up"] == predicted(gpu, twice, None)
    assert twice.tensors[1] == 4 * 64 * 64
    (uniform,) = found.uniform
    assert uniform.seconds == predicted(gpu, LayerSize(1 << 20, 64, 64), recipe) + 2 * predicted(gpu, twice, recipe)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_but_for_a_step(seed: int) -> None:
    """Beside all choices of three layers: none with as little error as the one before the last step is faster."""
    draw = random.Random(seed)
    layers = [
        [Option(("a",), BF16, 1.0, 0.0), *(Option(("a",), BF16, draw.random(), draw.random()) for _ in range(4))]
        for _ in range(3)
    ]
    every = [(sum(o.seconds for o in c), sum(o.square for o in c)) for c in itertools.product(*layers)]
    slack = max(slow.seconds - fast.seconds for each in layers for slow, fast in itertools.pairwise(hull(each)))
    for limit in (1.0, 1.5, 2.5):
        chosen = under_time(layers, limit)
        if (seconds := sum(o.seconds for o in chosen)) <= limit:
            assert (
                sum(o.square for o in chosen) <= min((s for t, s in every if t <= limit - slack), default=3.0) + 1e-12
            )
        else:
            assert seconds == min(t for t, _ in every)
        found = under_error(layers, limit)
        assert sum(o.square for o in found) <= limit**2 + 1e-6
    assert under_time(layers, 3.0) == under_error(layers, 0.0) == [each[0] for each in layers]


def test_what_cannot_be_searched_is_refused() -> None:
    net = model()
    given = closures(net)

    def refused(kind: Any, match: str, model: Any = net, closures: Any = given, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            lpq.search(model, closures, **{"time": 0.9, "seconds": exact_products, "recipes": ["nvfp4"], **options})

    refused(OptionError, "search needs one budget", time=None)
    refused(OptionError, "search needs one budget", error=0.1)
    refused(OptionError, "search needs a batch", closures=[])
    never = [lambda: pytest.fail("a wrong budget is found after the replays, which take minutes")]
    refused(OptionError, "time = 'mxfp8' is none of the recipes", time="mxfp8", closures=never)
    refused(OptionError, "time = -1: it must be a number from 0 on", time=-1, closures=never)
    refused(OptionError, "error = True: it must be a number", time=None, error=True, closures=never)
    too_fast = "bf16, nvfp4 takes less than 0.500 of bf16's time, and the budget is 0.4: allow"
    refused(OptionError, too_fast, time=0.4, closures=never)
    refused(OptionError, "None is no closure: give a function that runs forward", closures=None)
    refused(OptionError, "3 is no closure: give a function that runs forward", closures=[3])
    refused(OptionError, "recipes = 'nvfp4': it is a list, as recipes=", recipes="nvfp4", closures=never)
    refused(OptionError, "seconds = 3: it is a function of a layer's name and a recipe", seconds=3, closures=never)
    for wrong in (0, -1.0, math.nan, math.inf, None, "1", True):
        words = rf"seconds\('0\.layer', None\) = {wrong!r}: it must return"
        refused(OptionError, words, seconds=lambda *_, one=wrong: one)
    refused(NumericsError, "tokens='x': it is a whole number from 1 on", tokens="x", closures=never)
    refused(NumericsError, "tokens=0: it is a whole number from 1 on", tokens=0, closures=never)
    refused(OptionError, "fp8-delayed remembers earlier steps for fprop.x", recipes=["fp8-delayed"])
    refused(OptionError, "name one of h100", seconds=None)
    refused(OptionError, "gpu = 'h10'.*did you mean 'h100'", seconds=None, gpu="h10")
    plain = nn.Sequential(nn.LayerNorm(8))
    refused(NumericsError, "reaches no linear layer of Sequential", plain, lambda: plain(torch.ones(4, 8)).sum())
    refused(NumericsError, "the closures left no gradient", closures=[lambda: net(torch.ones(4, 64)).sum()])


@pytest.mark.parametrize("factor", [1.0, math.nan])
def test_a_closure_that_takes_another_batch_in_each_call_is_refused(factor: float) -> None:
    """Its gradients differ by more than any format makes them, and so would the policy be by chance."""
    net, calls = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), itertools.count(1)

    def closure() -> Tensor:
        number = next(calls)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number))
        loss: Tensor = net(x).square().mean() * (factor if number > 1 else 1.0)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with pytest.raises(NumericsError, match=r"run twice in bf16, and the gradients differ by .*: have each"):
        lpq.search(net, closure, recipes=["nvfp4"], seconds=exact_products, error=1e300)
    assert next(calls) == 3


def test_any_error_is_allowed() -> None:
    """Also one whose square is beyond all numbers; a layer that is the model is named."""
    net = nn.Linear(64, 64)
    found = lpq.search(net, closures(net), recipes=["nvfp4"], seconds=exact_products, error=1e300)
    assert found.policy.rules[0].match == ("*",)
    assert "the model itself" in str(found)


@pytest.mark.parametrize("factor", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("budget", [{"error": 0.1}, {"time": 0.9}])
def test_gradients_that_no_error_can_be_measured_beside_are_refused_at_once(
    factor: float, budget: dict[str, float]
) -> None:
    net, calls = model(), []

    def closure() -> Tensor:
        calls.append(factor)
        loss: Tensor = net(torch.ones(4, 64)).square().mean() * factor
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with pytest.raises(NumericsError, match=rf"the gradients have the length .*, and the loss is {factor:g}: no error"):
        lpq.search(net, closure, recipes=["nvfp4"], seconds=exact_products, **budget)
    assert calls == [factor]
    assert not any(isinstance(module, lpq.nn.Layer) for module in net.modules())
