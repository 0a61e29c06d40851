"""Which layer did it: a step is replayed with parts of a model in bf16."""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.comparing import equal
from support.small_models import Planted
from torch import Tensor, nn

import lpq
from lpq.nn.stepping import promote
from lpq.observe.culprits import _replaced
from lpq.observe.readings import NumericsError
from lpq.observe.replay import Replay


def model(recipe: Any = "fp8-current", planted: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        net = nn.Sequential(*(Planted(64, i == planted) for i in range(4)))
    return lpq.convert(net, recipe, **options)


def batch() -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4", "fp8-delayed"])
def test_a_planted_layer_is_found_and_all_is_as_before(recipe: str) -> None:
    """Its product, and the operand that has the outliers. The step is replayed to the bit, though it moved states and
    drew random bits."""
    net = model(recipe)
    x = batch()
    net(x).square().mean().backward()  # so that delayed scaling has scales
    net.zero_grad()
    before = lpq.observe.Before(net)
    net(x).square().mean().backward()
    trained = [p for p in net.parameters() if p.requires_grad]
    gradients = [p.grad.clone() for p in trained]
    held = [*net.state_dict().values(), torch.get_rng_state()]
    expected = [value.clone() for value in held]

    found = lpq.observe.culprits(net, closure_of(net, x), before=before)
    assert found.replays
    assert found.found[0].layer == "2.layer"
    assert found.found[0].moved > 0.3
    assert found.found[0].moved == max(one.moved for one in found.found)
    assert "2.layer" in str(found)
    parts = {part.part: part.moved for part in found.parts if part.layer == "2.layer"}
    assert parts["fprop"] == max(parts.values())
    assert parts["fprop.x"] > parts["fprop.w"]
    assert equal([p.grad for p in trained], gradients)
    assert equal([*net.state_dict().values(), torch.get_rng_state()], expected)
    assert {m.recipe for m in net.modules() if isinstance(m, lpq.nn.Layer)} == {lpq.recipe(recipe)}


@pytest.mark.parametrize(
    "recipe", ["fp8-delayed", "fp8-current", "nvfp4", "x=hybrid(row=fp8, col=mxfp8), w=fp8(), dy=fp8()"]
)
@pytest.mark.parametrize("part", ["dgrad", "wgrad", "wgrad.x", "dgrad.w"])
def test_a_part_in_bf16_leaves_the_states_of_the_others(recipe: str, part: str) -> None:
    """The states of a tensor have other names where one of its operands alone is encoded. The batch is far outside of
    the scales that are kept: by measured ones forward would be another."""
    torch.manual_seed(0)
    net = lpq.convert(nn.Sequential(nn.Linear(64, 64)), recipe)
    if recipe == "fp8-delayed":
        net(torch.randn(32, 64)).square().mean().backward()
    else:
        lpq.calibrate(net, [torch.randn(32, 64)])
    replay = Replay(net, closure_of(net, 100 * batch()), None)
    (layer,) = replay.layers
    other = _replaced(layer.recipe, lpq.recipe("bf16").operands, part)
    assert (other is None) == ((recipe, part) == ("nvfp4", "wgrad.x")), "its operands are both rotated, or neither is"
    if other is None:
        return
    held = {name: value.clone() for name, value in net.state_dict().items()}
    with replay.running():
        loss, gradients = replay.run({})
        again, others = replay.run({layer: other})
        in_bf16, _ = replay.run({layer: lpq.recipe("bf16")})
        assert again == loss
        assert in_bf16 > 10 * loss, "so scales that are kept do show"
        assert torch.equal(others[0], gradients[0]) is ("wgrad" not in part)
    assert equal([*net.state_dict().values()], [*held.values()])


def test_culprits_of_a_model_with_static_scales_are_found_and_not_promoted() -> None:
    """A promotion would end in a layer without scales."""
    net = model("fp8-current")
    lpq.calibrate(net, [batch()])
    found = lpq.observe.culprits(net, closure_of(net, batch()))
    assert found.found[0].layer == "2.layer"
    assert {part.part for part in found.parts} >= {"fprop", "dgrad", "wgrad", "fprop.x", "fprop.w"}
    with pytest.raises(NumericsError, match=r"promote: layer 2\.layer, .* has static scales, .* at step 7: leave it"):
        found.promote(net, until=7)
    net(batch())


def closure_of(net: Any, x: Tensor) -> Any:
    def closure() -> Tensor:
        loss: Tensor = net(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


class Skips(nn.Module):
    """A model that leaves layers out by random numbers that are not torch's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number and self.draw() < 0.5 else layer(x).relu()
        return x


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("of", [random, numpy.random], ids=["python", "numpy"])
def test_layers_that_other_random_numbers_leave_out_are_left_out_in_the_replay(of: Any, seed: int) -> None:
    torch.manual_seed(0)
    of.seed(seed)
    net, x = lpq.convert(Skips(of.random), "nvfp4", include="all"), batch()
    before = lpq.observe.Before(net)
    closure_of(net, x)()
    state = lpq.observe.Before(net)
    expected = of.random()
    state.restore()
    assert lpq.observe.culprits(net, closure_of(net, x), before=before).replays
    assert of.random() == expected


def test_random_bits_of_all_gpus_with_a_part_of_the_model_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {torch.device("cuda", i): torch.tensor([i]) for i in range(3)}
    net = model()
    on = {id(p): torch.device("cuda", i % 2) for i, p in enumerate(net.parameters())}
    monkeypatch.setattr("lpq.observe.replay.device_of", lambda p: on[id(p)])
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: gpus[device].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: gpus.update({device: state}))
    before = lpq.observe.Before(net)
    for device in gpus:
        gpus[device] = torch.tensor([-1])
    before.restore()
    assert [state.item() for state in gpus.values()] == [0, 1, -1]


def test_gradients_in_main_grad_are_those_of_the_step() -> None:
    """No replay adds to them, and the same layer is found as without them."""

    def found(accumulate: Any) -> str:
        net = model("nvfp4", accumulate=accumulate)
        for parameter in net.parameters():
            parameter.main_grad = torch.zeros_like(parameter)

        def closure() -> Tensor:
            losses = [net(part).square().mean() for part in batch().chunk(2)]
            torch.stack(losses).sum().backward()
            return losses[0]

        before = lpq.observe.Before(net)
        closure()
        sums = [parameter.main_grad.clone() for parameter in net.parameters()]
        assert any(total.count_nonzero() for total in sums) == (accumulate is not None)
        one = lpq.observe.culprits(net, closure, before=before, most=1)
        assert all(torch.equal(total, p.main_grad) for total, p in zip(sums, net.parameters(), strict=True))
        assert one.replays == (None if accumulate else True)
        assert net[0].layer.model.accumulate == accumulate
        return str(one)

    assert found("main_grad") == found(None)
    assert "2.layer" in found(None)


def test_a_layer_that_makes_a_nan_is_found() -> None:
    """The NaN comes from an infinity, which tanh takes to 1: a block of MXFP8 with it decodes to NaN."""
    net = model("mxfp8", planted=-1)
    net[1].layer.requires_grad_(False)
    net[1].layer.register_forward_pre_hook(
        lambda _, args: (args[0].clone().index_fill(1, torch.tensor([0]), torch.inf),)
    )
    found = lpq.observe.culprits(net, closure_of(net, batch()))
    assert found.replays is None
    assert found.error == float("inf")
    assert [one.layer for one in found.found] == ["1.layer"]
    assert found.found[0].moved > 0.5
    assert {part.part for part in found.parts if part.moved > 0.5} == {"fprop", "fprop.x"}


@pytest.mark.parametrize(
    ("recipe", "stay"), [("nvfp4-eden", {"dgrad"}), ("nvfp4(stochastic=eden)", {"fprop", "dgrad"})]
)
def test_products_with_a_stored_weight_that_is_rotated_stay(recipe: str, stay: set[str]) -> None:
    """No input in bf16 is rotated as it is. All else is in bf16, also where a rule promotes the layer."""
    net, own, exact = model(recipe, weights="quantized"), lpq.recipe(recipe), lpq.recipe("bf16")
    before = lpq.observe.Before(net)
    closure_of(net, batch())()
    found = lpq.observe.culprits(net, closure_of(net, batch()), before=before)
    assert found.replays
    (worst, *_) = found.found
    assert worst.recipe.operands == {
        o: q if o.gemm in stay or o.tensor == "w" else exact.operands[o] for o, q in own.operands.items()
    }
    assert {one.part.split(".")[0] for one in found.parts} == {"fprop", "dgrad", "wgrad"} - stay
    found.promote(net, until=2)
    lpq.set_step(net, 1)
    closure_of(net, batch())()
    assert dict(net.named_modules())[worst.layer].recipe == worst.recipe


def jumping(net: Any, jump: Callable[[Tensor], Tensor]) -> tuple[Any, float, float]:
    """A closure whose loss is about 1 and what the formats add to it, and the loss and the norm of its gradients. The
    jump is behind the layers: no format has a part in it."""
    x = batch()
    target = model("bf16")(x).detach() + 0.05

    def closure() -> Tensor:
        loss: Tensor = jump(10 * (net(x) - target).square().mean() + 1)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    net.zero_grad()
    loss = float(closure().detach())
    return closure, loss, float(nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]))


@pytest.mark.parametrize(
    ("jump", "why"),
    [
        (lambda loss: 40 * loss, r"the loss is 4\d\.?\d*, where the last 10 steps had about 1"),
        (lambda loss: loss + 1e6 * (loss - loss.detach()), r"the gradient norm is .*, and was about"),
        (lambda loss: loss * torch.nan, "the loss is nan"),
    ],
    ids=["loss", "norm", "nan"],
)
def test_a_jump_that_bf16_has_as_well_is_no_layers_doing(jump: Callable[[Tensor], Tensor], why: str) -> None:
    net, course = model("nvfp4", planted=-1), lpq.observe.Course(window=10)
    _, loss, norm = jumping(net, lambda loss: loss)
    assert [course.leaves(loss, norm) for _ in range(10)] == [None] * 10
    closure, loss, norm = jumping(net, jump)
    assert re.match(why, course.leaves(loss, norm) or "")
    found = lpq.observe.culprits(net, closure, course=course)
    assert found.found == found.parts == ()
    assert re.match(why, found.off_in_bf16 or "")
    assert "in bf16 the step is off its course as well: no layer's format is the cause (the " in str(found)
    found.promote(net, until=3)
    lpq.set_step(net, 1)
    assert {m.recipe for m in net.modules() if isinstance(m, lpq.nn.Layer)} == {lpq.recipe("nvfp4")}


def test_a_nan_that_bf16_has_as_well_is_told_without_a_course() -> None:
    net, x = model(), batch()
    x[3, 5] = torch.nan
    found = lpq.observe.culprits(net, closure_of(net, x))
    assert found.off_in_bf16 == "the loss is nan, the gradient norm nan"
    assert "no layer's format is the cause (the loss is nan" in str(found)
    assert "no layer by itself" not in str(found)


@pytest.mark.parametrize("is_nan", [False, True])
def test_a_jump_of_one_layers_format_is_that_layers_doing(is_nan: bool) -> None:
    """The loss of bf16 stays on the course. Where the layer makes a NaN, it may leave the course: it is a number."""
    net, course = model("nvfp4"), lpq.observe.Course(window=10)

    def jump(loss: Tensor) -> Tensor:
        in_bf16 = net[2].layer.recipe == lpq.recipe("bf16")
        return loss if not is_nan else 40 * loss if in_bf16 else torch.nan * loss

    _, loss, _ = jumping(model("bf16"), lambda loss: loss)
    assert [course.leaves(loss) for _ in range(10)] == [None] * 10
    closure, loss, norm = jumping(net, jump)
    assert course.leaves(loss, norm) is not None
    found = lpq.observe.culprits(net, closure, course=course, most=1)
    assert found.off_in_bf16 is None
    assert [one.layer for one in found.found] == ["2.layer"]
    found.promote(net, until=3)
    lpq.set_step(net, 1)
    assert net[2].layer.recipe == lpq.recipe("bf16")


def test_a_rule_promotes_culprits_for_some_steps(tmp_path: Path) -> None:
    """It goes into the model's record and its checkpoint, makes room for a later one, and ends by itself."""
    net = model("mxfp8-fwd-nvfp4-bwd")
    own = net[0].layer.recipe
    found = lpq.observe.culprits(net, closure_of(net, batch()), most=1)
    assert [one.layer for one in found.found] == ["2.layer"]
    for until in (7, 9):
        found.promote(net, until=until)
        for step, recipe in ((until - 1, lpq.recipe("bf16")), (until, own)):
            lpq.set_step(net, step)
            assert net[2].layer.recipe == recipe
            assert net[0].layer.recipe == own
    assert len(lpq.policy(net.lpq_conversion.policy).rules) == 2
    assert "until step 9" in str(lpq.report(net, full=True))
    lpq.checkpoint.save(net, tmp_path, step=5)
    policy = lpq.checkpoint.info(tmp_path).policy
    again = model(policy)
    assert again[2].layer.recipe == lpq.recipe("bf16")
    assert again[2].layer.schedule == net[2].layer.schedule
    lpq.checkpoint.load(again, tmp_path)


def test_a_model_without_layers_and_a_closure_without_backward_are_refused() -> None:
    x, plain = batch(), nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(NumericsError, match="Sequential has no layer with a recipe of lpq: convert it first"):
        lpq.observe.culprits(plain, lambda: plain(x).sum().backward())
    net = model()
    with pytest.raises(NumericsError, match="the closure left no gradient"):
        lpq.observe.culprits(net, lambda: net(x).sum())
    with pytest.raises(NumericsError, match="the closure of a replay returned None: it must return the loss"):
        lpq.observe.culprits(net, lambda: net(x).sum().backward())
    with pytest.raises(NumericsError, match=r"returned a tensor of shape \[32, 64\]: it must return the loss"):
        lpq.observe.culprits(net, lambda: net(x))
    with pytest.raises(NumericsError, match="closure=None: it is a function that runs forward and backward"):
        lpq.observe.culprits(net, None)  # type: ignore[arg-type]
    with pytest.raises(NumericsError, match="before= is of another model than Sequential,"):
        lpq.observe.culprits(net, closure_of(net, x), before=lpq.observe.Before(model()))


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_closure_that_steps_an_optimizer_is_refused(in_backward: bool) -> None:
    """Each replay would train the model."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    if in_backward:
        net[0].layer.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())

    def closure() -> Tensor:
        loss: Tensor = net(batch()).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        (other if in_backward else optimizer).step()
        return loss

    with pytest.raises(NumericsError, match="steps an optimizer, so each replay would train the model"):
        lpq.observe.culprits(net, closure)
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))
    optimizer.step()  # control: behind it all is as before


def test_a_promotion_of_another_model_or_in_the_past_is_refused() -> None:
    net = model()
    found = lpq.observe.culprits(net, closure_of(net, batch()), most=1)
    other = lpq.convert(nn.Linear(64, 64), "mxfp8")
    for call in (lambda: found.promote(other, until=5), lambda: found.promoted(other)):
        with pytest.raises(
            NumericsError, match=r"promote: Linear has no layer '2\.layer', which was found: give the model"
        ):
            call()
    found.promote(net, until=3)
    lpq.set_step(net, 20)
    with pytest.raises(NumericsError, match=r"until=20: the model is at step 20 already.*: give a later step"):
        found.promote(net, until=20)
    found.promote(net, until=21)


def test_gradients_that_are_all_0_have_no_error() -> None:
    net, x = model("mxfp4"), batch()

    def closure() -> Tensor:
        loss: Tensor = 0 * net(x).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    found = lpq.observe.culprits(net, closure)
    assert found.error == 0
    assert found.found == ()
    assert "error of the gradients 0\n" in str(found)


def test_other_gradients_than_the_steps_are_explained() -> None:
    """With ``before`` by what is left: a compiled step, or gradients from before it."""
    net, x = model(), batch()
    closure_of(net, x)()
    before = lpq.observe.Before(net)
    closure_of(net, x)()
    found = lpq.observe.culprits(net, closure_of(net, x), before=before, most=1)
    assert found.replays is False
    assert "other gradients than the step: bits differ where the step ran compiled, as a replay runs eag" in str(found)
    found = lpq.observe.culprits(net, closure_of(net, x), most=1)
    assert "other gradients than the step: pass before=, made where the step began; bits differ where" in str(found)


@pytest.mark.parametrize(
    "options",
    [{"most": 0}, {"most": "x"}, {"least": -1}, {"least": 1.5}, {"replays": True}, {"before": 3}, {"course": "off"}],
)
def test_options_of_the_search_that_are_none_are_refused(options: dict[str, Any]) -> None:
    net, name = model(), next(iter(options))
    with pytest.raises(NumericsError, match=rf"culprits: {name}=.*: it is"):
        lpq.observe.culprits(net, closure_of(net, batch()), **options)


@pytest.mark.parametrize("until", [-1, 0, True, "x", 0.5])
def test_an_end_of_a_promotion_that_is_none_is_refused(until: Any) -> None:
    found = lpq.observe.Culprits((), (), 0.0, 1.0, 1.0, None)
    with pytest.raises(NumericsError, match=r"promote: until=.*: it is a whole number from 1 on"):
        found.promote(model(), until=until)


def test_a_model_that_is_one_layer_is_named() -> None:
    """Its name within itself is empty."""
    torch.manual_seed(0)
    net = lpq.convert(nn.Linear(64, 64), "nvfp4")
    found = lpq.observe.culprits(net, closure_of(net, batch()))
    assert "%  the model itself\n" in str(found)
    assert found.found[0].name == "the model itself"
    found.promote(net, until=3)
    lpq.set_step(net, 1)
    assert net.recipe == lpq.recipe("bf16")


@pytest.mark.parametrize("names", [("b*", "bq"), ("b[0]", "b0"), ("b?", "bq")])
def test_a_name_like_a_pattern_promotes_its_layer_alone(names: tuple[str, str]) -> None:
    net = nn.Sequential(OrderedDict((name, nn.Linear(64, 64)) for name in names))
    lpq.convert(net, "mxfp8")
    promote(net, {net.get_submodule(names[0]): lpq.recipe("bf16")}, until=3)  # type: ignore[dict-item]
    lpq.set_step(net, 1)
    recipes = [net.get_submodule(name).recipe for name in names]
    assert recipes == [lpq.recipe("bf16"), lpq.recipe("mxfp8")]


class Tied(nn.Module):
    """A layer in two places, inside a module that is in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        self.b, self.c = self.a, self.a[0]


def test_a_layer_with_several_names_is_promoted_by_all_of_them() -> None:
    """By a policy that converts such a model again, as one of a checkpoint does. Earlier rules for it make room."""
    earlier = [{"match": match, "until": 2, "recipe": "bf16"} for match in ("c", ["a.0", "b.0"])]
    net = lpq.convert(Tied(), {"rules": [*earlier, {"match": "*", "recipe": "mxfp8"}]})
    for until in (3, 5):
        promote(net, {net.a[0]: lpq.recipe("bf16")}, until=until)  # type: ignore[dict-item]
    policy = net.lpq_conversion.policy  # type: ignore[union-attr]
    assert [(rule.match, rule.until) for rule in policy.rules] == [(("a.0", "b.0", "c"), 5), (("*",), None)]
    again = lpq.convert(Tied(), policy)
    assert [layer.schedule for layer in again.a] == [layer.schedule for layer in net.a]
    assert [layer.recipe.title for layer in again.a] == ["bf16", "mxfp8"]  # type: ignore[union-attr]
