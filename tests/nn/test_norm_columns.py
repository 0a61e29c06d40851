"""Norms whose output backward encodes a second time, as ``x.save=input`` asks for: to the bit as forward would have."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counting import kept_for_backward
from support.comparing import equal
from support.passes import Run, autocast, compiled, evaluated, offloaded, plainly, recomputed, reentrant, step
from support.small_models import Behind, Normed, Stream
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lpq
from lpq.nn import norms
from lpq.nn.siblings import SharedColumn
from lpq.operations import producer as producers
from lpq.operations.norms import NormKind
from lpq.operations.produced_tiles import Produced
from lpq.tensor.with_value import WithValue

ROWS, IN, OUT = (2, 32), 64, 96
SAVED = "x.save=input"
CURRENT = "x=fp8(), w=fp8(), dy=fp8(dtype=e5m2)"
MXFP8 = "x=mxfp8, w=mxfp8, dy=mxfp8"
HYBRID = "fprop=mxfp8, dgrad=nvfp4, wgrad=fp8()"
RECIPES = {
    "fp8-current": CURRENT,
    "mxfp8": MXFP8,
    "fp8-block": "x=fp8(scaling=block), w=fp8(scaling=block), dy=fp8(scaling=block)",
    "fp8-row": "x=fp8(scaling=row), w=fp8(scaling=row), dy=fp8(scaling=row)",
    "nvfp4": "x=nvfp4, w=nvfp4, dy=nvfp4",
    "hybrid": HYBRID,
    "made of the row operand": "x=hybrid(row=mxfp8, col=fp8, col_source=row), w=mxfp8, dy=fp8()",
    "a gradient in bf16": "fprop=mxfp8, dgrad=mxfp8, wgrad=bf16",
}
MEASURED = {"fp8-current": 4}
"""The bytes of the amax that forward has measured, where both operands have the same."""


def model(recipes: str | Mapping[str, str], fuse: bool, norm: Any = nn.RMSNorm, dtype: Any = torch.bfloat16) -> Any:
    torch.manual_seed(1)
    net = nn.Sequential(Behind(norm, IN, OUT).to(dtype))
    with torch.no_grad():
        net[0].norm.weight.uniform_(0.5, 1.5)
    own = dict.fromkeys("qkv", recipes) if isinstance(recipes, str) else recipes
    lpq.convert(net, {"rules": [{"match": f"*.{name}", "recipe": recipe} for name, recipe in own.items()]}, fuse=fuse)
    return net


def pair(recipes: str | Mapping[str, str], norm: Any = nn.RMSNorm, dtype: Any = torch.bfloat16) -> tuple[Any, Any]:
    """The same model without and with the encoding norm."""
    plain, fused = (model(recipes, fuse, norm, dtype) for fuse in (False, True))
    return plain, fused


def given(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(*ROWS, IN, dtype=dtype)


def made(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The column operands that layers get from now on."""
    found, finish = list[list[Tensor]](), SharedColumn.finish
    monkeypatch.setattr(SharedColumn, "finish", lambda *args: found.append([*finish(*args)]) or found[-1])
    return found


def waits(fused: Any, *encodings: bool) -> bool:
    """Whether backward makes the column operand of each encoding of the norm's output, for which this is True."""
    y = fused[0].norm(given().requires_grad_())
    assert isinstance(y, WithValue)
    later = [encoded.operand_cache is not None and encoded.operand_cache[3] is not None for encoded in (y, *y.beside)]
    assert all(encoded.col is None for encoded, is_later in zip((y, *y.beside), later, strict=True) if is_later)
    return later == [*encodings]


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize(("name", "dtype"), [*zip(RECIPES, cycle([torch.float32, torch.bfloat16]))], ids=str)
def test_no_number_changes(name: str, norm: Any, dtype: torch.dtype) -> None:
    plain, fused = pair(f"{RECIPES[name]}, {SAVED}", norm, dtype)
    assert waits(model(f"{RECIPES[name]}, {SAVED}", True), True)
    expected = step(plain, given(dtype))
    assert equal(step(fused, given(dtype)), expected)
    assert equal(step(model(RECIPES[name], True, norm, dtype), given(dtype)), expected)


