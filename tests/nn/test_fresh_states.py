"""The first step of delayed scaling with ``fresh=measure``: it has the bytes of a recipe that measures each tensor,
whatever makes the operands, and later steps read what was remembered."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.comparing import equal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lpq
from lpq.nn import SwiGLU
from lpq.operations.states import measures_fresh
from lpq.registry import PluginError
from lpq.registry.errors import OptionError

STATE = "scaling=delayed, history=3"
FRESH = f"{STATE}, fresh=measure"


def _recipe(options: str, form: str = "x={0}, w={0}, dy={1}") -> str:
    return form.format(f"fp8({options})", f"fp8({options}, dtype=e5m2)".replace("(, ", "("))


FORMS = {
    "alike": "x={0}, w={0}, dy={1}",
    "kept": "x={0}, w={0}, dy={1}, x.save=input, w.save=weight",
    "sides": "x=hybrid(row={0}, col={1}), w=hybrid(row={1}, col={0}), dy=hybrid(row={0}, col={1})",
    "sides_kept": "x=hybrid(row={0}, col={1}), w=hybrid(row={1}, col={0}), dy={1}, x.save=input, w.save=weight",
    "half": "x=hybrid(row={0}, col=mxfp8), w=hybrid(row=mxfp8, col={0}), dy=mxfp8, x.save=input",
    "of_row": "x=hybrid(row={0}, col={1}, col_source=row), w={0}, dy=hybrid(row={1}, col={0}, col_source=row)",
}


def _batch(number: int) -> Tensor:
    """Small: with a scale of 1 it rounds to few values, and its gradients to zero."""
    return (torch.randn(32, 64, generator=torch.Generator().manual_seed(number)) * 1e-3).requires_grad_()


def _net(recipe: str) -> Any:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64)), recipe)


def _pass(net: nn.Module, number: int, run: Callable[..., Tensor] | None = None) -> list[Tensor]:
    x = _batch(number)
    y = net(x) if run is None else run(net, x, use_reentrant=False)
    (y.square().sum() * 1e-4).backward()
    assert x.grad is not None
    return [y.detach().clone(), x.grad.clone()]


def _train(
    net: nn.Module, steps: int = 1, run: Callable[..., Tensor] | None = None, optimizer: Any = None
) -> list[Tensor]:
    """Each step takes two micro-batches."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        for part in range(2):
            found += _pass(net, 2 * step + part, run)
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _memories(net: nn.Module) -> list[Tensor]:
    return [value.clone() for name, value in net.state_dict().items() if "amax" in name]


def _fresh(net: nn.Module) -> set[tuple[str, ...]]:
    return {layer.passes.fresh for layer in net.modules() if hasattr(layer, "passes")}


@pytest.mark.parametrize("form", FORMS)
def test_the_first_step_is_measured_and_later_ones_recall(form: str) -> None:
    recipes = [_recipe(options, FORMS[form]) for options in (FRESH, "", STATE)]
    first = [_train(_net(recipe)) for recipe in recipes]
    assert equal(first[0], first[1])
    assert not equal(first[0], first[2]), "the default recalls an empty state"
    net = _net(recipes[0])
    assert () not in _fresh(net)
    found = _train(net, 3)
    assert _fresh(net) == {()}
    assert not equal(found, _train(_net(recipes[1]), 3)), "later steps recall"
    before = _memories(net)
    assert all(b.any() for b in before)


def test_what_is_remembered_does_not_depend_on_how_the_first_step_was_encoded() -> None:
    nets = [_net(_recipe(options, "x={0}, w=bf16, dy=bf16")) for options in (FRESH, STATE)]
    for net in nets:
        _pass(net[0], 0)
    assert equal(_memories(nets[0][0]), _memories(nets[1][0]))


@pytest.mark.parametrize(("form", "backend"), [("alike", "eager"), ("sides_kept", "aot_eager")])
@pytest.mark.starts
def test_compiled(form: str, backend: str) -> None:
    """Two models share compiled code, and each has its own first step."""
    torch.compiler.reset()  # or torch, which compiles a function eight times, may leave it uncompiled
    recipe = _recipe(FRESH, FORMS[form])
    expected = _train(_net(recipe), 3)
    for _ in range(2):
        net = _net(recipe)
        net.compile(backend=backend)
        assert equal(_train(net, 3), expected)
        assert _fresh(net) == {()}


def test_checkpointed() -> None:
    nets = [_net(_recipe(FRESH)) for _ in range(2)]
    assert equal(_train(nets[0], 3), _train(nets[1], 3, checkpoint))
    assert equal(_memories(nets[0]), _memories(nets[1]))


