"""After a step of MasterWeights that raised: weights are as they were, masters as far as the step came, and the next
step encodes the ones from the others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparing import copy_bytes, equal
from torch import Tensor, nn
from torch.optim import SGD, Adagrad

import lpq
from lpq.core import QuantizedTensor
from lpq.optim import MasterWeights
from lpq.tensor import encode_writes as writing

pytestmark = pytest.mark.filterwarnings("error", "ignore:masters begin with")


class Mishap(Exception):
    """An error in a step."""


class Failing(SGD):
    """Raises once its step has updated this many parameters."""

    reaches: int | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, p in enumerate(self.param_groups[0]["params"]):
            if number == self.reaches:
                raise Mishap
            if p.grad is not None:
                p.sub_(p.grad)


def _made(recipe: str = "mxfp8") -> tuple[list[Any], MasterWeights]:
    """Three weights, of which the last one has no gradient, and their optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    weights = [layer.weight for layer in lpq.convert(model, recipe, weights="quantized")]
    _give_gradients(weights)
    return weights, MasterWeights(Failing(weights, lr=1.0))


def _give_gradients(weights: list[Any]) -> None:
    for number, weight in enumerate(weights[:2]):
        weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(number))


def _fail(optimizer: MasterWeights, reaches: int = 1) -> None:
    assert isinstance(optimizer.optimizer, Failing)
    optimizer.optimizer.reaches = reaches
    with pytest.raises(Mishap):
        optimizer.step()
    optimizer.optimizer.reaches = None


def _bytes(weights: list[Any]) -> list[list[Tensor]]:
    return [[copy_bytes(t) for _, side in w.operands for t in side.tensors()] for w in weights]


def _same(a: list[list[Tensor]], b: list[list[Tensor]]) -> list[bool]:
    return [equal(x, y) for x, y in zip(a, b, strict=True)]


def _of_masters(optimizer: MasterWeights) -> list[list[Tensor]]:
    """Encode the masters by themselves."""
    made: list[Any] = []
    for weight, master in optimizer.masters.items():
        assert isinstance(weight, QuantizedTensor)
        held = {"row": weight.row is not None, "col": weight.col is not None}
        made.append(weight.quantizer.quantize(master.detach().to(weight.dtype), **held))
    return _bytes(made)


def test_a_step_that_raised_leaves_the_weights_and_the_next_one_encodes_the_masters_that_it_moved() -> None:
    weights, optimizer = _made()
    before, masters = _bytes(weights), [m.detach().clone() for m in optimizer.masters.values()]
    _fail(optimizer)
    assert _same(_bytes(weights), before) == [True] * 3
    moved = [not torch.equal(m, was) for m, was in zip(optimizer.masters.values(), masters, strict=True)]
    assert moved == [True, False, False]
    assert all(m.grad is None for m in optimizer.masters.values())
    optimizer.zero_grad()
    optimizer.step()  # in which no weight has a gradient
    assert _same(_bytes(weights), before)[::2] == [False, True]
    assert _same(_bytes(weights), _of_masters(optimizer))[:2] == [True, True]
    now = _bytes(weights)
    optimizer.step()
    assert _same(_bytes(weights), now) == [True] * 3


def test_a_closure_that_raises_changes_nothing() -> None:
    weights, optimizer = _made()
    before, masters = _bytes(weights), [m.detach().clone() for m in optimizer.masters.values()]

    def closure() -> float:
        raise Mishap

    with pytest.raises(Mishap):
        optimizer.step(closure)
    optimizer.zero_grad()
    optimizer.step()
    assert _same(_bytes(weights), before) == [True] * 3
    assert all(map(torch.equal, optimizer.masters.values(), masters))


