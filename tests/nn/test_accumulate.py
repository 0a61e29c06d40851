"""Backward may add the gradient of a weight in place: to ``.grad``, or to ``.main_grad`` in the dtype that this has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lpq
from lpq.torch_private import autograd

RECIPES = ["fp8-current", "fp8-delayed", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", "nvfp4"]


def _model(recipe: str, **how: Any) -> Any:
    torch.manual_seed(0)
    return lpq.convert(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64)).bfloat16(), recipe, **how)


def _backward(model: Any, number: int) -> None:
    """Compute the gradients of one micro-batch."""
    torch.manual_seed(number)
    model(torch.randn(32, 64, dtype=torch.bfloat16)).float().square().mean().backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_sum_in_grad_is_autograds(recipe: str) -> None:
    ordinary, ours = _model(recipe), _model(recipe, accumulate="grad")
    for number in range(3):
        _backward(ordinary, number)
    _backward(ours, 0)
    first = ours[0].weight.grad
    assert first is not None
    for number in range(1, 3):
        _backward(ours, number)
    assert ours[0].weight.grad is first, "it is added to in place"
    for p, q in zip(ordinary.parameters(), ours.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("recipe", RECIPES)
def test_main_grad_sums_in_its_own_dtype(recipe: str) -> None:
    model, single = _model(recipe, accumulate="main_grad"), _model(recipe, accumulate="main_grad")
    for layer in (model[0], model[2], single[0], single[2]):
        layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=torch.float32)
    parts = []
    for number in range(3):
        for net in (model, single):
            _backward(net, number)
        parts.append(single[0].weight.main_grad.clone())
        single[0].weight.main_grad.zero_()
    assert torch.equal(model[0].weight.main_grad, parts[0] + parts[1] + parts[2])
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None
    rounded = torch.equal(parts[0], parts[0].bfloat16().float())
    assert rounded == ("wgrad=bf16" in recipe), "only an ordinary product of bf16 is rounded to bf16"


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="'grad', 'main_grad' or None"):
        _model("fp8-current", accumulate="gradient")
    model = _model("fp8-current", accumulate="main_grad")
    with pytest.raises(RuntimeError, match="its weight has none"):
        model(torch.randn(32, 64, dtype=torch.bfloat16))
    weight = model[0].weight
    for wrong, words in (
        (torch.zeros(weight.shape, dtype=torch.int32), "torch.int32"),
        (torch.zeros(2, *weight.shape), r"torch.Size\(\[2, "),
        (torch.zeros(weight.shape, device="meta"), "meta"),
        ("zeros", "None"),
    ):
        weight.main_grad = wrong
        with pytest.raises(RuntimeError, match=f"its weight has .*{words}.*: set weight.main_grad to zeros"):
            model(torch.randn(32, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="does not work with weights='high_precision', which FSDP2 shards"):
        _model("fp8-current", weights="high_precision", accumulate="grad")
    sharded = lpq.convert(_model("fp8-current", weights="high_precision"), "fp8-current", accumulate="grad")
    with pytest.raises(RuntimeError, match="FSDP2"):
        sharded(torch.randn(32, 64, dtype=torch.bfloat16))


def test_main_grad_is_asked_for_only_where_there_will_be_a_gradient() -> None:
    model, x = _model("fp8-current", accumulate="main_grad"), torch.randn(32, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        y = model(x)
    model.requires_grad_(False)
    assert torch.equal(model(x), y)
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="its weight has none"):
        model(x)


@pytest.mark.parametrize("emptied", [lambda w: setattr(w, "main_grad", None), lambda w: delattr(w, "main_grad")])
def test_a_main_grad_that_is_gone_before_backward_is_no_reason_to_sum_elsewhere(emptied: Any) -> None:
    model = _model("fp8-current", accumulate="main_grad")
    for layer in model[::2]:
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    y = model(torch.randn(32, 64, dtype=torch.bfloat16))
    emptied(model[0].weight)
    with pytest.raises(
        RuntimeError, match=r"had a main_grad in forward and has none in backward.*: empty it with zero_"
    ):
        y.sum().backward()
    assert model[0].weight.grad is None


def test_a_compiled_model_leaves_the_layer_uncompiled() -> None:
    model, twin = (_model("fp8-current", accumulate="grad") for _ in range(2))
    compiled = torch.compile(model, backend="eager")
    for number in range(2):
        _backward(compiled, number)
        _backward(twin, number)
    assert torch.equal(model[0].weight.grad, twin[0].weight.grad)


def test_it_is_taken_back_by_converting_again() -> None:
    model = _model("fp8-current", accumulate="grad")
    assert model[0].model.accumulate == "grad"
    assert lpq.convert(model, "fp8-current")[0].model.accumulate is None


def _hooked(model: Any) -> list[tuple[str, Any]]:
    """Record arguments of the first weight's hooks: the gradient; ``.grad`` and ``.main_grad`` once it is summed."""
    weight, seen = model[0].weight, []

    def kept(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.clone()

    weight.register_hook(lambda grad: seen.append(("tensor", kept(grad))))
    weight.register_post_accumulate_grad_hook(
        lambda w: seen.append(("post", (kept(w.grad), kept(getattr(w, "main_grad", None)))))
    )
    return seen


def test_hooks_are_called_and_tensor_hooks_see_no_gradient_where_backward_sums_in_grad() -> None:
    model, ordinary = _model("fp8-current", accumulate="grad"), _model("fp8-current")
    seen, usual = _hooked(model), _hooked(ordinary)
    for net in (model, ordinary):
        _backward(net, 0)
        _backward(net, 1)
    assert [name for name, _ in seen] == [name for name, _ in usual] == ["tensor", "post"] * 2
    assert torch.equal(seen[0][1], usual[0][1]), "the first backward is autograd's own"
    assert seen[2][1] is None
    assert usual[2][1] is not None
    for at in (1, 3):
        assert torch.equal(seen[at][1][0], usual[at][1][0])
    assert not torch.equal(seen[1][1][0], seen[3][1][0])


def test_hooks_are_called_and_find_the_sum_in_main_grad() -> None:
    model = _model("fp8-current", accumulate="main_grad")
    for layer in (model[0], model[2]):
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    seen = _hooked(model)
    for number in range(2):
        _backward(model, number)
        (tensor, none), (post, (grad, main_grad)) = seen[-2:]
        assert (tensor, none, post, grad) == ("tensor", None, "post", None)
        assert torch.equal(main_grad, model[0].weight.main_grad)
        assert main_grad.any()
    assert len(seen) == 4


def _with_sums(where: Any) -> Any:
    """A model of which nothing was summed yet, but for zeros."""
    model = _model("fp8-current", accumulate=where)
    for layer in (model[0], model[2]):
        dtype = torch.float32 if where == "main_grad" else torch.bfloat16
        setattr(layer.weight, where, torch.zeros(layer.weight.shape, dtype=dtype))
    return model


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).float().square().mean()
    return loss


