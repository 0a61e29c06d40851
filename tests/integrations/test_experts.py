"""Hugging Face's fused experts, converted: they compute what separate layers compute, train, and keep their names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hugging_face import small
from torch import Tensor, nn

import lpq
from lpq.nn.fused_experts import FusedExperts, Moved
from lpq.recipes import RecipeError
from lpq.torch_private.dispatch import TorchDispatchMode

HIDDEN, INNER, COUNT, WORDS, STEPS = 32, 48, 4, 64, 10
MODELS = ["Mixtral", "Qwen3Moe", "GptOss", "Llama4"]


def made(name: str) -> Any:
    """The model, with larger weights."""
    more = {"sliding_window": 16} if name == "GptOss" else {}
    net = small(
        name, torch.bfloat16, hidden=HIDDEN, inner=INNER, layers=2, experts=COUNT, max_position_embeddings=64,
        use_cache=False, **more,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for parameter in net.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2 / parameter.shape[-1] ** 0.25, generator=generator)
    return net


def experts_of(model: nn.Module) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def losses(model: Any) -> list[float]:
    """Return the losses of a run that learns the same words again and again."""
    words = torch.randint(WORDS, (2, 24), generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(STEPS):
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_models_with_experts_train_as_in_high_precision(model: str) -> None:
    plain = made(model)
    net = lpq.convert(copy.deepcopy(plain), "mxfp8")
    assert [(k, v.shape) for k, v in net.state_dict().items()] == [(k, v.shape) for k, v in plain.state_dict().items()]
    converted = {entry.name: entry.note for entry in lpq.report(net).converted}
    assert {f"model.layers.{i}.{'feed_forward' if model == 'Llama4' else 'mlp'}.experts" for i in (0, 1)} <= {
        *converted
    }
    assert not [part for part in lpq.report(net).coverage.left if "experts" in part.name]
    expected, found = losses(plain), losses(net)
    assert expected[-1] < expected[0] - 1
    assert found[-1] < found[0] - 1
    assert found != expected
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 0.1


def apart(experts: Any, recipe: str, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute the tokens of each expert by separate layers."""
    rows = torch.zeros(index.numel(), HIDDEN, dtype=x.dtype)
    for expert in range(experts.num_experts):
        places = (index.reshape(-1) == expert).nonzero()[:, 0]
        if not len(places):
            continue
        linear = []
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, name)[expert]
            weight = weight.t() if experts.is_transposed else weight
            layer = lpq.nn.Linear(weight.shape[1], weight.shape[0], bias=experts.has_bias, recipe=recipe)
            layer.weight = nn.Parameter(weight.detach().contiguous())
            if experts.has_bias:
                layer.bias = nn.Parameter(getattr(experts, f"{name}_bias")[expert].detach())
            linear.append(layer)
        hidden = experts._apply_gate(linear[0](x[places // index.shape[1]]))
        rows = rows.index_copy(0, places, linear[1](hidden))
    return (rows * weights.reshape(-1, 1)).view(*index.shape, HIDDEN).sum(1)


@pytest.mark.parametrize("recipe", ["nvfp4-fwd-mxfp8-bwd", "fp8-current", "mxfp8"])
@pytest.mark.parametrize("model", ["Mixtral", "GptOss"])
def test_they_are_separate_layers_to_the_bit(model: str, recipe: str) -> None:
    net = lpq.convert(made(model), recipe)
    experts = experts_of(net)[0]
    x = torch.randn(24, HIDDEN, dtype=torch.bfloat16)
    index = torch.stack([torch.randperm(COUNT - 1)[:2] for _ in range(24)])  # none goes to the last expert
    weights = torch.rand(24, 2, dtype=torch.bfloat16)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, expected = experts(ours, index, weights), apart(experts, recipe, theirs, index, weights)
    assert torch.equal(y, expected)
    y.backward(dy := torch.randn_like(y))
    expected.backward(dy)
    assert torch.allclose(ours.grad, theirs.grad, atol=2e-2)  # the sum over a token's experts has another order
    assert not experts.gate_up_proj.grad[-1].any()
    experts.recipe = None
    assert torch.allclose(experts(x, index, weights), y, atol=0.2)
    assert not torch.equal(experts(x, index, weights), y)


@pytest.mark.parametrize("model", ["Mixtral", "Llama4"])
def test_tokens_that_are_encoded_already(model: str) -> None:
    """They are refused where they are sorted first. Rows that lie expert by expert are a grouped layer's input."""
    experts = experts_of(lpq.convert(made(model), "mxfp8-one-copy"))[0]
    x = torch.randn(8, HIDDEN, dtype=torch.bfloat16)
    encoded = experts.recipe.x.quantize(x)
    if model == "Llama4":
        assert torch.equal(experts(encoded), experts(x))
        return
    route = torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2)
    with pytest.raises(ValueError, match=r"experts, MixtralExperts: its tokens are encoded already, as hybrid.*: pass"):
        experts(encoded, *route)
    experts.recipe = None
    with pytest.warns(lpq.core.PrecisionWarning):
        assert torch.equal(experts(encoded, *route), experts(encoded.dequantize(), *route))


def test_tokens_of_experts_that_are_elsewhere_add_nothing() -> None:
    """As expert parallelism of transformers marks them: by the index behind the last."""
    experts = experts_of(lpq.convert(made("Mixtral"), "mxfp8"))[0]
    x, weights = torch.randn(8, HIDDEN, dtype=torch.bfloat16), torch.ones(8, 2, dtype=torch.bfloat16)
    index = torch.full((8, 2), COUNT)
    assert not experts(x, index, weights).any()
    index[:, 0] = 1
    assert torch.equal(experts(x, index, weights), experts(x, index[:, :1], weights[:, :1]))


def test_no_tokens_at_all() -> None:
    """As a rank may have them, while others wait for it in backward."""
    experts = experts_of(lpq.convert(made("Mixtral"), "mxfp8"))[0]
    x = torch.empty(0, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    y = experts(x, torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad is not None
    assert not experts.gate_up_proj.grad.any()


@pytest.mark.parametrize("tokens", [0, 5])
def test_gradients_of_moved_rows_are_those_of_indices(tokens: int) -> None:
    """Also of no tokens."""
    torch.manual_seed(0)
    x, dy = torch.randn(tokens, 8).double().requires_grad_(), torch.randn(3 * tokens, 8).double()
    order = torch.randperm(3 * tokens)
    back = order.argsort()
    moved = Moved.apply(Moved.apply(x, order // 3, back, 3), back, order, 1)
    expected = x[order // 3][back]
    assert torch.equal(moved, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in (moved, expected)))


class Counted(TorchDispatchMode):
    """Notes each operator that makes a tensor of this shape, in any dtype."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.names = shape, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape == self.shape:
            self.names.append(str(func))
        return out


@pytest.mark.parametrize("fuse", [False, True])
def test_a_step_moves_rows_four_times(fuse: bool) -> None:
    net = lpq.convert(made("Mixtral"), "mxfp8", fuse=fuse)
    x = torch.randn(8, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    index = torch.stack([torch.arange(8) % COUNT, (torch.arange(8) + 1) % COUNT], 1)
    with Counted(16, HIDDEN) as counted:
        experts_of(net)[0](x, index, torch.rand(8, 2, requires_grad=True)).float().square().sum().backward()
    moves = [name for name in counted.names if "view" not in name and "multiply_groups" not in name]
    assert moves == ["aten.index_select.default"] * 4


def test_they_are_converted_again_copied_and_left_alone() -> None:
    net = lpq.convert(made("Mixtral"), "mxfp8")
    first = experts_of(net)[0]
    assert isinstance(first, FusedExperts)
    assert type(copy.deepcopy(first)) is type(first)
    assert copy.deepcopy(first).recipe == first.recipe
    lpq.convert(
        net, {"rules": [{"match": "*.0.mlp.experts", "recipe": "nvfp4"}, {"match": "*.self_attn.*", "recipe": "mxfp8"}]}
    )
    assert [e.recipe and e.recipe.title for e in experts_of(net)] == ["nvfp4", None]
    left = {entry.name: entry.note for entry in lpq.report(net).left}
    assert left["model.layers.1.mlp.experts"] == "no rule of the policy is for it"


def test_a_recipe_with_memories_is_refused_before_anything_is_changed() -> None:
    net = made("Mixtral")
    with pytest.raises(RecipeError, match=r"model\.layers\.0\.mlp\.experts cannot have the recipe fp8-delayed: it rem"):
        lpq.convert(net, "fp8-delayed")
    assert not any(isinstance(module, FusedExperts | lpq.nn.Linear) for module in net.modules())


def test_they_follow_the_steps_of_a_policy_and_a_checkpoint_has_their_recipe(tmp_path: Path) -> None:
    """As other layers do. Control: the recipe of the first step."""
    rules = [{"match": "*.experts", "recipe": "nvfp4", "until": 2}, {"match": "*", "recipe": "mxfp8"}]
    net, again = (lpq.convert(made("Mixtral"), {"rules": rules}) for _ in range(2))
    lpq.set_step(net, 1)
    assert {experts.recipe.title for experts in experts_of(net)} == {"nvfp4"}
    lpq.set_step(net, 2)
    assert {experts.recipe.title for experts in experts_of(net)} == {"mxfp8"}
    lpq.checkpoint.save(net, tmp_path)
    lpq.checkpoint.load(again, tmp_path)
    words = torch.randint(WORDS, (2, 8))
    with torch.no_grad():
        assert torch.equal(net(input_ids=words).logits, again(input_ids=words).logits)
        lpq.set_step(again, 1)
        assert not torch.equal(net(input_ids=words).logits, again(input_ids=words).logits)
    assert {entry.note for entry in lpq.report(net).converted if "experts" in entry.name} == {
        "nvfp4 until step 2, then mxfp8; now: mxfp8"
    }


def test_gradients_are_added_in_place() -> None:
    """They went to autograd in silence, and ``main_grad`` stayed as it was. Control: the gradient of autograd."""
    one, other = (experts_of(lpq.convert(made("Mixtral"), "mxfp8", accumulate=how))[0] for how in (None, "main_grad"))
    for weight in other.parameters():
        weight.main_grad = torch.zeros_like(weight)
    x, index = torch.randn(8, HIDDEN, dtype=torch.bfloat16), torch.arange(16).view(8, 2) % COUNT
    for experts in (one, other):
        experts(x, index, torch.ones(8, 2, dtype=torch.bfloat16)).square().sum().backward()
    for expected, weight in zip(one.parameters(), other.parameters(), strict=True):
        assert weight.grad is None
        assert torch.equal(weight.main_grad, expected.grad)
        assert expected.grad.any()
    with pytest.raises(
        ValueError, match=r"the weight of model\.layers\.0\.mlp\.experts \(GptOssExperts\) is \[in, out\]"
    ):
        lpq.convert(made("GptOss"), "mxfp8", accumulate="grad")


def test_a_recipe_is_assigned_as_to_other_layers() -> None:
    experts = experts_of(lpq.convert(made("Mixtral"), "mxfp8"))[0]
    experts.recipe = "nvfp4"
    assert experts.recipe == lpq.recipe("nvfp4")
    words = r"layer model\.layers\.0\.mlp\.experts, MixtralExperts cannot have the recipe fp8-delayed: it remembers"
    with pytest.raises(ValueError, match=words):
        experts.recipe = "fp8-delayed"
    assert experts.recipe == lpq.recipe("nvfp4")


@pytest.mark.parametrize("model", MODELS)
def test_static_scales_of_experts_are_saved_and_loaded(model: str, tmp_path: Path) -> None:
    """By the names that files have for them, where transformers has others than in memory."""
    from lpq.integrations.transformers_config import LpqConfig

    base = made(model)
    base.save_pretrained(tmp_path / "base")
    net = type(base).from_pretrained(tmp_path / "base", quantization_config=LpqConfig("fp8-current"))
    words = torch.randint(WORDS, (2, 24), generator=torch.Generator().manual_seed(2))
    lpq.calibrate(net, [{"input_ids": words}])
    net.save_pretrained(tmp_path / "saved")
    again = type(base).from_pretrained(tmp_path / "saved")
    values = [experts.static_values() for experts in experts_of(net)]
    assert all(value.gt(0).all() for own in values for value in own.values())
    for own, found in zip(values, (experts.static_values() for experts in experts_of(again)), strict=True):
        assert own.keys() == found.keys() != set()
        assert all(torch.equal(own[name], found[name]) for name in own)
    with torch.no_grad():
        assert torch.equal(again(input_ids=words).logits, net.eval()(input_ids=words).logits)
