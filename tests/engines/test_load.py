"""Exported models are read back: bit for bit, whoever wrote them, and the bytes of the next export are the same."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from support.comparing import equal_files, equal_states
from tiny import Case, Net, decoded, layers, operand, tensors
from torch import Tensor, nn

import lpq
from lpq.checkpoint import CheckpointError, CheckpointWarning
from lpq.core import QuantizedTensor
from lpq.files.safetensors import TensorKind, Writer
from lpq.formats.inverse import preimage
from lpq.nn.shared_states import shared_state
from lpq.optim import MasterWeights

pytestmark = pytest.mark.filterwarnings("ignore::lpq.checkpoint.CheckpointWarning")
TOKENS = torch.arange(16).view(2, 8)


def zeroed(dtype: torch.dtype = torch.bfloat16) -> Any:
    """The architecture, and none of the values."""
    model = Net(dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@pytest.mark.parametrize("case", tiny.ALL, ids=str)
def test_import_and_export_give_the_same_bytes(case: Case, tmp_path: Path) -> None:
    """All files, of every layout; and in between the operands of the model that was exported."""
    model = lpq.convert(Net(dtype=torch.bfloat16), case.recipe)
    lpq.export(model, tmp_path / "a", **case.options(model))
    read: Any = lpq.load_quantized(zeroed(), tmp_path / "a")
    lpq.export(read, tmp_path / "b", layout=case.layout)
    assert equal_files(tmp_path / "a", tmp_path / "b")
    assert len(layers(read)) == 4
    for name, layer in layers(read).items():
        assert isinstance(layer.weight.detach(), QuantizedTensor)
        theirs = decoded(layers(model)[name], torch.float32)
        assert torch.equal(layer.weight.dequantize(torch.float32), theirs), (
            name
        )  # the upper scale, too: of bf16 weights


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-block", "nvfp4", "fp8-row", "fp8-current"])
def test_a_model_goes_on_training_with_the_codes_that_it_had(recipe: str, tmp_path: Path) -> None:
    """Under the recipe of training: row operands bit for bit, evaluation too; column operands where they follow."""
    model = lpq.convert(Net(dtype=torch.bfloat16), recipe)
    with torch.no_grad():
        expected = model(TOKENS)
    lpq.export(model, tmp_path / "x", layout="compressed-tensors")
    read: Any = lpq.load_quantized(zeroed(), tmp_path / "x", policy=recipe)
    with torch.no_grad():
        assert torch.equal(read(TOKENS), expected)
    for name, layer in layers(read).items():
        mine, theirs = layer.weight.row, operand(layers(model)[name])
        assert mine.quantizer == theirs.quantizer
        assert equal_states(mine.buffers(), theirs.buffers())
    optimizer = MasterWeights(torch.optim.SGD(read.parameters(), lr=0.5))
    before = [layer.weight.dequantize().clone() for layer in layers(read).values()]
    for _ in range(2):
        read(TOKENS).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = [layer.weight.dequantize() for layer in layers(read).values()]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("weights", [None, "high_precision"])
def test_weights_in_high_precision_get_what_the_codes_decode_to(weights: Any, tmp_path: Path) -> None:
    model = lpq.convert(Net(dtype=torch.bfloat16), "mxfp8")
    lpq.export(model, tmp_path / "x", layout="modelopt")
    read: Any = lpq.load_quantized(zeroed(torch.float32), tmp_path / "x", policy="mxfp8", weights=weights)
    for name, layer in layers(read).items():
        assert layer.weight.dtype == torch.float32
        assert torch.equal(layer.weight.detach().clone(), decoded(layers(model)[name], torch.float32))
    assert torch.equal(read.embed.weight, model.embed.weight.float())


def test_static_scales_of_inputs_are_used(tmp_path: Path) -> None:
    """Evaluation scales inputs as the files have it, and leaves that as it is."""
    model: Any = lpq.convert(Net(), "fp8-delayed")
    for _ in range(2):
        model(TOKENS).sum().backward()
    with torch.no_grad():
        expected = model(TOKENS)
    lpq.export(model, tmp_path / "x", layout="modelopt")
    read: Any = lpq.load_quantized(zeroed(torch.float32), tmp_path / "x")
    with torch.no_grad():
        assert torch.equal(read(TOKENS), expected)
        assert not torch.equal(read(TOKENS), model.requires_grad_(False)(TOKENS + 1))
    for name, layer in layers(read).items():
        scale = 448 / layer.memories()["x_row_amax"]
        assert torch.equal(scale, 448 / layers(model)[name].x_amax)
    lpq.export(read, tmp_path / "y", layout="modelopt")
    assert equal_states(tensors(tmp_path / "x"), tensors(tmp_path / "y"))


@pytest.mark.parametrize(("x", "noted"), [("mxfp4(scale=even)", False), ("mxfp4()", True), ("mxfp4(scale=ceil)", True)])
def test_the_record_notes_inputs_whose_scales_engines_round_otherwise(x: str, noted: bool, tmp_path: Path) -> None:
    """Layers that are loaded encode as engines do, so they compute what was trained where there is no note."""
    model: Any = lpq.convert(Net(), f"x={x}, w=mxfp4, dy=bf16")
    made = lpq.export(model, tmp_path, layout="compressed-tensors")
    assert "4 layers: MXFP4, inputs mxfp4(scale=even)" in str(made)
    assert bool([note for note in made.notes if "scale of each block of these inputs" in note]) == noted
    read: Any = lpq.load_quantized(Net(), tmp_path)
    with torch.no_grad():
        assert torch.equal(read(TOKENS), model(TOKENS)) != noted


def test_layers_that_share_a_history_get_each_its_own(tmp_path: Path) -> None:
    model: Any = lpq.convert(Net(), "fp8-delayed")
    model(TOKENS).sum().backward()
    lpq.export(model, tmp_path / "x", layout="modelopt")
    apart, sharing = (lpq.convert(zeroed(torch.float32), "fp8-delayed") for _ in range(2))
    shared_state([*layers(sharing).values()])
    for read in (apart, sharing):
        lpq.load_quantized(read, tmp_path / "x")
    assert len({float(layer.x_amax) for layer in layers(apart).values()}) > 1
    assert equal_states(sharing.state_dict(), apart.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_amax_is_found_again_from_its_quotient(dtype: torch.dtype) -> None:
    """Exactly, if it was measured in 16 bits; one of fp32 with the same quotient."""
    largest = torch.tensor(2688.0)
    measured = torch.rand(300, generator=torch.Generator().manual_seed(0)) * 5 + 0.01
    for quotient, guess in (
        (lambda a: largest / a, lambda q: largest / q),
        (lambda a: a / largest, lambda q: q * largest),
    ):
        for exact in measured.to(dtype).float():
            assert preimage(quotient, quotient(exact), guess(quotient(exact))) == exact
        found = [preimage(quotient, quotient(a), guess(quotient(a))) for a in measured]
        assert all(quotient(a) == quotient(b) for a, b in zip(found, measured, strict=True))


def test_a_tied_head_is_read_from_the_embedding(tmp_path: Path) -> None:
    model = lpq.convert(Net(tied=True), "mxfp8")
    lpq.export(model, tmp_path / "x", layout="modelopt")
    read: Any = lpq.load_quantized(Net(tied=True), tmp_path / "x")
    assert read.lm_head.weight is read.embed.weight
    with pytest.raises(CheckpointError, match=r"nothing for these tensors of the model: lm_head\.weight"):
        lpq.load_quantized(Net(), tmp_path / "x")


class Twice(Net):
    """One of its layers has a second name."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.bfloat16)
        self.again = nn.ModuleList([self.blocks[0].mlp.down_proj])  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [{}, {"policy": "mxfp8"}, {"weights": None}], ids=str)