@pytest.mark.parametrize("name", RECIPES)
def test_the_bytes(name: str) -> None:
    """The column operand is gone. A copy of the norm's weight is kept, and what was measured."""
    x = given().requires_grad_()
    kept = []
    for recipe in (RECIPES[name], f"{RECIPES[name]}, {SAVED}"):
        fused = model(recipe, True)
        column = fused[0].norm(x).col
        of_column = sum(t.nbytes for t in column.tensors()) if column is not None else 0
        kept.append((kept_for_backward(lambda fused=fused: fused(x), fused.parameters())[1], of_column))
    (before, of_column), (after, none) = kept
    assert of_column >= 64 * IN * 0.5
    assert none == 0
    weight = model(CURRENT, True)[0].norm.weight.nbytes
    assert before - after == of_column - weight - MEASURED.get(name, 0)


@pytest.mark.parametrize("recipe", [CURRENT, MXFP8])
def test_it_is_made_once_and_freed_after_the_last_layer(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, found = model(f"{recipe}, {SAVED}", True), made(monkeypatch)
    y = fused(given().requires_grad_())
    assert not found
    y.sum().backward()
    first, *others = found
    assert len(others) == 2
    assert all(t is own for other in others for t, own in zip(other, first, strict=True))
    columns = [weakref.ref(t) for t in first]
    found.clear()
    del first, others
    assert all(column() is None for column in columns)
    assert y.grad_fn is not None  # though the graph is there


def test_it_is_freed_where_a_layer_runs_again_or_has_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch)
    for recompute in (False, True):
        net = model(f"{MXFP8}, {SAVED}", True)[0]
        x = net.norm(given().requires_grad_())
        net.v(x)
        behind = lambda x, net=net: net.q(x) + net.k(x)  # noqa: E731
        y = checkpoint(behind, x, use_reentrant=False) if recompute else behind(x)
        y.sum().backward()
        first, second = found
        assert first is not second
        assert all(a is b for a, b in zip(first, second, strict=True))
        columns = [weakref.ref(t) for t in first]
        found.clear()
        del first, second, x
        assert all(column() is None for column in columns)
        assert y.grad_fn is not None


@pytest.mark.parametrize("recipe", [CURRENT, MXFP8, HYBRID])
@pytest.mark.parametrize("run", [recomputed, reentrant, offloaded, evaluated, autocast])
def test_under(run: Run, recipe: str) -> None:
    dtype = torch.float32 if run is autocast else torch.bfloat16
    plain, fused = pair(f"{recipe}, {SAVED}", dtype=dtype)
    assert equal(step(fused, given(dtype), run), step(plain, given(dtype), run))


@pytest.mark.starts
def test_under_a_compiler_the_layers_take_the_tensor() -> None:
    """A compiler decides by itself what is kept, of the norm and the layers, or of the layers alone."""

    class Apart(nn.Module):
        def __init__(self, behind: Behind) -> None:
            super().__init__()
            self.norm, self.attention = behind.norm, Attention(behind)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.attention(self.norm(x))
            return y

    class Attention(nn.Module):
        def __init__(self, behind: Behind) -> None:
            super().__init__()
            self.q, self.k, self.v = behind.q, behind.k, behind.v

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.q(x) + 0.5 * self.k(x) + torch.sin(self.v(x))
            return y

    plain, fused = pair(f"{MXFP8}, {SAVED}")
    expected = step(plain, given())
    for run in (plainly, compiled, plainly):
        assert equal(step(fused, given(), run), expected)
    net = nn.Sequential(Apart(model(f"{MXFP8}, {SAVED}", False)[0]))
    lpq.fuse(net)
    assert waits(net, True)
    found = step(net, given())
    net[0].attention.compile(fullgraph=True, backend="aot_eager")
    assert equal(step(net, given()), found)
    assert equal(found[:2], expected[:2])


def test_layers_that_train_decide() -> None:
    """A frozen layer needs no column operand, whatever its recipe says."""
    for frozen, columns in (("k", True), ("qk", True), ("qkv", False)):
        plain, fused = pair({"q": f"{CURRENT}, {SAVED}", "k": CURRENT, "v": f"{CURRENT}, {SAVED}"})
        assert waits(fused, False)
        for net in (plain, fused):
            for name in frozen:
                getattr(net[0], name).weight.requires_grad_(False)
        assert waits(fused, columns)
        assert equal(step(fused, given()), step(plain, given()))
    with torch.no_grad():
        assert torch.equal(fused(given()), plain(given()))


