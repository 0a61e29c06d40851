"""A model is converted again, and its weights are stored quantized already: they keep their format, or it is refused.

A refusal changes nothing, and the report tells what is stored. A model that is sharded is not restored.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import fully_shard, mesh_of, on_ranks
from sharded import bytes_of
from support.comparing import equal_states
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import lpq
from lpq.core import QuantizedTensor
from lpq.distributed import tensor_parallel as tp
from lpq.nn.conversion import RECORD
from lpq.recipes import RecipeError

NOTE = "stored and gathered as fp8: 0.50 of bf16 in forward, 0.50 in backward"
OTHERS = {"rules": [{"match": "*", "recipe": "x=mxfp8(), w=fp8(), dy=nvfp4()"}]}
"""The weight's format stays."""
LATER = {"rules": [{"match": "*", "recipe": "fp8-current", "until": 2}, {"match": "*", "recipe": "mxfp8"}]}
LEFT = {"rules": [{"match": "*", "recipe": "fp8-current", "until": 2}, {"match": "*", "recipe": "skip"}]}
ONE_LEFT = {"rules": [{"match": "0", "recipe": "fp8-current"}]}
REMEDY = r"make it an ordinary weight: layer\.weight = nn\.Parameter\(layer\.weight\.dequantize\(\)\)"


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def _stored() -> nn.Sequential:
    net = lpq.convert(_layers(), "fp8-current", weights="quantized")
    assert isinstance(net, nn.Sequential)
    return net


def _all_of(net: nn.Module) -> tuple[Any, ...]:
    """Whatever a conversion changes."""
    layers = [m for m in net.modules() if isinstance(m, lpq.nn.Linear)]
    kept = [(layer.recipe, layer.schedule, id(layer.model.fsdp), id(layer.weight)) for layer in layers]
    return kept, net.__dict__[RECORD], str(lpq.report(net))


def _trains(net: nn.Module) -> None:
    net(torch.randn(32, 64)).square().mean().backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("weights", ["quantized", None])
@pytest.mark.parametrize("policy", ["fp8-current", OTHERS], ids=["the same", "other x and dy"])
def test_a_recipe_that_quantizes_the_weight_alike_leaves_it_as_it_is(policy: Any, weights: Any) -> None:
    net = _stored()
    before = bytes_of(net)
    lpq.convert(net, policy, weights=weights)
    assert net[0].recipe == lpq.policy(policy).rules[0].recipe
    assert equal_states(before, bytes_of(net))
    assert [(e.name, e.note) for e in lpq.report(net).weights] == [("0", NOTE), ("2", NOTE)]
    _trains(net)


KEEPS = "its weight is stored as fp8, which it keeps, and the policy wants it"
REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    # a policy, options, what is raised
    "another format": ("mxfp8", {}, RecipeError, rf"^0: {KEEPS} as mxfp8: mxfp8\. .*w=fp8; .*{REMEDY}$"),
    "stored in another format": ("mxfp8", {"weights": "quantized"}, RecipeError, rf"^0: {KEEPS} as mxfp8: mxfp8\. .*"),
    "at a later step": (LATER, {}, RecipeError, f"^0: {KEEPS} as mxfp8: fp8-current until step 2, then mxfp8"),
    "left alone later": (
        LEFT, {"weights": "high_precision"}, RecipeError,
        f"^0: {KEEPS} in high precision: fp8-current until step 2, then left alone",
    ),
    "bf16": ("bf16", {}, RecipeError, rf"^0: {KEEPS} as identity\(dtype=bfloat16\): bf16"),
    # the first layer, which matches, is not converted either
    "it matches no more": (ONE_LEFT, {}, RecipeError, f"^2: {KEEPS} in high precision"),
    "high precision": (
        "fp8-current", {"weights": "high_precision"}, ValueError,
        rf"^0: its weight is stored as fp8, and weights='high_precision' .*{REMEDY}$",
    ),
    "ranks that cut its blocks": (
        "fp8-current", {"weights": "quantized", "ranks": 3}, ValueError,
        rf"^0: its weight is stored as fp8 and cannot be cut for ranks=3: its 128 rows .* uneven\. .*{REMEDY}$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(case: str) -> None:
    policy, options, error, words = REFUSED[case]
    net = _stored()
    before = _all_of(net), bytes_of(net)
    with pytest.raises(error, match=words):
        lpq.convert(net, policy, **options)
    assert _all_of(net) == before[0]
    assert equal_states(before[1], bytes_of(net))
    _trains(net)


def test_what_is_not_refused() -> None:
    """An ordinary layer that a policy leaves, and ranks that cut whole blocks."""
    ordinary: Any = lpq.convert(lpq.convert(_layers(), "fp8-current"), ONE_LEFT)
    assert ordinary[2].recipe is None
    lpq.convert(_stored(), "fp8-current", weights="quantized", ranks=2)


def test_the_remedy_works() -> None:
    for weights, note in (("quantized", "stored and gathered as mxfp8"), ("high_precision", "gathered as mxfp8")):
        net = _stored()
        for layer in (net[0], net[2]):
            layer.weight = nn.Parameter(layer.weight.dequantize())
        lpq.convert(net, "mxfp8", weights=weights)
        assert [e.note.partition(":")[0] for e in lpq.report(net).weights] == [note] * 2
        _trains(net)


def test_ranks_for_which_no_weight_is_prepared_are_refused() -> None:
    ordinary, prepared = _layers(), lpq.convert(_layers(), "fp8-current", weights="quantized", ranks=2)
    before = _all_of(prepared)
    for net, ranks in ((ordinary, 2), (prepared, 4)):
        with pytest.raises(ValueError, match=rf"^ranks={ranks} is for .* add weights='quantized' .* leave ranks out$"):
            lpq.convert(net, "fp8-current", ranks=ranks)
    assert [type(module) for module in ordinary] == [type(module) for module in _layers()]
    assert _all_of(prepared) == before
    lpq.convert(prepared, "fp8-current", ranks=2)  # as it is prepared


def test_a_weight_that_cannot_be_encoded_is_refused_before_anything_is_converted() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"^1: its weight is torch\.float64; float32, .* can be encoded: cast"):
        lpq.convert(net, "fp8-current", weights="quantized")
    assert [type(layer) for layer in net] == [nn.Linear, nn.Linear]