def test_a_layer_in_two_places_is_read(options: dict[str, Any], tmp_path: Path) -> None:
    """By the recipes that the files tell, too, whose rules then name the layer as the model does."""
    model: Any = lpq.convert(Twice(), "mxfp8")
    lpq.export(model, tmp_path / "a", layout="compressed-tensors")
    read: Any = lpq.load_quantized(Twice(), tmp_path / "a", **options)
    layer, own = read.blocks[0].mlp.down_proj, model.blocks[0].mlp.down_proj
    assert read.again[0] is layer
    assert isinstance(layer.weight.detach(), QuantizedTensor) == ("weights" not in options)
    if "weights" in options:
        assert torch.equal(layer.weight, decoded(own, torch.bfloat16))
        return
    assert torch.equal(layer.weight.dequantize(), decoded(own, torch.bfloat16))
    lpq.export(read, tmp_path / "b", layout="compressed-tensors")
    assert equal_files(tmp_path / "a", tmp_path / "b")


def test_a_policy_that_fits_names_a_layer_in_all_its_places(tmp_path: Path) -> None:
    lpq.export(lpq.convert(Twice(), "mxfp8"), tmp_path / "x", layout="compressed-tensors")
    with pytest.raises(CheckpointError, match="stored as nvfp4") as refused:
        lpq.load_quantized(Twice(), tmp_path / "x", policy="nvfp4")
    fitting = ast.literal_eval(str(refused.value).split("policy=")[1].split("; or")[0])
    read: Any = lpq.load_quantized(Twice(), tmp_path / "x", policy=fitting)
    assert str(read.again[0].recipe.w) == "mxfp8"


