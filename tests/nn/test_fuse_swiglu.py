"""swiglu: three layers as one function are, to the bit, the three layers one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from imitated_gpu import BLACKWELL, HOPPER, imitated_gpu
from support.comparing import equal
from support.passes import Run, autocast, nodes_of, offloaded, plainly, recomputed, reentrant
from support.passes import step as step_of_any
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.flop_counter import FlopCounterMode

import lpq
from lpq.nn import SwiGLU
from lpq.nn.fused_mlp import why_apart
from lpq.observe import FLOPS, Observed, observing
from lpq.registry import refresh

RECIPES = (
    "fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "nvfp4", "nvfp4()",
    "fprop=mxfp8, dgrad=nvfp4(), wgrad=fp8()", "fprop=mxfp8, dgrad=nvfp4(), wgrad=bf16",
)  # fmt: skip
RANDOM = "fprop=nvfp4(stochastic=true), dgrad=mxfp8, wgrad=mxfp8"


class Plain(SwiGLU):
    """The three layers one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


def pair(recipe: Any = "mxfp8", dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[SwiGLU, Plain]:
    """The same weights as one function and layer by layer."""
    torch.manual_seed(0)
    fused = SwiGLU(64, 96, dtype=dtype, **options)
    plain = Plain(64, 96, dtype=dtype, **options)
    plain.load_state_dict(fused.state_dict())
    return lpq.convert(fused, recipe, include="all"), lpq.convert(plain, recipe, include="all")


def is_fused(y: Tensor) -> bool:
    return any("FusedMLP" in name for name in nodes_of(y))


def step(
    model: nn.Module, run: Run = plainly, *, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16, **how: Any
) -> list[Tensor | None]:
    """The output, the gradients and the states of a step."""

    def checked(model: nn.Module, x: Tensor) -> Tensor:
        y = run(model, x * 1.0)
        assert run is reentrant or is_fused(y) != isinstance(model, Plain)
        return y

    x = torch.randn(2, 32, 64, dtype=dtype, generator=torch.Generator().manual_seed(7))
    return step_of_any(model, x * scale, checked, **how)


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_are_those_of_the_layers(recipe: str) -> None:
    fused, plain = pair(recipe)
    for scale in (1.0, 3.0, 0.5):
        assert equal(step(fused, scale=scale), step(plain, scale=scale))


def test_recipes_that_differ() -> None:
    every = ("gate*", "fp8-row"), ("up*", "mxfp8"), ("down*", "nvfp4")
    fused, plain = pair({"rules": [{"match": match, "recipe": recipe} for match, recipe in every]})
    assert equal(step(fused), step(plain))


def only(*patterns: str) -> list[str]:
    return [name for name in NAMES if any(fnmatch(name, pattern) for pattern in patterns)]


NAMES = [f"{layer}_proj.{kind}" for layer in ("gate", "up", "down") for kind in ("weight", "bias")]
TRAINED = {
    **{name: [name] for name in NAMES}, "all": NAMES, "biases": only("*.bias"), "weights": only("*.weight"),
    "but gate": only("up*", "down*"), "but up": only("gate*", "down*"), "but down": only("gate*", "up*"), "none": [],
}  # fmt: skip


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
@pytest.mark.parametrize("trained", TRAINED)
def test_parts_that_are_frozen(recipe: str, trained: str) -> None:
    """With a gradient of the input, and without."""
    fused, plain = pair(recipe, bias=True)
    for model in (fused, plain):
        for name, p in model.named_parameters():
            p.requires_grad_(name in TRAINED[trained])
    for needs_dx in (True, False) if TRAINED[trained] else (True,):
        found = step(fused, needs_dx=needs_dx)
        assert equal(found, step(plain, needs_dx=needs_dx))
        assert sum(grad is not None for grad in found[2:8]) == len(TRAINED[trained])


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4", "fp8-current", "fp8-row"])
@pytest.mark.parametrize("run", [recomputed, reentrant, offloaded])
def test_ways_to_run(recipe: str, run: Run) -> None:
    if run is reentrant and recipe == "fp8-delayed":
        pytest.skip("layers refuse it")
    fused, plain = pair(recipe)
    assert equal(step(fused, run), step(plain, run))


def test_two_forwards_before_backward_of_a_recipe_that_remembers() -> None:
    """The second backward encodes the product by the state that its forward read."""
    found = []
    for model in pair("fp8-delayed"):
        step(model)
        x = torch.randn(2, 32, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(3))
        ys = [model(x * scale) for scale in (1, 64)]
        for y in reversed(ys):
            y.float().square().mean().backward()
        found.append([p.grad for p in model.parameters()] + list(model.buffers()))
    assert equal(*found)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
def test_gradients_asked_for_one_by_one(recipe: str) -> None:
    found = []
    for model in pair(recipe, bias=True):
        torch.manual_seed(7)
        x = torch.randn(2, 32, 64, dtype=torch.bfloat16, requires_grad=True)
        y = model(x)
        loss = y.float().square().mean()
        wanted = [x, *model.parameters()]
        grads = [torch.autograd.grad(loss, t, retain_graph=True)[0] for t in wanted]
        grads += torch.autograd.grad(loss, wanted, retain_graph=True)
        loss.backward()
        found.append([*grads, x.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    assert equal(*found)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-current"])
def test_masters_in_fp32_under_autocast(recipe: str) -> None:
    fused, plain = pair(recipe, torch.float32, bias=False)
    for run, dtype in ((autocast, torch.bfloat16), (plainly, torch.float32)):
        found = step(fused, run, dtype=torch.float32)
        assert found[0] is not None
        assert found[0].dtype is dtype
        assert equal(found, step(plain, run, dtype=torch.float32))


@pytest.mark.parametrize("recipe", ["mxfp8", "fprop=mxfp8, dgrad=nvfp4(), wgrad=fp8()"])
def test_an_encoded_input(recipe: str) -> None:
    quantizer = lpq.recipe(recipe).x
    found = []
    for model in pair(recipe):
        torch.manual_seed(7)
        y = model(quantizer.quantize(torch.randn(2, 32, 64, dtype=torch.bfloat16)))
        assert is_fused(y) != isinstance(model, Plain)
        y.float().square().mean().backward()
        found.append([y.detach(), *(p.grad for p in model.parameters())])
    assert equal(*found)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "mxfp8"])
def test_an_input_that_goes_elsewhere_too(recipe: str) -> None:
    """As of blocks with a norm behind them: autograd adds three gradients, and in the order in which it did."""
    fused, plain = pair(recipe)
    for _ in range(2):
        found = [step(model, lambda model, x: x + model(x)) for model in (fused, plain)]
        assert equal(*found)


def test_gradients_added_in_place() -> None:
    found = []
    for model in pair("fp8-current"):
        lpq.convert(model, "fp8-current", include="all", accumulate="main_grad")
        for p in model.parameters():
            p.main_grad = torch.full(p.shape, 0.5)  # type: ignore[attr-defined]
        step(model)
        assert all(p.grad is None for p in model.parameters())
        found.append([p.main_grad for p in model.parameters()])  # type: ignore[attr-defined]
    assert equal(*found)


def test_without_gradients() -> None:
    fused, plain = pair("nvfp4")
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(fused(x), plain(x))


def test_held_weights() -> None:
    fused, plain = pair("mxfp8")
    with lpq.hold_weights(fused), lpq.hold_weights(plain):
        assert equal(step(fused), step(plain))


def test_recipes_that_change_by_step() -> None:
    found = []
    rules = [{"match": "*_proj", "recipe": "fp8-current", "until": 2}, {"match": "*_proj", "recipe": "mxfp8"}]
    for model in pair({"rules": rules}):
        of_model = []
        for at in (1, 3):
            lpq.set_step(model, at)
            of_model += step(model)
        found.append(of_model)
    assert equal(*found)


def test_nothing_of_the_product_is_kept() -> None:
    """Backward keeps the outputs of gate and up in bf16, and no other matrix of their size."""
    fused, _ = pair("fp8-current")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = fused(torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True))
    assert is_fused(y)
    assert sum(t.numel() == 32 * 96 for t in kept) == 2


