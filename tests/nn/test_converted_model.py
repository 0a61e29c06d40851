"""The attributes that layers of one model share, and the attributes of a layer of its own."""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
from typing import Any

import pytest
import torch
from support.hugging_face import small
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers.pytorch_utils import Conv1D

import lpq
from lpq.distributed.model_gathers import Gathering
from lpq.nn import Layer
from lpq.nn.fused_experts import FusedExperts
from lpq.observe import observing

OWN = {"model", "passes", "schedule", "qualified_name", "gather"}
STAGED = {"rules": [{"match": "*", "recipe": "mxfp8", "until": 8}, {"match": "*", "recipe": "nvfp4"}]}


def net() -> Any:
    return nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64)))


def layers(model: nn.Module) -> list[Layer]:
    return [module for module in model.modules() if isinstance(module, Layer)]


class Ignores:
    def observe(self, seen: object) -> None:
        """Do nothing."""


@pytest.mark.parametrize("weights", [None, "high_precision", "quantized"])
@pytest.mark.parametrize("policy", ["mxfp8", "fp8-delayed", STAGED], ids=["mxfp8", "fp8-delayed", "by step"])
def test_a_layer_has_few_attributes_of_its_own(policy: Any, weights: Any) -> None:
    if weights == "quantized" and policy is STAGED:
        policy = "nvfp4"
    plain = vars(nn.Linear(64, 64)).keys()
    model = lpq.convert(net(), policy, weights=weights, accumulate=None if weights else "grad")
    with lpq.hold_weights(model), observing(model, Ignores()):
        model(torch.randn(16, 64)).square().mean().backward()
    made = [*layers(model), *layers(copy.deepcopy(model)), lpq.nn.Linear(64, 64, recipe="mxfp8")]
    assert all(vars(layer).keys() - plain <= OWN for layer in made)


@pytest.mark.parametrize("of", ["Llama", "Qwen3Moe", "GptOss", "Conv1D"])
def test_a_layer_of_any_kind_has_at_most_six(of: str) -> None:
    """Also a block or norm that ``lpq.fuse`` extends. Tensor parallelism adds ``layouts``."""
    before, model = (nn.Sequential(Conv1D(64, 64)) if of == "Conv1D" else small(of) for _ in range(2))
    lpq.convert(model, "fp8-current", fuse=True)
    if of == "Conv1D":
        model(torch.randn(16, 64)).sum().backward()
    else:
        model(input_ids=torch.arange(32)[None]).logits.sum().backward()
    pairs = zip(before.modules(), model.modules(), strict=True)
    own = {type(made): vars(made).keys() - vars(plain).keys() for plain, made in pairs if type(made) is not type(plain)}
    assert own
    assert {kind: names for kind, names in own.items() if len(names) + issubclass(kind, Layer | FusedExperts) > 6} == {}


def test_a_layer_of_groups_has_its_sizes_besides() -> None:
    made = lpq.convert(nn.Sequential(lpq.nn.GroupedLinear(2, 64, 64, recipe=None)), "mxfp8")[0]
    own = {*OWN, "num_groups", "in_features", "out_features"} - {"gather"}  # which weights= adds
    assert vars(made).keys() - vars(nn.Module()).keys() == own


def test_layers_that_one_call_converts_have_one_model() -> None:
    model = lpq.convert(net(), STAGED, accumulate="grad")
    (shared,) = {layer.model for layer in layers(model)}
    assert (shared.accumulate, shared.stages.step) == ("grad", 0)
    lpq.set_step(model, 3)
    assert shared.stages.step == 3
    for part in model:
        lpq.convert(part, "mxfp8")
    assert len({layer.model for layer in layers(model)}) == len(model)
    lpq.convert(model, "mxfp8")
    assert len({layer.model for layer in layers(model)}) == 1


