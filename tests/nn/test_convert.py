"""lpq.convert: what is swapped, what stays, and that a user can see why."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from counting import products
from support.small_models import converted
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import lpq
from lpq.core import PrecisionWarning, QuantizedTensor
from lpq.optim import MasterWeights
from lpq.recipes import RecipeError
from lpq.torch_private.tensors import local_part


class Custom(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.norm = nn.LayerNorm(32)
        self.custom = Custom(32, 32)
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.custom(self.norm(x)))


TOKENS = torch.arange(16).view(2, 8)


def test_conversion_is_in_place_and_keeps_every_parameter() -> None:
    model = Net()
    parameters = {n: id(p) for n, p in model.named_parameters()}
    layer, seen = model.blocks[0][0], []
    layer.register_forward_hook(lambda *_: seen.append(1))
    optimizer = torch.optim.AdamW(model.parameters())
    assert lpq.convert(model, "mxfp8") is model
    assert {n: id(p) for n, p in model.named_parameters()} == parameters
    assert model.blocks[0][0] is layer
    assert isinstance(layer, lpq.nn.Linear)
    assert model.head.weight is model.embed.weight
    before = model.head.weight.clone()
    model(TOKENS).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.head.weight, before)
    assert seen == [1]
    assert set(model.state_dict()) == set(Net().state_dict())


def test_the_report_says_what_was_swapped_and_what_was_left_and_why() -> None:
    model = lpq.convert(Net(), {"rules": [{"match": ["head"], "recipe": "skip"}, {"match": ["*"], "recipe": "mxfp8"}]})
    report = lpq.report(model)
    assert [e.name for e in report.converted] == [f"blocks.{i}.{j}" for i in range(3) for j in (0, 2)]
    left = {e.name: e.note for e in report.left}
    assert left["head"] == "rule 1 ('head') gives it no recipe"
    assert "subclass of nn.Linear" in left["custom"]
    assert left["embed"] == "no plugin converts Embedding"
    assert set(left) == {"head", "custom", "embed"}, "a norm holds no matrix"
    text = str(report)
    assert text.splitlines()[1] == "6 converted, 3 left alone"
    assert "blocks.0–2.{0,2} (6 Linear): mxfp8" in text
    assert "blocks.2.0 (Linear): mxfp8" in str(lpq.report(model, full=True))
    assert type(model.head) is nn.Linear


def test_the_report_tells_what_was_given_by_hand_since() -> None:
    model = lpq.convert(Net(), "mxfp8")
    model.blocks[0][0].recipe, model.blocks[1][0].recipe = "nvfp4", None
    notes = {e.name: e.note for e in lpq.report(model).converted}
    assert notes["blocks.0.0"] == "mxfp8; since then nvfp4"
    assert notes["blocks.1.0"] == "mxfp8; since then left alone"
    assert notes["blocks.2.0"] == "mxfp8"


def test_patterns_that_match_nothing_are_reported() -> None:
    with pytest.warns(UserWarning, match=r"none matches 'layers\.\*'; .* are 'blocks\.0\.0', 'blocks\.0\.2', "):
        model = lpq.convert(Net(), {"rules": [{"match": ["layers.*"], "recipe": "mxfp8"}]})
    assert lpq.report(model).unmatched == ("layers.*",)
    assert "no layer matches the pattern 'layers.*'" in str(lpq.report(model))


def test_a_model_that_is_one_layer() -> None:
    layer = nn.Linear(8, 8)
    assert lpq.convert(layer, "mxfp8") is layer
    assert isinstance(layer, lpq.nn.Linear)
    assert str(lpq.report(layer)).count("(the model)") == 1


def test_a_model_may_be_converted_again_and_back() -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    expected = plain(TOKENS)
    lpq.convert(model, "nvfp4")
    assert not torch.equal(model(TOKENS), expected)
    lpq.convert(model, "identity")
    assert torch.equal(model(TOKENS), expected)


def test_a_policy_switches_recipes_by_step() -> None:
    rules = [
        {"match": ["blocks.0.*"], "recipe": "fp8-delayed", "until": 0.5},
        {"match": ["blocks.*"], "recipe": "mxfp8", "until": 8},
        {"match": ["blocks.*"], "recipe": "nvfp4"},
    ]
    model = lpq.convert(Net(), {"rules": rules}, steps=10)
    optimizer = torch.optim.AdamW(model.parameters())
    weight = model.blocks[0][0].weight
    seen = []
    for step in range(10):
        lpq.set_step(model, step)
        seen.append((model.blocks[0][0].recipe, model.blocks[1][0].recipe))
        model(TOKENS).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    delayed, mx, nv = map(lpq.recipe, ("fp8-delayed", "mxfp8", "nvfp4"))
    assert [a for a, _ in seen] == [delayed] * 5 + [mx] * 3 + [nv] * 2
    assert [b for _, b in seen] == [mx] * 8 + [nv] * 2
    assert model.blocks[0][0].weight is weight
    assert optimizer.state[weight]["step"] == 10


def test_a_converted_model_copies_and_pickles() -> None:
    model = lpq.convert(Net(), "fp8-delayed")
    model(TOKENS).sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(TOKENS), model(TOKENS))
        assert lpq.report(other) == lpq.report(model)
        assert other.blocks[0][0].recipe == model.blocks[0][0].recipe


def test_moving_a_converted_model_moves_its_state() -> None:
    model = lpq.convert(Net(), "fp8-delayed").to("meta")
    assert all(b.device.type == "meta" for b in model.buffers())
    assert all(b.dtype == torch.float32 for b in lpq.convert(Net(), "fp8-delayed").to(torch.bfloat16).buffers())


def test_a_module_in_two_places_is_one_module() -> None:
    def shared() -> nn.ModuleDict:
        layer = nn.Linear(8, 8)
        return nn.ModuleDict({"a": layer, "b": layer})

    model = lpq.convert(shared(), {"rules": [{"match": ["a", "b"], "recipe": "mxfp8"}]})
    assert model["a"] is model["b"]
    assert lpq.report(model).unmatched == ()
    with pytest.raises(RecipeError, match="'a' and 'b' are one and the same module"):
        lpq.convert(shared(), {"rules": [{"match": ["a"], "recipe": "mxfp8"}, {"match": ["b"], "recipe": "nvfp4"}]})


def test_nothing_is_swapped_when_the_policy_does_not_fit() -> None:
    model = Net()
    rules = [{"match": ["blocks.0.*"], "recipe": "mxfp8"}, {"match": ["*"], "recipe": "nvfp4", "until": 0.5}]
    with pytest.raises(RecipeError, match="the run's length is not known"):
        lpq.convert(model, {"rules": rules})
    assert type(model.blocks[0][0]) is nn.Linear


def test_the_report_is_the_same_the_second_time() -> None:
    rules = [{"match": ["*"], "recipe": "skip", "until": 10}, {"match": ["*"], "recipe": "mxfp8"}]
    model = Net()
    first = lpq.report(lpq.convert(model, {"rules": rules}))
    assert lpq.report(lpq.convert(model, {"rules": rules})) == first
    assert "left alone until step 10, then mxfp8" in str(first)


def test_transformer_layers_multiply_in_low_precision_in_evaluation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).eval()
    converted = lpq.convert(copy.deepcopy(model), "nvfp4").eval()
    x = torch.randn(2, 8, 64)
    made = products(monkeypatch)
    with torch.no_grad():
        assert not torch.equal(converted(x), model(x))
    assert len(made) == 4  # two layers of two
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0, 5:] = True
    with torch.no_grad():
        assert converted(x, src_key_padding_mask=mask).shape == x.shape


def test_rules_that_never_hold_are_reported() -> None:
    def unreached(*rules: dict[str, object]) -> tuple[int, ...]:
        return lpq.report(lpq.convert(Net(), {"rules": list(rules)}, steps=1000)).unreached

    short = {"match": ["blocks.0.*"], "recipe": "nvfp4", "until": 0.05}
    assert unreached({"match": ["blocks.0.*"], "recipe": "mxfp8", "until": 100}, short) == (2,)
    assert unreached({"match": ["blocks.0.*"], "recipe": "mxfp8", "until": 10}, short) == ()
    halves = [{"match": ["blocks.0.0"], "recipe": "mxfp8"}, {"match": ["blocks.0.2"], "recipe": "mxfp8"}]
    assert unreached(*halves, {"match": ["blocks.0.[02]"], "recipe": "nvfp4"}) == (3,)
    text = str(lpq.report(lpq.convert(Net(), {"rules": [*halves, {"match": ["blocks.0.[02]"], "recipe": "nvfp4"}]})))
    assert "rule 3 never holds: the rules before it win at every step" in text


NOTES = {
    "high_precision": ("gathered as mxfp8", "in high precision, whole on every rank and not gathered"),
    "quantized": ("stored and gathered as mxfp8", "stored as mxfp8, whole on every rank and not gathered"),
}


@pytest.mark.parametrize("weights", NOTES)
def test_the_report_says_which_weights_fully_shard_leaves_out(weights: str, mesh: DeviceMesh) -> None:
    model, (gathered, left_out) = converted("mxfp8", 64, 64, 64, 64, weights=weights), NOTES[weights]

    def notes() -> list[str]:
        return [e.note.partition(":")[0] for e in lpq.report(model).weights]

    assert notes() == [gathered] * 3
    fully_shard(model[0], mesh=mesh)
    assert notes() == [gathered, left_out, left_out]
    fully_shard(model, mesh=mesh, ignored_params={model[1].weight}, reshard_after_forward=False)
    before = lpq.report(model)
    assert notes() == [gathered, left_out, gathered]
    assert "fully_shard ignores it, or got no module that it is in" in str(before)
    y = model(torch.randn(32, 64))
    assert not hasattr(model[2].weight, "device_mesh")
    assert lpq.report(model) == before, "between forward and backward the layer has the whole weight, quantized"
    y.sum().backward()
    assert lpq.report(model) == before


@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
def test_weights_that_a_wrapper_reduces_are_not_replaced(weights: Any, mesh: DeviceMesh) -> None:
    """With ``find_unused_parameters`` ranks would drift apart without a word."""
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ValueError, match=r"replaces what DistributedDataParallel reduces: convert before it"):
        lpq.convert(DistributedDataParallel(model), "mxfp8", weights=weights)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
def test_an_optimizer_of_weights_that_fully_shard_replaced_is_refused(weights: Any, mesh: DeviceMesh) -> None:
    """Its steps would train nothing."""
    model, x = converted("mxfp8", 64, 64, weights=weights), torch.ones(4, 64)
    wrap: Callable[[Optimizer], Optimizer] = MasterWeights if weights == "quantized" else lambda optimizer: optimizer
    early = wrap(AdamW(model.parameters()))
    model(x).sum().backward()
    early.step()  # until then it trains it
    twin = copy.deepcopy(model)
    of_the_twin = wrap(AdamW(twin.parameters()))
    fully_shard(model, mesh=mesh)
    words = rf"{type(early).__name__} has a \[64, 64\] parameter that fully_shard replaced .* and after fully_shard"
    with pytest.raises(RuntimeError, match=words):
        early.step()
    late = wrap(AdamW(model.parameters()))
    for one, optimizer in ((model, late), (twin, of_the_twin)):
        before = one[0].weight.detach().clone()
        one(x).sum().backward()
        optimizer.step()
        assert not torch.equal(before, one[0].weight.detach())
    with pytest.raises(RuntimeError, match=words):
        early.step()


@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
def test_a_model_may_lie_in_shared_memory(weights: Any) -> None:
    model, x = converted("mxfp8", 64, 64, weights=weights), torch.ones(4, 64)
    before, alone = model(x), model[0].weight.is_shared()
    assert (alone, model.share_memory()[0].weight.is_shared()) == (False, True)
    assert torch.equal(model(x), before)


BETWEEN: dict[str, Callable[[Any], Any]] = {
    "to": lambda model: model.to(torch.bfloat16).to("cpu"), "share_memory": lambda model: model.share_memory(),
    "to_empty": lambda model: model.to_empty(device="cpu"), "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "assign": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True) and model,
}  # fmt: skip


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("weights", ["high_precision", "quantized"])
def test_it_is_refused_whatever_became_of_the_model_in_between(weights: Any, between: str, mesh: DeviceMesh) -> None:
    model = BETWEEN[between](converted("mxfp8", 64, 64, weights=weights))
    early = AdamW(model.parameters())
    early.step()
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="that fully_shard replaced"):
            early.step()
        model(torch.ones(4, 64, dtype=model[0].weight.dtype))  # what was gathered is a weight of neither


def test_a_model_of_which_nothing_can_be_converted_is_warned_of() -> None:
    own = type("Own", (nn.Linear,), {})
    with pytest.warns(UserWarning, match=r"left every layer as it was: 0: a subclass of nn\.Linear, .*; 1: no plugin"):
        lpq.convert(nn.Sequential(own(8, 8), nn.LayerNorm(8)), "mxfp8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lpq.convert(nn.Sequential(own(8, 8)), {"rules": [{"match": "*", "recipe": "skip"}]})


def test_a_policy_that_matches_nothing_is_warned_of() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
    with pytest.warns(UserWarning, match=r"left every layer .*: none matches 'blocks\.\*'; .* are '0', '1', '2', …"):
        lpq.convert(model, {"rules": [{"match": "blocks.*", "recipe": "mxfp8"}]})
    with pytest.warns(UserWarning, match=r"no layer matches 'blocks\.\*'"):
        lpq.convert(model, {"rules": [{"match": "4", "recipe": "mxfp8"}, {"match": "blocks.*", "recipe": "mxfp8"}]})


STORED_NOTHING = [
    ("mxfp8", 4, "0: in high precision: its 90 rows over 4 ranks are uneven; 1: gathered as mxfp8: .* shards of 16 .*"),
    ({"rules": [{"match": "*", "recipe": "skip"}]}, None, "no linear layer has a recipe"),
]


@pytest.mark.parametrize(("policy", "ranks", "reason"), STORED_NOTHING)
def test_that_no_weight_is_stored_quantized_is_warned_of(policy: Any, ranks: int | None, reason: str) -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 90), nn.Linear(90, 64))

    with pytest.warns(UserWarning, match=rf"weights='quantized'\) stored no weight quantized: {reason}$"):
        lpq.convert(layers(), policy, weights="quantized", ranks=ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lpq.convert(layers(), policy, weights="high_precision", ranks=ranks)
        lpq.convert(layers(), "mxfp8", weights="quantized", ranks=2)  # one of the two
    nothing = {"rules": [{"match": "head", "recipe": "mxfp8"}]}
    with pytest.warns(UserWarning, match="left every layer as it was") as seen:
        lpq.convert(layers(), nothing, weights="quantized")
    assert len(seen) == 1


def test_a_weight_that_no_format_encodes_is_refused_before_anything_is_changed() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"^1: its weight is torch\.float64; .* cast the model first"):
        lpq.convert(model, "mxfp8")
    assert type(model[0]) is nn.Linear
    first_alone = {"rules": [{"match": ["0"], "recipe": "mxfp8"}]}
    lpq.convert(model, first_alone)  # a layer that is left alone may be of any dtype
    assert type(model[1]) is nn.Linear


def test_messages_name_the_layer() -> None:
    model = lpq.convert(Net(), "mxfp8")
    with pytest.raises(ValueError, match=r"^layer blocks\.1\.0, lpq\.nn\.Linear\(.*\): the input is \[1, 3\]"):
        model.blocks[1][0](torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"^lpq\.nn\.Linear\(4, 4\): the input is"):
        lpq.nn.Linear(4, 4, recipe="mxfp8")(torch.ones(1, 3))


def test_a_recipe_that_a_stored_weight_cannot_follow_is_refused_with_its_name_and_a_remedy() -> None:
    model = lpq.convert(Net(), "mxfp8", weights="quantized")
    layer, x = model.blocks[1][0], torch.ones(1, 32)
    before = layer(x)
    layer.recipe = "fp8-current"
    refused = r"^blocks\.1\.0\.weight: .*is stored as mxfp8, and the recipe wants fp8: use one with w=mxfp8; or make "
    refused += r"an ordinary weight of it, layer\.weight = nn\.Parameter\(layer\.weight\.dequantize\(\)\);"
    with pytest.raises(ValueError, match=refused):
        layer(x)
    layer.recipe = "x=fp8(), w=mxfp8, dy=fp8()"
    assert layer(x).isfinite().all()
    layer.recipe = "mxfp8"
    assert torch.equal(layer(x), before)
    layer.recipe = "fp8-current"
    layer.weight = nn.Parameter(layer.weight.dequantize())
    assert layer(x).isfinite().all()


def test_values_that_are_rounded_twice_are_warned_of() -> None:
    def stored(recipe: str) -> nn.Module:
        torch.manual_seed(0)
        return lpq.convert(nn.Sequential(nn.Linear(64, 32)), recipe, weights="quantized")

    model, other = stored("mxfp8"), stored("nvfp4")
    words = r"^0\.weight: the values written to this \[32, 64\] tensor, stored as mxfp8, were stored as nvfp4\(.*\): "
    with pytest.warns(PrecisionWarning, match=words + "they are rounded twice"):
        model.load_state_dict(other.state_dict())
    expected = lpq.quantizer("mxfp8").quantize(other[0].weight.dequantize())
    assert torch.equal(model[0].weight.dequantize(), expected.dequantize())
    assert not torch.equal(expected.dequantize(), other[0].weight.dequantize())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(stored("mxfp8").state_dict())
        model.load_state_dict(stored("bf16").state_dict())  # what is not quantized is rounded once
        lpq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8").load_state_dict(other.state_dict())


def test_what_is_left_alone_is_not_asked_whether_it_can_be_stored() -> None:
    rules = [
        {"match": ["self_attn.*"], "recipe": "fp8-current", "until": 8},  # out_proj is a subclass of nn.Linear
        {"match": ["*"], "recipe": "mxfp8"},
    ]
    block = nn.TransformerEncoderLayer(32, 2, 64)
    left = {entry.name for entry in lpq.report(lpq.convert(block, {"rules": rules}, weights="quantized")).left}
    assert "self_attn.out_proj" in left
    assert isinstance(block.linear1.weight.data, lpq.QuantizedTensor)


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, torch.compile, lambda model: torch.compile(nn.DataParallel(model))],
    ids=["DataParallel", "compile", "both"],
)
def test_a_model_is_known_inside_and_outside_of_a_wrapper(wrap: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    """A record on the wrapper would be lost with it, and the record inside must serve the wrapper."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    wrapped = lpq.convert(wrap(model), "nvfp4", steps=10)
    assert [entry.name.rpartition(".")[2] for entry in lpq.report(wrapped).converted] == ["0", "1"]
    assert [entry.name for entry in lpq.report(model).converted] == ["0", "1"]
    assert not lpq.report(model).left
    lpq.checkpoint.save(model, tmp_path, step=1)
    assert lpq.checkpoint.info(tmp_path).policy == lpq.policy("nvfp4")


@pytest.mark.filterwarnings("ignore:aten._to_copy")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_stored_weight_is_cast_to_dtypes_that_it_can_stand_for(sharded: bool, mesh: DeviceMesh) -> None:
    """It was encoded anew, of what it stood for, and its bias was cast. The rest of the model can be cast back."""
    model = lpq.convert(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), "nvfp4", weights="quantized")
    if sharded:
        fully_shard(model, mesh=mesh)
    stored, x = cast(QuantizedTensor, local_part(model[1].weight)), torch.randn(4, 64)
    with torch.no_grad():
        before, expected = [b.clone() for b in stored.buffers], model(x)
    words = r"^layer 1, .*: its weight is stored as nvfp4.*, which stands for no torch\.float64: cast the rest of the "
    with pytest.raises(TypeError, match=words):
        model.double()
    assert [p.dtype for p in model.parameters()] == [torch.float64] * 2 + [torch.float32] * 2
    model.float()
    assert all(map(torch.equal, before, cast(QuantizedTensor, local_part(model[1].weight)).buffers))
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert {p.dtype for p in model.bfloat16().parameters()} == {torch.bfloat16}