def test_copies_and_pickles(tmp_path: Any) -> None:
    fused, _ = pair("mxfp8")
    expected = step(fused)
    torch.save(fused, tmp_path / "model.pt")
    for other in (copy.deepcopy(fused), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert equal(step(other), expected)


def test_a_second_derivative_is_refused() -> None:
    fused, _ = pair("mxfp8")
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(fused(x).float().sum(), x, create_graph=True)


def test_gate_and_up_of_two_widths_are_refused() -> None:
    gate, up, down = lpq.convert(nn.ModuleList([nn.Linear(64, 128), nn.Linear(64, 96), nn.Linear(128, 64)]), "mxfp8")
    with pytest.raises(ValueError, match=r"128 outputs of layer 0, .* and 96 of layer 1, .* must have equally many"):
        lpq.nn.swiglu(torch.randn(16, 64), gate, up, down)


def test_compiled_whole() -> None:
    fused, plain = pair("fp8-current")
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    assert torch.equal(compiled(x), plain(x))


def test_a_mode_sees_the_layers_one_by_one() -> None:
    fused, plain = pair("mxfp8")
    found = []
    for model in (fused, plain):
        with FlopCounterMode(display=False, custom_mapping=FLOPS) as counter:
            x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
            y = model(x)
            y.sum().backward()
        assert not is_fused(y)
        found.append(counter.get_total_flops())
    assert found[0] == found[1] > 0


def apart(model: SwiGLU) -> str | None:
    return why_apart((model.gate_proj, model.up_proj), model.down_proj)


def unfit(change: Callable[[SwiGLU], Any], why: str) -> Any:
    return pytest.param(change, why, id=why)


class Silent:
    def observe(self, seen: Observed) -> None:
        """Do nothing."""


def observe_down(model: SwiGLU) -> Any:
    block = observing(model.down_proj, Silent())
    block.__enter__()
    return block


def replace_gate(model: SwiGLU) -> None:
    model.gate_proj = nn.Linear(64, 96, False, dtype=torch.bfloat16)


def replace_forward(model: SwiGLU) -> None:
    model.up_proj.forward = model.up_proj.forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        unfit(replace_gate, "its gate has no recipe"),
        unfit(replace_forward, "its up is lpq's Linear with a forward of its own"),
        unfit(lambda m: setattr(m.down_proj, "recipe", None), "its down has no recipe"),
        unfit(lambda m: m.up_proj.register_forward_hook(lambda *args: None), "hooks are called with its up"),
        unfit(lambda m: m.gate_proj.register_full_backward_hook(lambda *args: None), "hooks are called with its gate"),
        unfit(observe_down, "its down is observed"),
        unfit(
            lambda m: setattr(m.down_proj, "recipe", "fprop=nvfp4(stochastic=true), dgrad=mxfp8, wgrad=mxfp8"),
            "rounds inputs with random",
        ),
    ],
)
def test_layers_that_stay_apart(change: Callable[[SwiGLU], Any], why: str) -> None:
    fused, _ = pair("mxfp8")
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    assert is_fused(fused(x))
    assert apart(fused) is None
    left = change(fused)
    reason = apart(fused)
    assert reason is not None
    assert why in reason
    assert not is_fused(fused(x))
    del left


