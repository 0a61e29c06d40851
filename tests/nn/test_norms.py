"""Norms that encode their output: to the bit what the norm and the layers behind it compute apart."""

from __future__ import annotations

import copy
import pickle
import re
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counting import encodings
from support.comparing import equal, equal_states
from support.passes import Run, compiled, offloaded, plainly, recomputed, reentrant, step
from support.small_models import Behind, Stream
from torch import Tensor, nn

import lpq
from lpq.core import QuantizedTensor
from lpq.operations.norms import NormKind

ROWS, IN, OUT = (2, 32), 64, 96
MIXED = "fprop=mxfp8, dgrad=nvfp4, wgrad=fp8"
OF_WEIGHTS = "x=mxfp8, w=fp8(scaling=delayed), dy=mxfp8"
"""It remembers nothing of inputs."""
RECIPES = ("fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "nvfp4", MIXED, OF_WEIGHTS)
NORMS = {"rms": (nn.RMSNorm, lpq.nn.RMSNorm), "layer": (nn.LayerNorm, lpq.nn.LayerNorm)}


def pair(recipe: Any, kind: str = "rms", dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """The same converted model without and with the encoding norm."""
    models = []
    for norm in NORMS[kind]:
        torch.manual_seed(1)
        model: Any = lpq.convert(Behind(norm, IN, OUT).to(dtype), recipe)
        with torch.no_grad():
            model.norm.weight.uniform_(0.5, 1.5)
        models.append(model)
    plain, fused = models
    fused.norm.consumers = (fused.q, fused.k, fused.v)
    return plain, fused


def given(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(*ROWS, IN, dtype=dtype)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", NORMS)
def test_results_and_gradients_are_those_of_the_parts(recipe: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = pair(recipe, kind)
    assert fused.norm.why_not(given()) is None
    assert isinstance(fused.norm(given()), QuantizedTensor)
    expected = step(plain, given())
    made = encodings(monkeypatch)
    assert equal(step(fused, given()), expected)
    assert not [wanted for wanted in made if wanted.shape == (64, IN)], "the layers encode no input"
    assert fused.state_dict().keys() == plain.state_dict().keys()


def hooked(model: Any, x: Tensor) -> Tensor:
    """A hook before the norm, and one behind its backward."""
    model.norm.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.norm.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 0.5,))
    return plainly(model, x)


def seen(model: Any, x: Tensor) -> Tensor:
    """A hook behind the norm, which hands on an ordinary tensor then."""
    handle = model.norm.register_forward_hook(lambda module, args, y: None)
    y = plainly(model, x)
    handle.remove()
    return y


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4"])
@pytest.mark.parametrize("run", [reentrant, recomputed, offloaded, hooked])
def test_under(run: Run, recipe: str) -> None:
    plain, fused = pair(recipe)
    assert equal(step(fused, given(), run), step(plain, given(), run))


@pytest.mark.starts
@pytest.mark.parametrize("way", ["recomputed", "seen", "compiled"])
def test_layers_that_remember_have_one_history_while_the_norm_encodes(way: str) -> None:
    plain, fused = pair("fp8-delayed")
    whole = torch.compile(fused, fullgraph=True, backend="aot_eager")
    runs: dict[str, Run] = {"recomputed": recomputed, "seen": seen, "compiled": lambda _, x: plainly(whole, x)}
    for usual in (True, False, True):
        for number in range(2):
            x = given() * (number + 1)
            assert equal(step(fused, x, plainly if usual else runs[way]), step(plain, x))
            assert equal_states(fused.state_dict(), plain.state_dict())
        shared = way == "recomputed" or (usual and not fused.q.passes.traced)
        assert len({id(layer.x_amax) for layer in (fused.q, fused.k, fused.v)}) == (1 if shared else 3)
    assert fused.q.x_amax > 0


class MLP(nn.Module):
    """A norm and SwiGLU, as one function or as three layers."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm, self.mlp, self.fused = lpq.nn.RMSNorm(IN, eps=1e-5), lpq.nn.SwiGLU(IN, OUT), fused

    def forward(self, x: Tensor) -> Tensor:
        x, m = self.norm(x), self.mlp
        y: Tensor = m(x) if self.fused else m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x))
        return y


@pytest.mark.parametrize("run", [recomputed, plainly])
def test_before_a_fused_swiglu_layers_share_a_history_too(run: Run) -> None:
    found: list[list[Any]] = [[], []]
    for one in (False, True):
        torch.manual_seed(1)
        model: Any = lpq.convert(MLP(one).to(torch.bfloat16), "fp8-delayed")
        model.norm.consumers = (model.mlp.gate_proj, model.mlp.up_proj) if one else ()
        for number in range(3):
            found[one] += step(model, given() * (number + 1), run)
        found[one] += [v.clone() for v in model.state_dict().values()]
    assert equal(*found)
    assert model.mlp.gate_proj.x_amax is model.mlp.up_proj.x_amax


def test_evaluation_and_frozen_weights_take_the_row_operand_alone() -> None:
    plain, fused = pair("nvfp4")
    with torch.no_grad():
        assert fused.norm(given()).col is None
        assert torch.equal(fused(given()), plain(given()))
    for model in (plain, fused):
        for layer in (model.q, model.k, model.v):
            layer.weight.requires_grad_(False)
    assert fused.norm(given()).col is None
    assert equal(step(fused, given()), step(plain, given()))


def test_no_row_operand_is_kept_for_backward() -> None:
    _, fused = pair("mxfp8")
    y = fused.norm(given().requires_grad_())
    rows = [weakref.ref(buffer) for buffer in y.row.tensors()]
    cols = [weakref.ref(buffer) for buffer in y.col.tensors()]
    z = fused.q(y) + fused.k(y)
    del y
    assert all(buffer() is None for buffer in rows)
    assert any(buffer() is not None for buffer in cols)
    z.sum().backward()


def test_what_the_layers_encode_may_change_between_steps() -> None:
    plain, fused = pair("mxfp8")
    for recipe in ("fp8-current", "fp8-delayed", "bf16", "mxfp8"):
        for model in (plain, fused):
            for layer in (model.q, model.k, model.v):
                layer.recipe = recipe
        assert equal(step(fused, given()), step(plain, given())), recipe


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("x=nvfp4(stochastic=true), w=mxfp8, dy=mxfp8", "layer q, .* makes of each input an encoding of its own"),
        ("bf16", "layer q, .* makes of each input an encoding of its own, or none"),
    ],
)
def test_a_recipe_that_takes_no_encoded_input(recipe: str, words: str) -> None:
    plain, fused = pair(recipe)
    assert re.search(words, fused.norm.why_not(given()))
    assert type(fused.norm(given())) is Tensor
    assert equal(step(fused, given()), step(plain, given()))


def test_what_looks_at_the_tensor_gets_an_ordinary_one() -> None:
    _, fused = pair("mxfp8")
    norm, x, seen = fused.norm, given(), []

    def why() -> str:
        assert type(norm(x)) is Tensor
        return str(norm.why_not(x))

    handle = norm.register_forward_hook(lambda module, args, y: seen.append(y))
    assert "a forward hook looks at its output" in why()
    handle.remove()
    handle = fused.k.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    assert "layer k, lpq.nn.Linear(64, 96) has a forward hook" in why()
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in why()
    fused.k.recipe = "nvfp4"
    assert norm.why_not(x) is None  # in a run of its own
    fused.k.recipe = None
    assert norm.why_not(x) is None  # it gets the output in high precision
    fused.q.recipe = fused.v.recipe = None
    assert "the layers that take its output have no recipe" in why()
    fused.q.recipe = fused.k.recipe = fused.v.recipe = "mxfp8"
    assert norm.why_not(x) is None
    x = x.float()
    assert "its input is torch.float32 and its weight torch.bfloat16" in why()
    norm.consumers = ()
    assert "it knows no layer" in why()


def test_a_view_of_the_same_shape_stays_encoded_and_any_other_does_not() -> None:
    """``DTensor.from_local`` takes such a view."""
    plain, fused = pair("mxfp8")
    x, norm = given(), fused.norm
    y = norm(x)
    assert isinstance(y, QuantizedTensor)
    for same in (y.view_as(y), y.detach()):
        assert isinstance(same, QuantizedTensor)
        assert torch.equal(fused.q(same), fused.q(y))
    other = y.view(-1)
    assert type(other) is Tensor
    assert torch.equal(other, plain.norm(x).view(-1))


@pytest.mark.parametrize("norm", [NormKind(1e-6, rounds=True), NormKind(1e-6, offset=True)], ids=["rounds", "offset"])
def test_gradients_round_as_the_norm_does_where_its_rows_are_at_hand(norm: NormKind) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(32, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    weight = torch.rand(64).bfloat16()
    for needed in ((True, True), (False, True)):
        found = norm.gradients(dy, (x, weight), norm.rows(x), needed)
        assert equal(found, norm.gradients(dy, (x, weight), (), needed))


def streams(recipe: str, kind: str, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """The same model with torch's sums, where norms encode and do not, and with sums in the norms."""
    models: list[Any] = []
    for norm, by_norms in zip((*NORMS[kind], NORMS[kind][1]), (False, False, True), strict=True):
        torch.manual_seed(1)
        model: Any = lpq.convert(Stream(norm, IN, by_norms).to(dtype), recipe)
        with torch.no_grad():
            model.first.weight.uniform_(0.5, 1.5)
            model.second.weight.uniform_(0.5, 1.5)
        models.append(model)
    for model in models[1:]:
        model.first.consumers, model.second.consumers = (model.a,), (model.b,)
    return models


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("recipe", "run"),
    [
        ("fp8-current", plainly), ("fp8-current", reentrant), ("fp8-delayed", recomputed), ("fp8-delayed", plainly),
        ("nvfp4", offloaded),
    ],
)  # fmt: skip
def test_a_norm_adds_the_residual_and_the_gradient_of_the_stream(kind: str, recipe: str, run: Run) -> None:
    apart, encoding, adding = streams(recipe, kind)
    for number in range(2):
        x = given() * (number + 1)
        expected = step(apart, x, run)
        assert equal(step(encoding, x, run), expected)
        assert equal(step(adding, x, run), expected)
        assert equal_states(adding.state_dict(), apart.state_dict())


def test_in_fp32_backward_adds_what_the_encoding_norm_gives() -> None:
    _, encoding, adding = streams("mxfp8", "rms", torch.float32)
    x = given(torch.float32)
    assert equal(step(adding, x), step(encoding, x))


@pytest.mark.starts
def test_compiled_a_norm_with_a_residual_computes_plainly() -> None:
    apart, _, adding = streams("mxfp8", "rms")
    assert equal(step(adding, given(), compiled), step(apart, given()))


@pytest.mark.parametrize("used", ["output", "sum", "neither weight"])
def test_backward_by_one_of_both(used: str) -> None:
    """The gradient goes by the output alone, by the sum alone, or to the residual alone."""
    found: list[list[Tensor | None]] = []
    for index in (1, 2):
        model = streams("mxfp8", "rms")[index].requires_grad_(used != "neither weight")
        x, residual = (t.clone().requires_grad_() for t in (given(), given().flip(0)))
        if used == "neither weight":
            x.requires_grad_(False)
        y, total = model.second(x, residual=residual) if index == 2 else (model.second(x + residual), x + residual)
        z = model.b(y)
        (z if used == "output" else total if used == "sum" else z + total).square().sum().backward()
        found.append([x.grad, residual.grad, model.second.weight.grad])
    assert equal(*found)
    assert found[0][1] is not None


def test_a_residual_of_another_dtype_is_added_by_torch() -> None:
    _, fused = pair("mxfp8")
    x, residual = given(), given(torch.float32)
    y, total = fused.norm(x, residual=residual)
    assert torch.equal(total, x + residual)
    assert total.dtype is torch.float32
    assert torch.equal(y, nn.RMSNorm.forward(fused.norm, total))
    y, total = fused.norm(x, residual=given()[:1])  # one for all
    assert isinstance(y, QuantizedTensor)
    assert torch.equal(total, x + given()[:1])


def test_without_layers_a_norm_adds_all_the_same() -> None:
    norm, x = lpq.nn.RMSNorm(IN), given(torch.float32)
    y, total = norm(x, residual=2 * x)
    assert torch.equal(total, x + 2 * x)
    assert torch.equal(y, norm(total))
    assert norm(x, with_sum=True)[1] is x


def test_fuse_finds_the_layers_behind_norms_that_add() -> None:
    apart, _, adding = streams("mxfp8", "rms")
    adding.first.consumers = adding.second.consumers = ()
    lpq.fuse(adding)
    assert adding.first.consumers == (adding.a,)
    assert adding.second.consumers == (adding.b,)
    assert equal(step(adding, given()), step(apart, given()))


@pytest.mark.parametrize("kind", NORMS)
def test_a_second_derivative_is_refused(kind: str) -> None:
    """Code beside the layers, such as a router, may take the output, and no layer is there to refuse it."""
    _, fused = pair("mxfp8", kind)
    x = given().requires_grad_()
    y = fused.norm(x).square().sum()
    with pytest.raises(RuntimeError, match="a norm that encodes its output has no second derivative"):
        torch.autograd.grad(y, x, create_graph=True)
    assert torch.autograd.grad(y, x)[0].isfinite().all()


@pytest.mark.parametrize("recipe", ["mxfp8", "fprop=mxfp8, dgrad=mxfp8, wgrad=bf16"])
def test_what_others_write_to_the_output_reaches_no_operand(recipe: str) -> None:
    """The column operand of bf16 is the output itself."""
    grads = []
    for write in (Tensor.add, Tensor.add_):
        _, fused = pair(recipe)
        fused.norm.serves_others = True
        y = fused.norm(given().requires_grad_())
        z = fused.q(y)
        assert torch.equal(write(y[..., :8], 1), y[..., :8] + (write is Tensor.add))
        z.sum().backward()
        grads.append(fused.q.weight.grad)
    assert equal(grads[:1], grads[1:])


def test_an_operator_that_writes_elsewhere_may_read_the_output() -> None:
    plain, fused = pair("mxfp8")
    with torch.no_grad():
        y = fused.norm(given())
        into = torch.full_like(given(), torch.nan)
        assert torch.equal(torch.mul(y, 2, out=into), 2 * plain.norm(given()))
        with pytest.raises(TypeError, match="would write to the output of a norm"):
            torch.mul(into, 2, out=y)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda y: pickle.loads(pickle.dumps(y))])
def test_a_copy_of_the_output_is_the_output_and_not_what_its_codes_decode_to(copied: Any) -> None:
    plain, fused = pair("mxfp8")
    with torch.no_grad():
        y, expected = fused.norm(given()), plain.norm(given())
    assert isinstance(y, QuantizedTensor)
    assert type(copied(y)) is Tensor
    assert torch.equal(copied(y), expected)
    assert not torch.equal(y.dequantize(), expected)
    y = fused.norm(given().requires_grad_())
    if copied is copy.deepcopy:
        with pytest.raises(RuntimeError, match="graph leaves"):
            copied(y)
    else:
        assert copied(y).requires_grad