MIXED: dict[str, tuple[Mapping[str, str], tuple[bool, ...]]] = {
    "one keeps the operand": ({"q": f"{CURRENT}, {SAVED}", "k": CURRENT, "v": f"{CURRENT}, {SAVED}"}, (False,)),
    "two formats": ({"q": f"{CURRENT}, {SAVED}", "k": f"{MXFP8}, {SAVED}", "v": f"{CURRENT}, {SAVED}"}, (True, True)),
    "one of two formats": ({"q": CURRENT, "k": f"{MXFP8}, {SAVED}", "v": CURRENT}, (False, True)),
    "others take the tensor": ({"q": f"{CURRENT}, {SAVED}", "k": "bf16", "v": "skip"}, (True,)),
    "a history": ({"q": f"{CURRENT}, {SAVED}", "k": "fp8-delayed", "v": "fp8-delayed"}, (True, False)),
}


@pytest.mark.parametrize("name", MIXED)
def test_layers_of_several_recipes(name: str) -> None:
    recipes, later = MIXED[name]
    plain, fused = pair(recipes)
    assert waits(fused, *later)
    for number in range(2):
        assert equal(step(fused, given() * (number + 1)), step(plain, given() * (number + 1)))


DELAYED = f"x=fp8(scaling=delayed), w=fp8(scaling=delayed), dy=fp8(), {SAVED}"
NOTES = {
    "backward makes the column operand for q, k, v anew": f"{CURRENT}, {SAVED}",
    "x.save=input has no effect for q, v, as others keep the column": MIXED["one keeps the operand"][0],
    "for q, k, v, as x=fp8(scaling=delayed) remembers statistics": DELAYED,
}


@pytest.mark.parametrize("note", NOTES)
def test_the_report_says_what_backward_makes(note: str) -> None:
    (entry,) = lpq.report(model(NOTES[note], True)).fused
    assert note in entry.note
    (entry,) = lpq.report(model(CURRENT, True)).fused
    assert "column operand" not in entry.note
    assert SAVED not in entry.note


def test_a_recipe_that_remembers_keeps_its_operand() -> None:
    plain, fused = pair(DELAYED)
    assert waits(fused, False)
    for number in range(3):
        assert equal(step(fused, given() * (number + 1)), step(plain, given() * (number + 1)))


