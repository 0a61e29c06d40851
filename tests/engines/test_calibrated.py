"""Calibrated models in the files of engines: written, read by lpq and by transformers, and written again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from support.comparing import equal_states
from tiny import Net, layers, llama, tensors

import lpq
from lpq.engines.exporting import NO_MODEL

TOKENS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
CASES = [
    ("compressed-tensors", "fp8-current", "max", "input_scale"),
    ("modelopt", "fp8-current", "percentile", "input_scale"),
    ("compressed-tensors", "nvfp4", "four_over_six", "input_global_scale"),
    ("modelopt", "nvfp4", "mse", "input_scale"),
]


@pytest.mark.parametrize(("layout", "recipe", "method", "scale"), CASES, ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CASES])
def test_static_scales_are_written_and_read_back(
    layout: str, recipe: str, method: Any, scale: str, tmp_path: Path
) -> None:
    """What is read computes the same to the bit, and is written with the same bytes. Control: not calibrated, the files
    have no scales of inputs, or no place."""
    model: Any = lpq.convert(Net(dtype=torch.bfloat16), recipe)
    lpq.calibrate(model, [TOKENS[:2], TOKENS[2:]], method=method)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lpq.checkpoint.CheckpointWarning)
        made = lpq.export(model, tmp_path / "x", layout=layout)
    found = tensors(tmp_path / "x")
    assert made.notes == (NO_MODEL,)
    assert sorted(n for n in found if n.endswith(scale)) == sorted(f"{name}.{scale}" for name in layers(model))
    read: Any = lpq.load_quantized(Net(dtype=torch.bfloat16), tmp_path / "x")
    with torch.no_grad():
        expected = model.eval()(TOKENS)
        assert torch.equal(read.eval()(TOKENS), expected)
        louder = lpq.convert(Net(dtype=torch.bfloat16), recipe)
        assert not torch.equal(louder.eval()(TOKENS), expected)
    for name, layer in layers(read).items():
        (value,) = layer.static_values().values()
        assert value == next(v for k, v in layers(model)[name].static_values().items() if k in ("x_amax", "x_row_amax"))
    lpq.export(read, tmp_path / "y", layout=layout)
    assert equal_states(found, tensors(tmp_path / "y"))
    dynamic = dict(lpq.export.stream(louder, layout)) if (layout, recipe) != ("modelopt", "fp8-current") else {}
    assert not [name for name in dynamic if name.endswith(scale)]


@pytest.mark.parametrize("recipe", ["nvfp4-four-over-six", "nvfp4-eden"])
def test_engines_search_no_scales_for_inputs(recipe: str, tmp_path: Path) -> None:
    """Layers do, after calibration as well. The record and layers that are loaded have the format of an engine."""
    model: Any = lpq.convert(Net(dtype=torch.bfloat16), recipe)
    lpq.calibrate(model, [TOKENS])
    made = lpq.export(model, tmp_path, layout="modelopt")
    assert f"{len(layers(model))} layers: NVFP4, inputs nvfp4(static=true)" in str(made)
    assert [note for note in made.notes if "training searches it" in note and f"{len(layers(model))} layers" in note]
    read: Any = lpq.load_quantized(Net(dtype=torch.bfloat16), tmp_path)
    for name, layer in layers(read).items():
        trained = layers(model)[name].recipe
        assert "search=four_over_six" in str(trained.x.side("row"))
        assert str(layer.recipe.x.side("row")) == "nvfp4(static=true)"


def test_layers_that_lie_alike_are_one_group_in_the_record(tmp_path: Path) -> None:
    """Whether training searches the scales of their inputs or not: the note has those where it does."""
    rules = [{"match": "*up_proj", "recipe": "nvfp4-four-over-six"}, {"match": "*", "recipe": "nvfp4"}]
    model: Any = lpq.convert(Net(dtype=torch.bfloat16), {"rules": rules})
    lpq.calibrate(model, [TOKENS])
    made = lpq.export(model, tmp_path, layout="compressed-tensors")
    (names,) = made.layers.values()
    assert {*names} == {*layers(model)}
    (note,) = (note for note in made.notes if "training searches it" in note)
    assert "1 layer (" in note
    assert "up_proj" in note
    assert lpq.load_quantized(Net(dtype=torch.bfloat16), tmp_path) is not None


def test_fused_layers_of_a_calibrated_model_have_one_scale(tmp_path: Path) -> None:
    """In the files; control: uncalibrated ones differ, which the export warns of."""
    pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
    model = lpq.convert(llama(), "nvfp4")
    with pytest.warns(lpq.checkpoint.CheckpointWarning, match="engines fuse"):
        lpq.export(model, tmp_path / "x", layout="modelopt")
    lpq.calibrate(model, [{"input_ids": TOKENS}])
    with warnings.catch_warnings():
        warnings.simplefilter("error", lpq.checkpoint.CheckpointWarning)
        lpq.export(model, tmp_path / "y", layout="modelopt")
    found = tensors(tmp_path / "y")
    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        for scale in ("weight_scale_2", "input_scale"):
            assert len({found[f"model.layers.0.{name}.{scale}"].item() for name in group}) == 1


def test_a_checkpoint_of_a_calibrated_model_is_exported(tmp_path: Path) -> None:
    model = lpq.convert(Net(dtype=torch.bfloat16), "nvfp4")
    lpq.calibrate(model, [TOKENS])
    lpq.checkpoint.save(model, tmp_path / "run")
    lpq.export(tmp_path / "run", tmp_path / "x", layout="compressed-tensors")
    lpq.export(model, tmp_path / "y", layout="compressed-tensors")
    assert equal_states(tensors(tmp_path / "x"), tensors(tmp_path / "y"))


@pytest.mark.usefixtures("quiet")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_transformers_computes_the_logits_of_a_trained_and_calibrated_model(tmp_path: Path) -> None:
    """Convert, train, calibrate, export, load in transformers. Static FP8 in fp32: the very logits, up to the order of
    sums, as compressed-tensors rounds inputs by the same scales. Control: decompressed, with inputs in high precision,
    it computes others. NVFP4 in bf16: 10 % of the norm, by which the reader's own rounding differs."""
    transformers: Any = pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, which `make install` brings")
    for recipe, dtype, within in (("fp8-current", torch.float32, 1e-6), ("nvfp4", torch.bfloat16, 0.1)):
        model = lpq.convert(llama(dtype), recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for _ in range(3):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[2] < losses[0]
        lpq.calibrate(model, [{"input_ids": TOKENS}])
        path = tmp_path / recipe
        lpq.export(model, path, layout="compressed-tensors")
        with torch.no_grad():
            expected = model.eval()(input_ids=TOKENS).logits.float()
            errors = []
            for dequantize in (False, True):
                how = transformers.CompressedTensorsConfig(dequantize=dequantize)
                read = transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=dtype, quantization_config=how
                ).eval()
                found = read(input_ids=TOKENS).logits.float()
                errors.append(((found - expected).norm() / expected.norm()).item())
            plain = llama(dtype).eval()(input_ids=TOKENS).logits.float()
        assert errors[0] <= within
        assert errors[1] > errors[0]
        assert (plain - expected).norm() / expected.norm() > errors[0]
        again = lpq.load_quantized(tiny.llama(dtype), path).eval()
        if recipe == "fp8-current":
            assert torch.equal(again(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)