def by_others(path: Path, found: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    path.mkdir()
    writer = Writer(path / "model.safetensors", {n: TensorKind.of(t) for n, t in found.items()})
    for name, tensor in found.items():
        writer.add(name, tensor)
    writer.close()
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))


def test_tensors_without_a_dimension_are_written_and_read(tmp_path: Path) -> None:
    """A parameter, and the count of a BatchNorm; of a model, streamed, and of a checkpoint."""

    def build() -> Any:
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128))
        net.register_parameter("logit_scale", nn.Parameter(torch.tensor(2.5)))
        return net

    model = lpq.convert(build(), "fp8-row")
    model(torch.randn(4, 128))
    lpq.export(model, tmp_path / "x")
    lpq.checkpoint.save(model, tmp_path / "run", step=1)
    lpq.export(tmp_path / "run", tmp_path / "y")
    assert equal_states(tensors(tmp_path / "x"), dict(lpq.export.stream(model, "compressed-tensors")))
    assert equal_states(tensors(tmp_path / "x"), tensors(tmp_path / "y"))
    read = build()
    with torch.no_grad():
        read.logit_scale.zero_()
    lpq.load_quantized(read, tmp_path / "x")
    assert (read.logit_scale.item(), read[1].num_batches_tracked.item()) == (2.5, 1)


def test_scales_in_bf16_and_exponents_by_another_name_are_read(tmp_path: Path) -> None:
    """As other programs keep them."""
    weight = torch.randn(32, 64).to(torch.float8_e4m3fn)
    exponents = torch.randint(110, 130, (32, 2), dtype=torch.uint8)
    found = {"0.weight": weight, "0.weight_scale_inv": exponents.view(torch.float8_e8m0fnu)}
    config = {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0", "activation_scheme": "dynamic"}
    by_others(tmp_path / "a", found, config)
    read: Any = lpq.load_quantized(nn.Sequential(nn.Linear(64, 32, bias=False)), tmp_path / "a")
    assert torch.equal(read[0].weight.row.scale, exponents)
    scale = torch.rand(()).bfloat16()
    found = {"0.weight": weight, "0.weight_scale_inv": scale}
    config = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "dynamic"}
    by_others(tmp_path / "b", found, config)
    read = lpq.load_quantized(nn.Sequential(nn.Linear(64, 32, bias=False)), tmp_path / "b")
    assert torch.equal(read[0].weight.dequantize(), weight.float() * scale.float())