class Twice(nn.Module):
    """A norm, and layers that take its output once and twice, beside other code; the norm runs twice, too."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm(IN, eps=1e-5)
        self.q, self.k = (nn.Linear(IN, IN, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norm(x), self.norm(2 * x)
        y: Tensor = self.q(first) + self.k(first) * self.q(second) + torch.sin(self.q(first)) + second
        return y


@pytest.mark.parametrize("recipe", [CURRENT, MXFP8])
def test_a_layer_that_takes_it_twice_and_one_that_takes_it_once(recipe: str) -> None:
    found = []
    for norm in (nn.RMSNorm, lpq.nn.RMSNorm):
        torch.manual_seed(1)
        net: Any = lpq.convert(Twice(norm).bfloat16(), f"{recipe}, {SAVED}")
        if norm is lpq.nn.RMSNorm:
            net.norm.consumers, net.norm.serves_others = (net.q, net.k), True
        found.append(step(net, given()))
    assert equal(*found)


def test_backward_twice_and_in_parts() -> None:
    plain, fused = pair(f"{MXFP8}, {SAVED}")
    grads: list[list[Tensor]] = []
    for net in (plain, fused):
        x, weights = given().requires_grad_(), [net[0].q.weight, net[0].k.weight]
        y = net(x).float().square().mean()
        found = [*torch.autograd.grad(y, weights[:1], retain_graph=True)]
        found += torch.autograd.grad(y, [x], retain_graph=True)
        found += torch.autograd.grad(y, [*weights, x], retain_graph=True)
        found += torch.autograd.grad(y, [*weights, x, net[0].norm.weight])
        grads.append(found)
    assert equal(*grads)


def test_unfused_each_layer_keeps_the_tensor() -> None:
    plain, fused = pair(f"{CURRENT}, {SAVED}")
    expected = step(plain, given())
    lpq.unfuse(fused)
    assert type(fused[0].norm) is nn.RMSNorm
    assert equal(step(fused, given()), expected)
    lpq.fuse(fused)
    assert waits(fused, True)
    assert equal(step(fused, given()), expected)


def test_the_input_of_the_norm_may_not_be_written_to() -> None:
    fused = model(f"{CURRENT}, {SAVED}", True)
    x = given().requires_grad_() * 2
    y = fused(x)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_input_of_a_frozen_norm_may_not_be_written_to_before_a_layer_takes_the_output() -> None:
    """Such a norm keeps nothing for itself, and the layer keeps the input only then."""
    fused = model(f"{CURRENT}, {SAVED}", True)[0]
    fused.norm.requires_grad_(False)
    x = given()
    y = fused.norm(x)
    fused.q(y)
    x.add_(1)
    with torch.no_grad():
        fused.k(y)  # which has no backward
    with pytest.raises(RuntimeError, match=r"input of a norm, \[2, 32, 64\], was written to, and then a layer took"):
        fused.k(y)


@pytest.mark.parametrize("run", [plainly, recomputed])
def test_before_a_fused_block(run: Run) -> None:
    found = []
    for fuse in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(Normed(nn.RMSNorm), Normed(nn.RMSNorm)).bfloat16()
        lpq.convert(net, f"{CURRENT}, {SAVED}", include="all", fuse=fuse)
        assert len(lpq.report(net).fused) == 4 * fuse
        assert sum("anew" in entry.note for entry in lpq.report(net).fused) == 2 * fuse
        found.append(step(net, given(), run))
    assert equal(*found)


@pytest.mark.parametrize("norm", [lpq.nn.RMSNorm, lpq.nn.LayerNorm])
def test_of_a_sum_that_the_norm_makes(norm: Any) -> None:
    found = []
    for by_norms in (False, True):
        torch.manual_seed(1)
        net: Any = lpq.convert(Stream(norm, IN, by_norms).bfloat16(), f"{MXFP8}, {SAVED}")
        if by_norms:
            net.first.consumers, net.second.consumers = (net.a,), (net.b,)
        found.append(step(net, given()))
    assert equal(*found)


def test_kernels_compute_the_output_whatever_they_encode_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """These encode no column operand, as of NVFP4: then they write the output, and an encoder follows. So the option
    and the pass do not change who computes it, which decides its last bits."""
    nets, ran = [model(f"{MXFP8}, x.save={option}", True) for option in ("encoded", "input")], []

    def bind(source: Any, *_: Any) -> Any:
        def run(inputs: Any, *_: Any) -> Any:
            ran.append("value")
            return [Produced((), (), (), source.compute(*inputs)[0].reshape(-1, IN))]

        return run

    def bind_producer(source: Any, outputs: Any, group: str) -> Any:
        producer = producers.bind_producer(source, outputs, group)
        return producer._replace(produce=lambda *given: ran.append("row") or producer.produce(*given))

    class Beside:
        bind_rows = staticmethod(lambda norm, *_: norm.rows)
        bind_gradients = staticmethod(lambda *_: lambda dy, x, weight, *_: (dy * weight, weight))

    monkeypatch.setattr(norms, "kernels_of", lambda *_: SimpleNamespace(bind=bind))
    monkeypatch.setattr(norms, "norm_kernels_of", lambda *_: Beside)
    monkeypatch.setattr(norms, "bind_producer", bind_producer)
    monkeypatch.setattr(norms, "why_apart", lambda _, output: "no side encodes it" if output.spec.col else None)
    monkeypatch.setattr(NormKind, "compute", lambda *_: pytest.fail("torch computes the output"))
    first, second = (step(net, given()) for net in nets)
    assert equal(first, second)
    assert ran == ["value", "row"]
    with torch.no_grad():
        assert all(torch.equal(net(given()), first[0]) for net in nets)
    assert ran[2:] == ["row", "row"]
