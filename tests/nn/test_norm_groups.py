"""A norm before layers of several formats: a run for each, and to the bit what norm and layers compute apart."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import pytest
import torch
from counting import encodings
from support.comparing import equal, equal_states
from support.passes import Run, compiled, evaluated, nodes_of, offloaded, plainly, recomputed, reentrant, step
from support.small_models import Behind, Normed
from torch import Tensor, nn

import lpq
from lpq.core import QuantizedTensor
from lpq.operations.norms import NormKind
from lpq.tensor.with_value import WithValue

ROWS, IN, OUT = (2, 32), 64, 96
RANDOM = "x=nvfp4(stochastic=true), w=mxfp8, dy=mxfp8"
HISTORY = "x=fp8(scaling=delayed, dtype=e5m2), w=fp8(scaling=delayed), dy=fp8(scaling=delayed, dtype=e5m2)"
MIXED = {
    "three": ({"q": "fp8-current", "k": "mxfp8", "v": "fp8-row"}, 3),
    "one high": ({"q": "fp8-current", "k": "mxfp8", "v": "bf16"}, 2),
    "one skipped": ({"q": "skip", "k": "nvfp4", "v": "fp8-block"}, 2),
    "two share": ({"q": "mxfp8", "k": "fp8-current", "v": "mxfp8"}, 2),
    "one draws": ({"q": RANDOM, "k": "mxfp8", "v": "mxfp8"}, 1),
    "two histories": ({"q": "fp8-delayed", "k": HISTORY, "v": "fp8-delayed"}, 2),
    "a history beside": ({"q": "mxfp8", "k": "fp8-delayed", "v": "bf16"}, 2),
}
"""The recipes of the layers, and the runs of the norm."""


def model(recipes: Mapping[str, str], norm: Any = nn.RMSNorm, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(1)
    net = nn.Sequential(Behind(norm, IN, OUT).to(dtype))
    lpq.convert(net, {"rules": [{"match": f"*.{name}", "recipe": recipe} for name, recipe in recipes.items()]})
    with torch.no_grad():
        net[0].norm.weight.uniform_(0.5, 1.5)
    return net


def pair(name: str, norm: Any = nn.RMSNorm, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """The same model without and with the encoding norm."""
    return model(MIXED[name][0], norm, dtype), lpq.fuse(model(MIXED[name][0], norm, dtype))


def given(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(*ROWS, IN, dtype=dtype)


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("name", MIXED)
def test_results_and_gradients_are_those_of_the_parts(norm: Any, name: str) -> None:
    plain, fused = pair(name, norm)
    for number in range(3):
        x = given() * (number + 1)
        y = fused[0].norm(x)
        assert isinstance(y, WithValue)
        assert 1 + len(y.beside) == MIXED[name][1]
        assert equal(step(fused, x), step(plain, x))
        assert equal_states(fused.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", ["one high", "two share", "one draws", "two histories"])
@pytest.mark.parametrize("run", [recomputed, reentrant, offloaded, evaluated])
def test_under(name: str, run: Run) -> None:
    if run is reentrant and name == "two histories":
        pytest.skip("layers refuse it")
    plain, fused = pair(name)
    assert equal(step(fused, given(), run), step(plain, given(), run))


@pytest.mark.starts
@pytest.mark.parametrize("name", ["one high", "two histories"])
def test_compiled_between_eager_steps(name: str) -> None:
    plain, fused = pair(name)
    for run in (plainly, compiled, plainly):
        assert equal(step(fused, given(), run), step(plain, given()))
        assert equal_states(fused.state_dict(), plain.state_dict())


def test_the_norm_is_computed_once_and_encoded_once_for_each_format(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused = pair("two share")
    normed, made = list[Tensor](), encodings(monkeypatch)
    compute = NormKind.compute
    monkeypatch.setattr(NormKind, "compute", lambda *args: normed.append(compute(*args)) or normed[-1])
    x = given().requires_grad_()
    y = fused(x)
    assert len(normed) == 1
    assert not [wanted for wanted in made if wanted.shape == (64, IN)], "the layers encode no input"
    y.sum().backward()
    assert x.grad is not None


def test_a_history_that_differs_from_its_group_s_keeps_the_norm_apart() -> None:
    plain = model(MIXED["two histories"][0])
    plain[0].v.x_amax.fill_(3.0)
    fused = lpq.fuse(copy.deepcopy(plain))
    ((entry,), fused_ones) = lpq.report(fused).apart, lpq.report(fused).fused
    assert not fused_ones
    assert entry.note.startswith("x_amax of layer 0.q, ")
    assert "layer 0.v, " in entry.note
    assert equal(step(fused, given()), step(plain, given()))


def test_only_groups_that_train_have_a_column_operand() -> None:
    plain, fused = pair("two share")
    for net in (plain, fused):
        net[0].k.weight.requires_grad_(False)
    y = fused[0].norm(given())
    assert y.col is not None
    (of_k,) = y.beside
    assert of_k.col is None
    assert equal(step(fused, given()), step(plain, given()))


def test_a_view_has_all_encodings_and_others_get_the_tensor() -> None:
    plain, fused = pair("one high")
    y, net = fused[0].norm(given()), fused[0]
    for same in (y.view_as(y), y.detach()):
        assert isinstance(same, QuantizedTensor)
        for name in "qkv":
            assert torch.equal(getattr(net, name)(same), getattr(plain[0], name)(plain[0].norm(given())))
    assert torch.equal(y + 0, plain[0].norm(given()))


NOTES = {
    "one high": "it encodes its output in 2 runs, one for each format that layers behind it take: fp8 for q, and "
    "mxfp8 for k, and hands it to others in high precision, from the first of them",
    "two share": "it encodes its output in 2 runs, one for each format that layers behind it take: mxfp8 for q, v, and "
    "fp8 for k",
    "one draws": "it encodes its output, once, for the layers that take it, and hands it to others in high precision, "
    "from the same run",
}


@pytest.mark.parametrize("name", NOTES)
def test_the_report_names_the_runs(name: str) -> None:
    (entry,) = lpq.report(pair(name)[1]).fused
    assert entry.note.partition("; ")[0] == NOTES[name]


BLOCKS = {
    "two formats": {"gate": "fp8-current", "up": "mxfp8"},
    "two histories": {"gate": "fp8-delayed", "up": HISTORY},
    "gate in bf16": {"gate": "bf16", "up": "mxfp8"},
    "up in bf16": {"gate": "mxfp8", "up": "bf16"},
    "gate skipped": {"gate": "skip", "up": "fp8-delayed"},
    "up skipped": {"gate": "fp8-current", "up": "skip"},
    "up draws": {"gate": "mxfp8", "up": RANDOM},
    "gate draws": {"gate": RANDOM, "up": "fp8-delayed"},
}
"""The recipes of gate and up; down has another."""


def block(recipes: Mapping[str, str], norm: Any) -> Any:
    torch.manual_seed(1)
    net = nn.Sequential(Normed(norm).bfloat16())
    rules = [{"match": f"*.{name}_proj", "recipe": recipe} for name, recipe in recipes.items()]
    return lpq.convert(net, {"rules": [*rules, {"match": "*", "recipe": "nvfp4"}]})


@pytest.mark.parametrize(("name", "run"), [*zip(BLOCKS, cycle((plainly, plainly, recomputed, recomputed)))])
def test_before_a_block_whose_gate_and_up_differ(name: str, run: Run) -> None:
    norm = nn.RMSNorm if [*BLOCKS].index(name) % 2 else nn.LayerNorm
    plain, fused = block(BLOCKS[name], norm), lpq.fuse(block(BLOCKS[name], norm))
    names = {entry.name for entry in lpq.report(fused).fused}
    assert names == ({"0.norm"} if "skip" in BLOCKS[name].values() else {"0.norm", "0.mlp"})
    assert any("FusedMLP" in node for node in nodes_of(fused(given()))) == ("0.mlp" in names)
    for number in range(2):
        x = given() * (number + 1)
        assert equal(step(fused, x, run), step(plain, x, run))
        assert equal_states(fused.state_dict(), plain.state_dict())


@pytest.mark.starts
@pytest.mark.parametrize("part", ["q", "k"])
def test_a_layer_that_is_compiled_behind_a_norm_of_several_formats(part: str) -> None:
    """Compiled code takes the first encoding alone: a layer of another format encodes the output itself."""
    plain, fused = pair("two share")
    torch.compiler.reset()
    fused[0].get_submodule(part).compile(fullgraph=True, backend="aot_eager")
    assert equal(step(fused, given()), step(plain, given()))
