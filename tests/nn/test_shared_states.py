"""Layers that share what they remember of inputs take inputs that were encoded by it. They compute, to the bit, what
they compute where each of them has a history of its own."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import equal, equal_states
from support.encoding_norm import block
from support.passes import Run, plainly, recomputed, watched
from torch import Tensor, nn

import lpq
from lpq import checkpoint as checkpoints
from lpq.nn.shared_states import shared_state

HYBRID = "hybrid(row=fp8(scaling=delayed, history=2), col=fp8(scaling=delayed, history=3, dtype=e5m2))"
RECIPES = ["fp8-delayed", "x=fp8(scaling=delayed, history=2), w=mxfp8, dy=mxfp8", f"x={HYBRID}, w=mxfp8, dy=mxfp8"]


def given(number: int) -> Tensor:
    draw = torch.Generator().manual_seed(number)
    return (torch.randn(2, 16, 32, generator=draw) * (1 + 3 * number)).requires_grad_()


def steps(module: Any, run: Run = plainly, count: int = 3, first: int = 0) -> list[Tensor]:
    """y, dx, gradients and histories of each step."""
    found = []
    for number in range(first, first + count):
        x = given(number)
        module.zero_grad()
        y = run(module, x)
        y.backward(torch.sin(y.detach()), retain_graph=run is not recomputed)
        if run is not recomputed:
            y.backward(torch.cos(y.detach()))  # moves nothing more
        with torch.no_grad():
            module(given(9))
        found += [y.detach(), x.grad, *[p.grad.clone() for p in module.parameters()]]
        found += [v.clone() for name, v in sorted(module.state_dict().items())]
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("run", [plainly, watched, recomputed])
def test_an_encoded_input_equals_one_that_each_layer_encodes(recipe: str, run: Run) -> None:
    apart, fused = block(recipe, fused=False), block(recipe)
    assert equal(steps(fused, run), steps(apart, run))
    names = [memory.name for memory in fused.layers[0].state_buffers() if memory.tensor == "x"]
    for name in names:
        q, k, v = (getattr(layer, name) for layer in fused.layers)
        assert q is k is v
        assert q.any()
        assert getattr(apart.layers[0], name) is not getattr(apart.layers[1], name)


def test_it_is_another_history_that_makes_another_result() -> None:
    fused = block()
    steps(fused)
    other = copy.deepcopy(fused)
    other.layers[0].x_amax.fill_(100.0)
    assert not equal(steps(fused), steps(other))


def both(recipe: str, change: Any, passes: int = 2) -> tuple[Any, Any]:
    """A model whose layers encode their inputs and one whose producer does, after some passes."""
    made = block(recipe, fused=False), block(recipe)
    for module in made:
        change(module)
        for number in range(passes):
            module(given(number)).sum().backward()
    return made


@pytest.mark.parametrize("frozen", ["scale", "layers.0", "layers.1", "layers.2", "layers"])
@pytest.mark.parametrize("recipe", RECIPES[::2])
def test_frozen_parts_move_what_the_others_multiply(frozen: str, recipe: str) -> None:
    """In whichever order backward comes to them; where all layers are frozen, the operand that they multiply."""

    def freeze(module: Any) -> None:
        part = module.scale if frozen == "scale" else module.get_submodule(frozen)
        part.requires_grad_(False)

    apart, fused = both(recipe, freeze)
    amaxes = [m.name for m in fused.layers[1].state_buffers() if m.tensor == "x" and not m.name.endswith("history")]
    whole = frozen == "layers" and recipe == RECIPES[2]
    assert [bool(getattr(fused.layers[1], name) > 0) for name in amaxes] == (
        [True, False] if whole else [True] * len(amaxes)
    )
    if whole or frozen == "scale" or recipe == RECIPES[0]:
        assert equal_states(fused.state_dict(), apart.state_dict())
    else:  # a frozen layer apart remembers nothing of an operand that it does not multiply
        trained = int(frozen == "layers.0")
        assert equal_states(fused.layers[trained].state_dict(), apart.layers[trained].state_dict())


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_layer_of_an_input_without_a_gradient_skips_no_pass(frozen: int) -> None:
    """It has no backward. The other layers move the state, as they do apart."""
    apart, fused = block(fused=False), block()
    trained = [layer for layer in range(3) if layer != frozen]
    for number in range(3):
        outputs = []
        for module in (apart, fused):
            module.scale.requires_grad_(False)
            module.layers[frozen].requires_grad_(False)
            outputs.append(module(given(number).detach()))
            outputs[-1].square().sum().backward()
        assert number or torch.equal(*outputs)
    assert fused.layers[frozen].x_amax is fused.layers[trained[0]].x_amax
    for layer in trained:
        ours, theirs = (module.layers[layer].x_amax_history for module in (fused, apart))
        assert torch.equal(ours, theirs)
        assert ours.count_nonzero() == 3


def test_gradients_asked_for_one_by_one_are_no_step() -> None:
    apart, fused = block(fused=False), block()
    for module in (apart, fused):
        for number in range(2):
            y = module(given(number)).square().sum()
            torch.autograd.grad(y, [module.scale], retain_graph=True)
            assert number or not module.layers[1].x_amax
            y.backward()
    assert equal_states(fused.state_dict(), apart.state_dict())


def test_a_layer_that_skips_a_pass_is_named() -> None:
    fused = block()
    steps(fused)
    fused.skipped = 1
    before = fused.layers[1].x_amax_history.clone()
    words = r"layers\.1, .* shares its states of inputs with layer layers\.0.*, layer layers\.2.* did not get"
    with pytest.raises(RuntimeError, match=words):
        fused(given(0)).sum().backward()
    assert torch.equal(fused.layers[1].x_amax_history, before)
    with torch.no_grad():
        fused(given(0))


def test_runs_that_would_be_recomputed_from_moved_states_are_refused() -> None:
    fused = block("x=fp8(scaling=delayed), w=mxfp8, dy=mxfp8")
    first, second = (recomputed(fused, given(number)).sum() for number in range(2))
    first.backward()
    with pytest.raises(RuntimeError, match=r"layers\..*activation checkpointing runs it again in backward"):
        second.backward()


def test_a_view_of_the_whole_is_taken_and_a_part_is_not() -> None:
    fused = block()
    x = fused.norm(given(0))
    sum(layer(x.view(-1, 32)).sum() for layer in fused.layers).backward()
    assert fused.layers[0].x_amax > 0
    for other in (x[:1], lpq.quantizer("fp8").quantize(given(0))):
        with pytest.raises(ValueError, match=r"layers\.0, .* remembers .*, which did not encode it: pass the tensor"):
            fused.layers[0](other)
    x = fused.norm(given(0))
    with torch.no_grad():
        x.copy_(given(1))
    with pytest.raises(ValueError, match="which did not encode it"):
        fused.layers[0](x)


def test_states_that_differ_are_refused_by_name() -> None:
    apart = block(fused=False)
    steps(apart, count=1)
    apart.layers[1](given(5)).sum().backward()
    apart.fused = True
    words = r"layers\.0, .* and layer layers\.1, .* cannot share their states of x: x_amax differs.*functional_call"
    with pytest.raises(ValueError, match=words):
        apart(given(0))
    assert apart.layers[0].passes.borrowed == apart.layers[1].passes.borrowed == ()
    apart.layers[1].recipe = "x=fp8(scaling=delayed, history=2), w=mxfp8, dy=mxfp8"
    with pytest.raises(ValueError, match=r"one has x=fp8\(scaling=delayed\), and the other x=fp8\(.*history=2"):
        apart(given(0))
    assert shared_state([*block("mxfp8").layers]) is None


def test_another_recipe_or_device_ends_it() -> None:
    fused = block()
    steps(fused, count=1)
    fused.layers[1].recipe = "mxfp8"
    assert not [key for key in fused.state_dict() if key.startswith("layers.1.x")]
    assert fused.layers[1].passes.borrowed == ()
    assert fused.layers[2].passes.borrowed == ("x_amax_history", "x_amax")
    fused.to("meta")
    assert fused.layers[2].passes.borrowed == ()


def test_buffers_that_an_evaluation_makes_are_moved_afterwards() -> None:
    """The first layer gets another recipe, and the next one buffers of its own in the next pass. Made under inference
    mode, these could not be moved, and backward failed."""
    fused = block()
    steps(fused, count=1)
    fused.layers[0].recipe = "mxfp8"
    with torch.inference_mode():
        assert shared_state([*fused.layers][1:])
    assert fused.layers[1].passes.borrowed == ()
    fused.layers[1](given(1)).sum().backward()
    assert fused.layers[2].x_amax == given(1).abs().max()


def test_layers_that_encode_for_themselves_have_states_of_their_own_again() -> None:
    apart, fused = block(fused=False), block()
    assert equal(steps(fused), steps(apart))
    fused.fused = False
    assert equal(steps(fused), steps(apart))
    assert len({id(layer.x_amax) for layer in fused.layers}) == 3
    fused.fused = True
    assert equal(steps(fused), steps(apart))
    assert len({id(layer.x_amax) for layer in fused.layers}) == 1


def test_copies_pickles_moves_and_state_dicts() -> None:
    """Copies of a model share among themselves. What is loaded into a layer stays in that layer."""
    apart, fused = block(fused=False), block()
    assert equal(steps(fused), steps(apart))
    keys = fused.state_dict()
    assert keys.keys() == apart.state_dict().keys()
    places = [v.untyped_storage().data_ptr() for v in keys.values()]
    assert len(set(places)) == len(places), "safetensors refuses keys that share memory"
    expected = steps(copy.deepcopy(apart), first=3)
    saved = io.BytesIO()
    torch.save(fused, saved)
    saved.seek(0)
    pickled = torch.load(saved, weights_only=False)
    loaded = block()
    loaded.load_state_dict(keys)
    shared = block()
    steps(shared, count=1)
    shared.load_state_dict(keys)
    assigned = block()
    assigned.load_state_dict({key: value.clone() for key, value in keys.items()}, assign=True)
    for module in (copy.deepcopy(fused), pickled, loaded, shared, assigned, fused.to("cpu", torch.float32)):
        assert equal(steps(module, first=3), expected)
        assert module.layers[2].x_amax is module.layers[0].x_amax
    assert pickled.layers[0].x_amax is not fused.layers[0].x_amax


def _loaded(there: nn.Module, here: nn.Module, path: Path) -> None:
    here.load_state_dict(there.state_dict())


def _from_checkpoint(there: nn.Module, here: nn.Module, path: Path) -> None:
    checkpoints.save(there, path)
    checkpoints.load(here, path)


def _from_file(there: nn.Module, here: nn.Module, path: Path) -> None:
    checkpoints.import_file(here, lpq.export(there, path, layout="lpq").path)


@pytest.mark.parametrize("load", [_loaded, _from_checkpoint, _from_file])
def test_histories_that_differ_are_not_mixed_when_they_are_loaded(load: Any, tmp_path: Path) -> None:
    """The last of them would win, in silence. Histories that were saved while they were shared are equal."""
    apart, fused = block(fused=False), block()
    steps(fused)
    steps(apart)
    apart.layers[1](given(8)).sum().backward()
    other, expected = copy.deepcopy(fused), steps(copy.deepcopy(fused))
    load(apart, fused, tmp_path / "apart")
    assert equal_states(fused.state_dict(), apart.state_dict())
    with pytest.raises(ValueError, match=r"layers\.0.*layers\.1.*cannot share .*x_amax differs"):
        fused(given(0))
    load(other, fused, tmp_path / "shared")
    assert equal(steps(fused), expected)