def test_only_layers_whose_weight_is_prepared_know_how_fsdp2_gathers_it() -> None:
    """A copy of one copies no other."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight  # which is not gathered quantized, as it is in two modules
    first, _, last = layers(lpq.convert(model, "mxfp8", weights="high_precision"))
    assert (first.gather, first.model.fsdp) == (None, None)
    assert copy.deepcopy(first).model.fsdp is None
    for made in (copy.deepcopy(last), pickle.loads(pickle.dumps(last))):
        assert made.model.fsdp.root is made
    assert first.model.inputs is last.model.inputs


def test_layers_made_by_hand_have_nothing_in_common() -> None:
    made = [lpq.nn.Linear(64, 64, recipe="mxfp8") for _ in range(2)]
    assert made[0].model is not made[1].model
    assert {*vars(made[0].model).values()} == {None}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_another_model_with_the_options_of_the_conversion(copied: Any) -> None:
    model = lpq.convert(net(), STAGED, accumulate="grad")
    x = torch.randn(16, 64)  # operands are kept for as long as it lives
    model(x)
    (own,) = {layer.model for layer in layers(model)}
    (other,) = {layer.model for layer in layers(copied(model))}
    assert other is not own
    assert (other.accumulate, other.stages, other.inputs) == ("grad", None, {})
    assert own.stages is not None
    assert len(own.inputs) > 0


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_does_not_run_what_was_compiled_in_place(copied: Any) -> None:
    """As in torch: it would compute with the weights of the module that it was made of."""
    model = lpq.convert(small("Llama"), "mxfp8", fuse=True)
    for module in model.modules():
        module._compiled_call_impl = lambda *_: None  # as module.compile() sets it
    assert all(copied(module)._compiled_call_impl is None for module in model.modules())
    assert all(module._compiled_call_impl is not None for module in model.modules())


def test_a_shallow_copy_has_a_recipe_of_its_own() -> None:
    layer = lpq.nn.Linear(64, 64, recipe="mxfp8")
    x = torch.randn(16, 64)
    before, other = layer(x), copy.copy(layer)
    other.recipe = "nvfp4"
    assert (layer.recipe, other.model) == (lpq.recipe("mxfp8"), layer.model)
    assert torch.equal(layer(x), before)
    assert not torch.equal(other(x), before)


# ------------------------------------------------------------------------------------------ an earlier version


class Earlier(pickle.Pickler):
    """Pickles layers with the attributes that they had before ``model`` and ``passes``."""

    def reducer_override(self, of: Any) -> Any:
        if isinstance(of, Gathering):
            return copyreg.__newobj__, (Gathering,), of.root  # type: ignore[attr-defined]
        if not isinstance(of, Layer):
            return NotImplemented
        state = {name: value for name, value in vars(of).items() if name not in ("model", "passes")}
        create, args, *_ = of.__reduce_ex__(2)
        return create, args, state | {"_recipe": of.recipe, "gathering": of.model.fsdp, "gather": None}


@pytest.mark.parametrize("weights", [None, "high_precision"])
def test_a_model_that_an_earlier_version_pickled_whole_is_refused(weights: Any) -> None:
    model = lpq.convert(net(), "mxfp8", weights=weights)
    Earlier(file := io.BytesIO()).dump(model)
    with pytest.raises(RuntimeError, match=r"layer 0\.0: another version of lpq pickled it.* save model\.state_dict"):
        pickle.loads(file.getvalue())


def test_a_layer_of_a_wrapper_by_the_name_of_one_inside_it_belongs_to_the_model() -> None:
    """A wrapper for checkpointing has no part in plain names. A layer that a dictionary lost had a step of its own."""
    wrapped = checkpoint_wrapper(nn.ModuleDict({"adapter": nn.Linear(64, 64)}))
    wrapped.adapter = nn.Linear(64, 64)
    model = lpq.convert(nn.Sequential(wrapped), "mxfp8", include="all")
    layers = [module for module in model.modules() if isinstance(module, lpq.nn.Linear)]
    assert layers == [wrapped._checkpoint_wrapped_module["adapter"], wrapped.adapter]
    assert layers[0].model is layers[1].model