def test_a_weight_whose_signs_a_pass_draws_is_not_stored() -> None:
    """Its column operand would have other signs than the gradient of the output. One that each pass makes of the row
    operand has the signs of that pass (``test_columns_at_use``)."""
    net = nn.Sequential(nn.Linear(256, 256))
    recipe = (
        "x=mxfp8, w=hybrid(row=mxfp8, col=nvfp4(stochastic=eden)), dy=hybrid(row=nvfp4(stochastic=eden), col=mxfp8)"
    )
    with pytest.warns(UserWarning, match="stored no weight quantized: 0: in high precision"):
        lpq.convert(net, recipe, weights="quantized", ranks=2)
    assert not isinstance(net[0].weight, lpq.QuantizedTensor)


def test_weights_in_high_precision_may_have_any_format() -> None:
    """Only stored weights keep their format."""
    for weights in ("high_precision", "quantized"):
        net = lpq.convert(_layers(), "fp8-current", weights="high_precision")
        lpq.convert(net, "nvfp4", weights=weights)
        kept = "stored and gathered" if weights == "quantized" else "gathered"
        assert all(entry.note.startswith(f"{kept} as nvfp4") for entry in lpq.report(net).weights)


def test_the_report_tells_what_is_stored_where_a_layer_was_given_another_recipe() -> None:
    net = _stored()
    net[0].recipe = "mxfp8"
    net[2].recipe = None
    assert [entry.note for entry in lpq.report(net).weights] == [
        "stored as fp8, and its recipe wants mxfp8: it keeps its format",
        "stored as fp8, and its recipe wants high precision: it keeps its format",
    ]


@on_ranks(2)
def test_two_ranks(rank: int) -> None:
    net = fully_shard(_stored(), reshard_after_forward=True)
    _trains(net)
    before = _all_of(net)
    with pytest.raises(RecipeError, match="0: its weight is stored as fp8, which it keeps, and the policy wants it"):
        lpq.convert(net, "nvfp4")
    for weights in ("quantized", "high_precision"):
        with pytest.raises(ValueError, match="0: its weight is sharded already"):
            lpq.convert(net, "fp8-current", weights=weights)
    assert _all_of(net) == before
    lpq.convert(net, OTHERS)
    assert [entry.note for entry in lpq.report(net).weights] == [NOTE] * 2
    _trains(net)
    # While a weight is gathered, its layer has a quantized one, whatever is stored.
    for weights in ("high_precision", "quantized"):
        net = lpq.convert(_layers(), "fp8-current", weights=weights)
        fully_shard(net)
        net(torch.randn(32, 64))
        assert isinstance(net[0].weight.data, QuantizedTensor)
        with pytest.raises(ValueError, match="0: its weight is sharded already"):
            lpq.convert(net, "nvfp4", weights=weights)
        if weights == "quantized":
            with pytest.raises(RecipeError, match="0: its weight is stored as fp8, which it keeps"):
                lpq.convert(net, "nvfp4")
            continue
        lpq.convert(net, "nvfp4")
        assert isinstance(net, FSDPModule)
        net.reshard()
        assert all(entry.note.startswith("gathered as nvfp4") for entry in lpq.report(net).weights)
        _trains(net)
    # Some ways to shard are found out when a weight is gathered only.
    net = fully_shard(_stored(), shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
    words = f"stored as fp8, and cannot be gathered: it is sharded by {Shard(1)}, and quantized weights are sharded"
    assert all(entry.note.startswith(words) for entry in lpq.report(net).weights)


def test_the_layer_is_named_as_it_is_in_the_model() -> None:
    with pytest.raises(RecipeError, match=r"^inner\.0: its weight is stored as fp8"):
        lpq.convert(nn.ModuleDict({"inner": _stored()}), "nvfp4")


@on_ranks(2)
def test_a_model_that_is_sharded_is_not_restored(rank: int) -> None:
    """``lpq.restore`` refuses it, and changes nothing in it."""
    for how in ("fsdp", "torch", "lpq"):
        model: Any = lpq.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8", include="all")
        if how == "fsdp":
            fully_shard(model)
        else:
            parallelize_module(model, mesh_of(), {"0": (ColwiseParallel if how == "torch" else tp.ColwiseParallel)()})
        with pytest.raises(ValueError, match="it is sharded: restore the model before fully_shard and parallelize"):
            lpq.restore(model)
        assert isinstance(model[0], lpq.nn.Linear)
        assert model[0].recipe == lpq.recipe("mxfp8")