def test_hooks_of_all_modules() -> None:
    fused, _ = pair("mxfp8")
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert "every module" in str(apart(fused))
    finally:
        handle.remove()
    assert apart(fused) is None


@pytest.mark.parametrize(
    ("recipe", "sm", "fused"),
    [
        ("nvfp4", HOPPER, False), ("mxfp8-fwd-nvfp4-bwd", HOPPER, False), ("mxfp8", HOPPER, True),
        ("fp8-current", HOPPER, True), ("nvfp4", BLACKWELL, True),
    ],
)  # fmt: skip
def test_gradients_that_are_measured_and_multiplied_in_bf16_keep_layers_apart(
    recipe: str, sm: int, fused: bool
) -> None:
    with imitated_gpu() as gpu:
        gpu.sm = sm
        refresh()
        model, _ = pair(recipe)
        assert (apart(model) is None) == fused
        assert fused or "multiplied in bf16" in str(apart(model))


@pytest.mark.starts
def test_compiled_autograd_runs_its_backward() -> None:
    """It raised an AssertionError: it follows a backward that another one calls with torch's own context alone."""
    torch._dynamo.reset()
    found = []
    for mode in (nullcontext(), compiled_autograd._enable(torch.compile(backend="eager"))):
        torch.manual_seed(0)
        block = lpq.convert(lpq.nn.SwiGLU(32, 64), "mxfp8")
        y = block(torch.randn(16, 32))
        with mode:
            y.square().sum().backward()
        found.append([p.grad for p in block.parameters()])
    assert equal(*found)