def _unlucky(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding writes one weight, and raises."""
    overwrite, written = writing.overwrite, []

    def once(target: QuantizedTensor, *how: Any) -> None:
        if written:
            raise Mishap
        written.append(target)
        overwrite(target, *how)

    monkeypatch.setattr(writing, "overwrite", once)


@pytest.mark.parametrize("what", ["step", "encode"])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-current"])
def test_weights_that_were_not_all_encoded_are_so_by_the_next_step(
    recipe: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, optimizer = _made(recipe)
    if what == "encode":
        for master in optimizer.masters.values():
            master.detach().mul_(-3)
    before = _bytes(weights)
    with monkeypatch.context() as patch:
        _unlucky(patch)
        with pytest.raises(Mishap):
            getattr(optimizer, what)()
    assert _same(_bytes(weights), before) == [False, True, True]
    optimizer.zero_grad()
    optimizer.step()
    assert _same(_bytes(weights), before) == [False, False, what == "step"]
    assert _same(_bytes(weights), _of_masters(optimizer))[:2] == [True, True]


def test_a_weight_that_is_written_to_after_the_error_is_refused_as_ever() -> None:
    weights, optimizer = _made()
    _fail(optimizer)
    with torch.no_grad():
        weights[0].fill_(2)
    with pytest.raises(RuntimeError, match="was written to since its master was made"):
        optimizer.step()


@pytest.mark.parametrize("side", ["take", "seen", "load_state_dict"])
def test_who_says_which_side_is_right_is_believed(side: str) -> None:
    weights, optimizer = _made()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    before, masters = _bytes(weights), [m.detach().clone() for m in optimizer.masters.values()]
    _fail(optimizer)
    if side == "load_state_dict":
        optimizer.load_state_dict(saved)
        assert all(map(torch.equal, optimizer.masters.values(), masters))
    else:
        for weight in weights:
            getattr(optimizer, side)(weight)
    optimizer.zero_grad()
    optimizer.step()
    assert _same(_bytes(weights), before) == [True] * 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_knows_it_too(copied: Callable[[Any], Any]) -> None:
    weights, optimizer = _made()
    _fail(optimizer)
    before = _bytes(weights)
    others, other = copied((weights, optimizer))
    other.zero_grad()
    other.step()
    assert _same(_bytes(others), before)[::2] == [False, True]
    assert _same(_bytes(weights), before) == [True] * 3


@pytest.mark.parametrize("ways", [{"fused": True}, {"foreach": True}, {}], ids=["fused", "foreach", "plain"])
def test_gradients_may_be_emptied_before_the_step_has_ended(ways: dict[str, bool]) -> None:
    """By a hook of the wrapped optimizer; autograd does not count what fused ones write."""
    model = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8", weights="quantized")
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, **ways)  # type: ignore[arg-type]
    inner.register_step_post_hook(lambda *_: model.zero_grad())
    optimizer = MasterWeights(inner)
    weight = model[0].weight  # type: ignore[union-attr, index]
    before = _bytes([weight])
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    assert _same(_bytes([weight]), before) == [False]
    assert _same(_bytes([weight]), _of_masters(optimizer)) == [True]


class Refusing(SGD):
    """Refuses groups that are added."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "refuses"):
            raise Mishap
        super().add_param_group(param_group)


@pytest.mark.parametrize("refuses", ["wrapped", "twice"])
def test_a_group_that_is_refused_is_in_neither_optimizer(refuses: str) -> None:
    """The outer one had it: its next step raised that the groups are not as many as the wrapped optimizer's."""
    weights, _ = _made()
    inner: Any = Refusing(weights[:1], lr=1.0)
    optimizer = MasterWeights(inner)
    if refuses == "wrapped":
        inner.refuses = True
        with pytest.raises(Mishap):
            optimizer.add_param_group({"params": weights[1:]})
        del inner.refuses
    else:
        with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match=r"stands in .* twice"):
            optimizer.add_param_group({"params": [weights[1], weights[1]]})
    assert len(optimizer.param_groups) == len(inner.param_groups) == len(optimizer.masters) == 1
    with torch.no_grad():
        weights[1].fill_(2)
    before = _bytes(weights)
    optimizer.step()
    assert _same(_bytes(weights), before) == [False, True, True]
    optimizer.add_param_group({"params": weights[1:]})
    optimizer.step()
    assert _same(_bytes(weights), before) == [False, False, True]
    assert _same(_bytes(weights), _of_masters(optimizer))[:2] == [True, True]


def test_an_optimizer_that_is_refused_at_a_later_group_stays_as_it_was() -> None:
    """Its earlier groups held copies then, which a step would have trained in place of the weights."""
    weights, _ = _made()
    with pytest.warns(UserWarning, match="duplicate"):
        inner = Adagrad([{"params": weights[:1]}, {"params": [weights[1]] * 2}], lr=1.0)
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match=r"stands in .* twice"):
        MasterWeights(inner)
    assert [[id(p) for p in group["params"]] for group in inner.param_groups] == [
        [id(weights[0])],
        [id(weights[1])] * 2,
    ]
    assert {id(p) for p in inner.state} == {id(weight) for weight in weights[:2]}
    inner.param_groups[1]["params"].pop()
    optimizer = MasterWeights(inner)
    assert len(optimizer.masters) == 2
    assert {id(p) for p in inner.state} == {id(p) for p in optimizer.masters.values()}
    before = _bytes(weights)
    optimizer.step()
    assert _same(_bytes(weights), before) == [False, False, True]


def test_a_tensor_without_a_master_is_not_taken_note_of() -> None:
    weights, optimizer = _made()
    for other in (torch.ones(3), nn.Parameter(torch.ones(64, 64)), weights[0].detach()):
        optimizer.take(other)
        optimizer.seen(other)
    with torch.no_grad():
        weights[0].fill_(2)
    with pytest.raises(RuntimeError, match="was written to since its master was made"):
        optimizer.step()
    optimizer.seen(weights[0])
    optimizer.step()
