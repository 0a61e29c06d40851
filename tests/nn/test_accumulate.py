"""Backward may add the gradient of a weight in place: to ``.grad``, or to ``.main_grad`` in the dtype that this has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.comparing import equal
from support.passes import Run, plainly, recomputed
from support.small_models import converted
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import cached

import lpq
from lpq.torch_private import autograd

RECIPES = ["fp8-current", "fp8-delayed", "fprop=mxfp8, dgrad=nvfp4, wgrad=bf16", "nvfp4"]


def model(recipe: str = "fp8-current", **how: Any) -> Any:
    return converted(recipe, 64, 48, 64, dtype=torch.bfloat16, between=nn.ReLU, **how)


def summing(where: Any, recipe: str = "fp8-current") -> Any:
    """A model of which nothing was summed yet, but for zeros."""
    made = model(recipe, accumulate=where)
    for layer in made[::2]:
        zeros = torch.zeros(layer.weight.shape, dtype=torch.float32 if where == "main_grad" else torch.bfloat16)
        setattr(layer.weight, where, zeros)
    return made


def batch(number: int = 0) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(number)).bfloat16().requires_grad_()


def loss(net: Any, x: Tensor | int, run: Run = plainly) -> Tensor:
    """The loss of a micro-batch."""
    torch.manual_seed(0)
    return run(net, batch(x) if isinstance(x, int) else x).float().square().mean()


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_sum_in_grad_is_autograds(recipe: str) -> None:
    ordinary, ours = model(recipe), model(recipe, accumulate="grad")
    sums = []
    for number in range(3):
        loss(ordinary, number).backward()
        loss(ours, number).backward()
        sums.append(ours[0].weight.grad)
    assert sums[0] is sums[2] is not None, "it is added to in place"
    assert equal([p.grad for p in ordinary.parameters()], [p.grad for p in ours.parameters()])


@pytest.mark.parametrize("recipe", RECIPES)
def test_main_grad_sums_in_its_own_dtype(recipe: str) -> None:
    whole, single, parts = summing("main_grad", recipe), summing("main_grad", recipe), []
    for number in range(3):
        for net in (whole, single):
            loss(net, number).backward()
        parts.append(single[0].weight.main_grad.clone())
        single[0].weight.main_grad.zero_()
    assert torch.equal(whole[0].weight.main_grad, parts[0] + parts[1] + parts[2])
    assert whole[0].weight.grad is None
    assert whole[0].bias.grad is not None
    rounded = torch.equal(parts[0], parts[0].bfloat16().float())
    assert rounded == ("wgrad=bf16" in recipe), "only an ordinary product of bf16 is rounded to bf16"


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="weights='quantised': did you mean 'quantized'"):
        model(weights="quantised")
    with pytest.raises(ValueError, match="accumulate='gradient': did you mean 'grad'"):
        model(accumulate="gradient")
    net, x = model(accumulate="main_grad"), batch()
    weight = net[0].weight
    for wrong, words in (
        (..., "none"), ("zeros", "None"), (torch.zeros(weight.shape, dtype=torch.int32), "torch.int32"),
        (torch.zeros(2, *weight.shape), r"torch.Size\(\[2, "), (torch.zeros(weight.shape, device="meta"), "meta"),
    ):  # fmt: skip
        if wrong is not ...:
            weight.main_grad = wrong
        with pytest.raises(RuntimeError, match=f"its weight has .*{words}.*: set weight.main_grad to zeros"):
            net(x)
    with pytest.raises(ValueError, match="does not go with weights='high_precision', which FSDP2 shards"):
        model(weights="high_precision", accumulate="grad")
    sharded = lpq.convert(model(weights="high_precision"), "fp8-current", accumulate="grad")
    with pytest.raises(RuntimeError, match="FSDP2"):
        sharded(x)


def test_main_grad_is_asked_for_only_where_there_will_be_a_gradient() -> None:
    net, x = model(accumulate="main_grad"), batch()
    with torch.no_grad():
        y = net(x)
    net.requires_grad_(False)
    assert torch.equal(net(x), y)
    net.requires_grad_(True)
    with pytest.raises(RuntimeError, match="its weight has none"):
        net(x)


@pytest.mark.parametrize("emptied", [lambda w: setattr(w, "main_grad", None), lambda w: delattr(w, "main_grad")])
def test_a_main_grad_that_is_gone_before_backward_is_no_reason_to_sum_elsewhere(emptied: Any) -> None:
    net = summing("main_grad")
    y = net(batch())
    emptied(net[0].weight)
    words = r"had a main_grad in forward and has none in backward.*: empty it with zero"
    with pytest.raises(RuntimeError, match=words):
        y.sum().backward()
    assert net[0].weight.grad is None


def test_a_compiled_model_leaves_the_layer_uncompiled() -> None:
    net, twin = (model(accumulate="grad") for _ in range(2))
    compiled = torch.compile(net, backend="eager")
    for number in range(2):
        loss(compiled, number).backward()
        loss(twin, number).backward()
    assert torch.equal(net[0].weight.grad, twin[0].weight.grad)


def test_a_computed_weight_passes_its_gradient_on() -> None:
    """``retain_grad`` gives it a ``.grad``: what was added there did not get to the parameters."""
    found = []
    for accumulate in (None, "grad"):
        net = model(accumulate=accumulate)[0]
        weight_norm(net)
        with cached():
            net.weight.retain_grad()
            losses = [loss(net, number) for number in range(2)]
            for each in losses:
                each.backward(retain_graph=True)
        found.append([p.grad for p in net.parameters()])
    assert equal(*found)
    net = weight_norm(model(accumulate="main_grad")[0])
    with cached():
        net.weight.main_grad = torch.zeros_like(net.weight)
        with pytest.raises(RuntimeError, match="a parametrization computes the weight, or ranks share it"):
            net(batch())


def test_it_is_taken_back_by_converting_again() -> None:
    net = model(accumulate="grad")
    assert net[0].model.accumulate == "grad"
    assert lpq.convert(net, "fp8-current")[0].model.accumulate is None


def hooked(net: Any) -> list[tuple[str, Any]]:
    """Record arguments of the first weight's hooks: the gradient; ``.grad`` and ``.main_grad`` once it is summed."""
    weight, seen = net[0].weight, []

    def kept(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.clone()

    weight.register_hook(lambda grad: seen.append(("tensor", kept(grad))))
    weight.register_post_accumulate_grad_hook(
        lambda w: seen.append(("post", (kept(w.grad), kept(getattr(w, "main_grad", None)))))
    )
    return seen


def test_hooks_are_called_and_tensor_hooks_see_no_gradient_where_backward_sums_in_grad() -> None:
    net, ordinary = model(accumulate="grad"), model()
    seen, usual = hooked(net), hooked(ordinary)
    for number in range(2):
        loss(net, number).backward()
        loss(ordinary, number).backward()
    assert [name for name, _ in seen] == [name for name, _ in usual] == ["tensor", "post"] * 2
    assert torch.equal(seen[0][1], usual[0][1]), "the first backward is autograd's own"
    assert seen[2][1] is None
    assert usual[2][1] is not None
    for at in (1, 3):
        assert torch.equal(seen[at][1][0], usual[at][1][0])
    assert not torch.equal(seen[1][1][0], seen[3][1][0])


def test_hooks_are_called_and_find_the_sum_in_main_grad() -> None:
    net = summing("main_grad")
    seen = hooked(net)
    for number in range(2):
        loss(net, number).backward()
        (tensor, none), (post, (grad, main_grad)) = seen[-2:]
        assert (tensor, none, post, grad, len(seen)) == ("tensor", None, "post", None, 2 * number + 2)
        assert torch.equal(main_grad, net[0].weight.main_grad)
        assert main_grad.any()


@pytest.mark.parametrize("where", ["grad", "main_grad"])
@pytest.mark.parametrize("run", [plainly, recomputed])
def test_who_asks_autograd_for_gradients_gets_them_and_nothing_is_summed(where: Any, run: Run) -> None:
    nets, x = (summing(where), model()), batch(1)
    for asked in ([0], [1], [0, 1, 2], [1, 2]):
        tensors = [[x, net[0].weight, net[2].weight] for net in nets]
        got, expected = (
            torch.autograd.grad(loss(net, x, way), [of[i] for i in asked])
            for net, of, way in zip(nets, tensors, (run, plainly), strict=True)
        )
        assert equal(got, expected)
        assert not any(getattr(layer.weight, where).any() for layer in nets[0][::2])
    loss(nets[0], x, run).backward()
    loss(nets[1], x).backward()
    for net, twin in zip(nets[0][::2], nets[1][::2], strict=True):
        assert torch.equal(getattr(net.weight, where).bfloat16(), twin.weight.grad)


@pytest.mark.parametrize("where", ["grad", "main_grad"])
def test_backward_to_some_inputs_sums_in_these_alone(where: Any) -> None:
    net, x = summing(where), batch()
    first, last = (getattr(layer.weight, where) for layer in net[::2])
    loss(net, x).backward(inputs=[x])
    assert x.grad is not None
    assert not first.any()
    assert not last.any()
    loss(net, x).backward(inputs=[net[2].weight])
    assert not first.any()
    assert last.any()
    assert getattr(net[2].weight, where) is last, "it is added to in place"


def test_it_is_asked_at_little_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each layer that sums, and never for others."""
    asked: list[Any] = []
    ask = autograd.will_execute
    monkeypatch.setattr(autograd, "will_execute", lambda node: asked.append(node) or ask(node))
    loss(model(), 0).backward()
    assert asked == []
    loss(summing("grad"), 0).backward()
    assert len(asked) == 2


def test_a_sparse_gradient_is_left_to_autograd() -> None:
    """As of an embedding that is tied to the layer: nothing is added to it in place."""
    grads = []
    for accumulate in (None, "grad"):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(48, 64, sparse=True), nn.Linear(64, 48)
        head.weight = embedding.weight
        lpq.convert(nn.ModuleList([embedding, head]), "fp8-current", accumulate=accumulate)  # type: ignore[arg-type]
        embedding(torch.arange(3)).sum().backward()
        assert embedding.weight.grad is not None
        assert embedding.weight.grad.is_sparse
        head(batch().float()).sum().backward()
        grads.append(embedding.weight.grad.to_dense())
    assert torch.equal(*grads)


@pytest.mark.parametrize("where", ["grad", "main_grad"])
def test_a_weight_that_was_frozen_since_forward_gets_no_gradient(where: Any) -> None:
    """As of autograd, which looks at it when it would add."""
    ordinary, ours = model(), summing(where)
    for net in (ordinary, ours):
        ordinary[0].weight.grad = torch.zeros_like(ordinary[0].weight)
        y = loss(net, 0)
        net[0].weight.requires_grad_(requires_grad=False)
        y.backward()
    assert not ordinary[0].weight.grad.any()
    assert not getattr(ours[0].weight, where).any()
    assert torch.equal(getattr(ours[2].weight, where).to(torch.bfloat16), ordinary[2].weight.grad)  # control