@pytest.mark.parametrize("where", ["grad", "main_grad"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_who_asks_autograd_for_gradients_gets_them_and_nothing_is_summed(where: Any, checkpointed: bool) -> None:
    model, ordinary = _with_sums(where), _model("fp8-current")
    torch.manual_seed(1)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)

    for asked in ([0], [1], [0, 1, 2], [1, 2]):
        ours, theirs = ([x, net[0].weight, net[2].weight] for net in (model, ordinary))
        got = torch.autograd.grad(_loss(run, x), [ours[i] for i in asked])
        expected = torch.autograd.grad(_loss(ordinary, x), [theirs[i] for i in asked])
        assert all(map(torch.equal, got, expected))
        assert all(g.dtype == torch.bfloat16 for g in got)
        assert not any(getattr(layer.weight, where).any() for layer in (model[0], model[2]))
    _loss(run, x).backward()
    _loss(ordinary, x).backward()
    for net, twin in zip((model[0], model[2]), (ordinary[0], ordinary[2]), strict=True):
        assert torch.equal(getattr(net.weight, where).bfloat16(), twin.weight.grad)


@pytest.mark.parametrize("where", ["grad", "main_grad"])
def test_backward_to_some_inputs_sums_in_these_alone(where: Any) -> None:
    model, x = _with_sums(where), torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    first, last = (getattr(model[i].weight, where) for i in (0, 2))
    _loss(model, x).backward(inputs=[x])
    assert x.grad is not None
    assert not first.any()
    assert not last.any()
    _loss(model, x).backward(inputs=[model[2].weight])
    assert not first.any()
    assert last.any()
    assert getattr(model[2].weight, where) is last, "it is added to in place"


def test_it_is_asked_at_little_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each layer that sums, and never for others."""
    asked = 0
    ask = autograd.will_execute

    def counting(node: Any) -> bool:
        nonlocal asked
        asked += 1
        return ask(node)

    monkeypatch.setattr(autograd, "will_execute", counting)
    _backward(_model("fp8-current"), 0)
    assert asked == 0
    _backward(_with_sums("grad"), 0)
    assert asked == 2