@pytest.mark.parametrize("names", [("weight_scale_inv", "activation_scale"), ("weight_scale", "input_scale")])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_of_a_tensor_is_read_by_either_name(names: tuple[str, str], shape: Any, tmp_path: Path) -> None:
    """transformers' and vLLM's, which has no key for blocks where there are none, and writes none of the keys that
    transformers writes."""
    weight, scale = torch.randn(32, 64).to(torch.float8_e4m3fn), torch.rand(()) + 0.1
    found = {"0.weight": weight, f"0.{names[0]}": scale.view(shape), f"0.{names[1]}": torch.tensor(0.25).view(shape)}
    by_others(tmp_path / "a", found, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["1"]})
    read: Any = lpq.load_quantized(nn.Sequential(nn.Linear(64, 32, bias=False)), tmp_path / "a")
    assert torch.equal(read[0].weight.dequantize(), weight.float() * scale)
    assert [value.item() for value in read[0].static_values().values()] == [448 * 0.25]
    again = dict(lpq.export.stream(read, "modelopt"))
    assert (again["0.weight_scale"], again["0.input_scale"]) == (scale, 0.25)


def test_arguments_of_compressed_tensors_that_are_not_there_are_its_defaults(tmp_path: Path) -> None:
    """A strategy follows from the size of a group. Control: with another strategy the files are of another shape."""
    from compressed_tensors.quantization import QuantizationArgs

    weight, scale = torch.randn(32, 64).to(torch.float8_e4m3fn), torch.rand(32, 1) + 0.1
    for given, strategy, part in (
        ({"type": "float"}, "tensor", scale[:1, 0]),
        ({"type": "float", "group_size": -1}, "channel", scale),
        ({"type": "float", "group_size": 32}, "group", torch.full((32, 2), 120, dtype=torch.uint8)),
    ):
        assert QuantizationArgs(**given).strategy == strategy
        path = tmp_path / strategy
        config = {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"targets": ["Linear"], "weights": given}},
        }
        by_others(path, {"0.weight": weight, "0.weight_scale": part}, config)
        read: Any = lpq.load_quantized(nn.Sequential(nn.Linear(64, 32, bias=False)), path)
        expected = weight.float() * (part.float() if strategy != "group" else 2.0**-7)
        assert torch.equal(read[0].weight.dequantize(), expected)
    config["config_groups"]["g"]["weights"] = {"type": "float"}
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(CheckpointError, match=r"weight_scale has shape \[32, 2\], and for a weight"):
        lpq.load_quantized(nn.Sequential(nn.Linear(64, 32, bias=False)), path)


def test_scales_of_a_kv_cache_are_left_out_with_a_warning(tmp_path: Path) -> None:
    """As others write them; a parameter that the model has by such a name is read as any other."""
    lpq.export(lpq.convert(Net(), "mxfp8"), tmp_path / "x", layout="modelopt")
    found = tensors(tmp_path / "x")
    config_json = (tmp_path / "x" / "config.json").read_text()
    for name in ("k_proj.k_scale", "v_proj.v_scale", "k_scale"):
        found[f"blocks.0.self_attn.{name}"] = torch.ones(())
    by_others(tmp_path / "y", found, {})
    (tmp_path / "y" / "config.json").write_text(config_json)
    with pytest.warns(CheckpointWarning, match=r"KV cache \(blocks\.0\.self_attn\.k_proj\.k_scale, .*left out"):
        read: Any = lpq.load_quantized(Net(), tmp_path / "y")
    assert not [name for name, _ in lpq.export.stream(read, "modelopt") if name.endswith("k_scale")]
    owner: Any = Net()
    owner.blocks[0].self_attn.k_scale = nn.Parameter(torch.zeros(()))
    with pytest.warns(CheckpointWarning, match=r"k_proj\.k_scale, blocks\.0\.self_attn\.v_proj\.v_scale\)"):
        lpq.load_quantized(owner, tmp_path / "y")
    assert owner.blocks[0].self_attn.k_scale == 1