def test_evaluation_and_steps_of_others_leave_it_fresh() -> None:
    net, other = _net(_recipe(FRESH)), nn.Linear(2, 2)
    with torch.no_grad():
        y = net(_batch(0))
        assert torch.equal(y, _net(_recipe(""))(_batch(0)))
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert () not in _fresh(net), "its states are empty still"
    assert equal(_train(net), _train(_net(_recipe(""))))


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("how", ["state_dict", "file", "deepcopy", "pickle", "in_place"])
def test_going_on_is_going_on(how: str, steps: int) -> None:
    recipe = _recipe(FRESH)
    net = _net(recipe)
    _train(net, steps)
    if how == "deepcopy":
        again = copy.deepcopy(net)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(net))
    else:
        again = _net(recipe)
        state = net.state_dict()
        if how == "file":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        if how == "in_place":
            with torch.no_grad():
                for name, tensor in again.state_dict().items():
                    tensor.copy_(state[name])
        else:
            again.load_state_dict(state)
    assert equal(_train(again, 2), _train(net, 2))
    assert equal(_memories(again), _memories(net))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_with_states_that_moved_is_not_fresh_from_its_first_pass_on(copied: Callable[[Any], Any]) -> None:
    """A layer found it out within the first pass, after the block around it had run the layers apart: activation
    checkpointing, which ran them as one function, found other tensors than the first run had saved."""
    torch.manual_seed(0)
    block, x = lpq.convert(SwiGLU(64, 96), _recipe(FRESH)), torch.randn(8, 64)
    block(x).sum().backward()
    found = []
    for run in (block.__class__.__call__, lambda net, x: checkpoint(net, x, use_reentrant=False)):
        net = copied(block)
        net.zero_grad()
        run(net, x).sum().backward()
        found.append([p.grad for p in net.parameters()])
    assert equal(*found)


def _out_of_a_legacy_file(net: Any) -> Any:
    """Such a file has the values of tensors behind the layers."""
    file = io.BytesIO()
    torch.save(net, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, _out_of_a_legacy_file])
def test_a_copy_is_fresh_where_the_states_of_its_layer_have_not_moved(
    copied: Callable[[Any], Any], moved: bool
) -> None:
    nets = [_net(_recipe(FRESH)) for _ in range(8)]
    for net in nets if moved else ():
        _pass(net, 0)
    assert all(any(_fresh(net)) for net in nets), "until a step of an optimizer ends it"
    copies = [[copied(layer) for layer in net.modules() if isinstance(layer, lpq.nn.Layer)] for net in nets]
    assert {bool(layer.passes.fresh) for net in copies for layer in net} == {not moved}
    assert all(any(_fresh(net)) for net in nets)


def test_a_state_dict_without_memories_starts_afresh() -> None:
    net = _net(_recipe(FRESH))
    _train(net)
    net.load_state_dict({name: tensor for name, tensor in net.state_dict().items() if "amax" not in name})
    assert () not in _fresh(net)
    _train(net)
    assert _fresh(net) == {()}
    for layer in (net[0], net[2]):
        layer.recipe = "fp8-current"
        layer.recipe = _recipe(FRESH)
    assert () not in _fresh(net)
    _train(net)
    assert _fresh(net) == {()}


def test_held_and_frozen_weights() -> None:
    found = []
    for options in (FRESH, ""):
        net = _net(_recipe(options))
        with lpq.hold_weights(net):
            found.append([*_pass(net, 0), *_pass(net, 1)])
    assert equal(*found)
    found = []
    for options in (FRESH, ""):
        net = _net(_recipe(options))
        net[0].weight.requires_grad_(False)
        found.append(_train(net))
    assert equal(*found)
    assert _fresh(net) == {()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(64, eps=1e-6), SwiGLU(64, 96)
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z: Tensor = self.mlp(self.q(y) * self.k(y))
        return z


@pytest.mark.parametrize("recipe", ["alike", "half"])
def test_producers_wait_for_the_first_step(recipe: str) -> None:
    """A norm, and an MLP, that encode for layers by their states."""

    def build(options: str) -> Any:
        torch.manual_seed(0)
        return lpq.convert(Block(), _recipe(options, FORMS[recipe]))

    nets = [build(options) for options in (FRESH, "", FRESH)]
    assert len(lpq.report(lpq.fuse(nets[0])).fused) == 2
    found = [_train(net, 1) for net in nets]
    assert equal(*found[:2])
    assert equal(_train(nets[0], 2), _train(nets[2], 2))
    assert equal(_memories(nets[0]), _memories(nets[2]))


def test_layers_that_no_gradient_passes_are_measured_in_every_step() -> None:
    """As the first layers of a frozen backbone; control: without it they keep the scale of 1."""
    found = {}
    for options in ("", FRESH, STATE):
        net = _net(_recipe(options))
        net[0].requires_grad_(False)
        optimizer = torch.optim.SGD(net[2].parameters(), lr=0.1)
        for number in range(3):
            x = _batch(number).detach()
            net(x).square().mean().backward()
            optimizer.step()
        found[options] = net[0](x)
    assert torch.equal(found[FRESH], found[""])
    assert not torch.equal(found[STATE], found[""])


def test_it_is_refused_without_a_state() -> None:
    with pytest.raises(OptionError, match=r"fresh.*must be 'recall' but for scaling=delayed"):
        lpq.quantizer("fp8(fresh=measure)")
    new = replace(lpq.quantizer("mxfp8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(new), "fresh", "measure")
        with pytest.raises(PluginError, match="mxfp8 has fresh='measure', and no state"):
            new.ready()
    static = lpq.quantizer(f"fp8({FRESH})").frozen()
    assert static.state
    assert not measures_fresh(static)
