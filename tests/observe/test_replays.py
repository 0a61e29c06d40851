"""Statistics as a GPU replays them: the function that is recorded depends on its tensors alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from test_numerics import RECIPES
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import lpq
from lpq.observe.replays import HostWaits, Replays
from lpq.registry.registry import Registry


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))


class Traced(Replays):
    """Replays the operators of the first call of a kind, as a CUDA graph does, beside the function itself."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: dict[Any, Any] = {}
        self.replayed = 0

    def __call__(self, function: Any, what: Any, tensors: Sequence[Tensor]) -> Any:
        found = function(what, tensors)
        key = (what, *((one.shape, one.stride(), one.dtype) for one in tensors))
        if key not in self.graphs:
            self.graphs[key] = make_fx(lambda *given: function(what, given))(*tensors)
        else:
            self.replayed += 1
            again = self.graphs[key](*tensors)
            assert all(same(one, other) for one, other in zip(found, again, strict=True) if one is not None)
        return found


def watched(recipe: str, monkeypatch: pytest.MonkeyPatch, replays: Replays, steps: int = 2, **options: Any) -> Any:
    net = lpq.convert(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), recipe)
    watch = lpq.observe.numerics(net, every=1, rows=128, **options)
    monkeypatch.setattr(watch, "_replays", replays)
    for step in range(steps):
        x = torch.randn(512, 64, generator=torch.Generator().manual_seed(step)) * (1 + 9 * step)
        with watch.step():
            net(x.requires_grad_()).square().mean().backward()
    return watch


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4", "nvfp4-eden", "mxfp8-one-copy"])
def test_the_operators_of_one_tensor_give_the_statistics_of_the_next(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the next step, of other rows: nothing but the tensors differs."""
    replays = Traced()
    watched(recipe, monkeypatch, replays)
    assert len(replays.graphs) == 3, "one for x, for w and for dy"
    assert replays.replayed == 2 * 3 * 3 - 3


@pytest.mark.parametrize("recipe", [*RECIPES, "x=nvfp4(search=mse), w=nvfp4(search=four_over_six), dy=mxfp4()"])
def test_nothing_waits_for_the_host(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first call of a kind, which makes tables."""
    waits = []

    class Asked(Replays):
        def __call__(self, function: Any, what: Any, tensors: Sequence[Tensor]) -> Any:
            function(what, tensors)
            with HostWaits() as asked:
                found = function(what, tensors)
            waits.append(asked.operator)
            return found

    watched(recipe, monkeypatch, Asked(), 1)
    assert len(waits) == 9
    assert not any(waits), waits


ROW = torch.arange(4.0)
WAITING = {
    "aten._local_scalar_dense.default": lambda: ROW.sum().item(),
    "aten.nonzero.default": lambda: ROW.nonzero(),
    "aten.masked_select.default": lambda: ROW.masked_select(ROW > 1),
    "aten.index.Tensor": lambda: ROW[ROW > 1],
    "aten.lift_fresh.default": lambda: ROW * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "aten._to_copy.default": lambda: ROW.to("meta"),
    "aten.copy_.default": lambda: (
        ROW.clone().__setitem__(0, 1.0)
        if torch.__version__ < "2.15"  # which fills
        else torch.empty(4, device="meta").copy_(ROW)
    ),
    "": lambda: (ROW[ROW.long()], torch.where(ROW > 1, ROW, 0.0), ROW * torch.tensor(2.0), ROW.masked_fill(ROW > 1, 0)),
}


@pytest.mark.parametrize("operator", WAITING)
def test_what_waits_for_the_host_is_found(operator: str) -> None:
    with HostWaits() as asked:
        WAITING[operator]()
    assert asked.operator == operator


class Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("recipe", "beside", "inside"),
    [("fp8-current", 20, 150), ("fp8-delayed", 20, 150), ("mxfp8", 26, 369), ("nvfp4", 29, 443)],
)
def test_the_host_has_little_to_do(recipe: str, beside: int, inside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators that a layer's three tensors take, in replays and beside them."""
    inner = Count()

    class Kept(Replays):
        known: ClassVar[dict[Any, Any]] = {}

        def __call__(self, function: Any, what: Any, tensors: Sequence[Tensor]) -> Any:
            key = (what, *(one.shape for one in tensors))
            if key not in self.known:
                with inner:
                    self.known[key] = function(what, tensors)
            return self.known[key]

    layer = lpq.convert(nn.Sequential(nn.Linear(64, 64)), recipe)
    x, replays, calls = torch.randn(512, 64, requires_grad=True), Kept(), []
    for first in (0, 0, 1):  # a step that meets new tensors, one that does not, and one that is not watched
        watch = lpq.observe.numerics(layer, every=100, rows=128, step=first)
        monkeypatch.setattr(watch, "_replays", replays)
        with watch.step(), Count() as count:
            layer(x).square().mean().backward()
        calls.append(count.calls)
    assert len(replays.known) == 3
    assert calls[1] - calls[2] <= beside, calls
    assert inner.calls <= inside


def test_a_step_that_is_observed_looks_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the output, which is told of as a tensor in high precision."""
    layer, names = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "fp8-current"), list[str]()

    class Names:
        def observe(self, seen: lpq.observe.Observed) -> None:
            names.append(seen.name)

    def raises(*_: Any) -> None:
        raise AssertionError("the registry was asked")

    for patched in (False, True):
        if patched:
            monkeypatch.setattr(Registry, "provider", raises)
        with lpq.observe.observing(layer, Names()):
            layer(torch.randn(32, 64)).sum().backward()
    assert names == ["x", "w", "y", "dy"] * 2


def test_a_model_without_values_is_refused_in_words() -> None:
    """By statistics and by replays: torch's error, of a scalar or of autocast, named no remedy."""
    with torch.device("meta"):
        net, x = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8"), torch.empty(4, 64)

    def closure() -> Tensor:
        loss: Tensor = net(x).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    watch = lpq.observe.numerics(net, every=1)
    with (
        pytest.raises(lpq.observe.NumericsError, match=r"numerics: x of layer 0, .* is on the meta device"),
        watch.step(),
    ):
        net(x)
    with pytest.raises(lpq.observe.NumericsError, match=r"the loss of a replay is on the meta device.*to_empty"):
        lpq.observe.culprits(net, closure)
    with pytest.raises(lpq.observe.NumericsError, match=r"the loss of a replay is on the meta device.*to_empty"):
        lpq.search(net, closure, error=0.1, recipes=["mxfp8"], gpu="b200")


@pytest.mark.parametrize("owner", ["culprits", "search"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("set_step", r"gives other recipes to layer 0, .*, as lpq\.set_step and lpq\.convert do"),
        ("convert", "gives other recipes to layer 0, "),
        ("write", "writes to weights, so each replay would train the model"),
    ],
)
def test_a_closure_that_changes_what_is_replayed_is_refused(change: str, says: str, owner: str) -> None:
    """Each replay was by the step's own recipes, so that no layer made an error; or by other weights."""
    net: Any = lpq.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "nvfp4", steps=4)
    x = torch.randn(16, 64)

    def closure(change: str = change) -> Tensor:
        if change == "set_step":
            lpq.set_step(net, 1)
        elif change == "convert":
            lpq.convert(net, "nvfp4", steps=4)
        loss: Tensor = net(x).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        if change == "write":
            with torch.no_grad():
                net[0].weight.sub_(net[0].weight.grad)
        return loss

    def found(closure: Any) -> Any:
        if owner == "culprits":
            return lpq.observe.culprits(net, closure)
        return lpq.search(net, closure, error=0.1, recipes=["mxfp8"], gpu="b200")

    with pytest.raises(lpq.observe.NumericsError, match=f"the closure of a replay {says}"):
        found(closure)
    assert [layer.recipe.name for layer in net] == ["nvfp4", "nvfp4"]
    assert found(lambda: closure("")).error > 0.01 or owner == "search"
