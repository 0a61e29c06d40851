"""Exported models, read by code that is not lpq's: transformers and the package compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from support.comparing import equal_states
from tiny import Case, decoded, layers, llama

import lpq

transformers: Any = pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
pytest.importorskip("accelerate", reason="needs accelerate, which `make install` brings")
COMPRESSED = "compressed-tensors"
CASES = [case for case in [*tiny.READ_BY_TRANSFORMERS, tiny.MIXED] if case.layout == COMPRESSED]

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore::lpq.checkpoint.CheckpointWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def loaded(path: Path, case: Case, dtype: torch.dtype, dequantize: bool = True) -> Any:
    options: dict[str, Any] = {}
    if case.layout == COMPRESSED:
        pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, which `make install` brings")
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=dequantize)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)


@pytest.mark.parametrize("case", tiny.READ_BY_TRANSFORMERS, ids=str)
def test_transformers_reads_the_weights_that_lpq_decodes(case: Case, tmp_path: Path) -> None:
    model = lpq.convert(llama(), case.recipe)
    lpq.export(model, tmp_path / "x", **case.options(model))
    state = loaded(tmp_path / "x", case, torch.bfloat16).state_dict()
    assert len(layers(model)) == 7
    for name, layer in layers(model).items():
        assert torch.equal(state[f"{name}.weight"], decoded(layer, torch.bfloat16)), name
        assert not torch.equal(state[f"{name}.weight"], layer.weight)  # which is another one
    assert torch.equal(state["lm_head.weight"], model.lm_head.weight)


def test_transformers_computes_what_lpq_evaluates(tmp_path: Path) -> None:
    """In fp32, with inputs in high precision, both multiply the same matrices; sums may differ in their order."""
    case = Case(COMPRESSED, "x=identity, w=fp8(scaling=row), dy=identity")
    model, tokens = lpq.convert(llama(torch.float32), case.recipe).eval(), torch.arange(16).view(2, 8)
    lpq.export(model, tmp_path / "x", **case.options(model))
    read = loaded(tmp_path / "x", case, torch.float32).eval()
    with torch.no_grad():
        expected = model(tokens).logits
        before = llama(torch.float32).eval()(tokens).logits
        assert torch.allclose(read(tokens).logits, expected, atol=1e-6)
    assert not torch.allclose(before, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("recipe", "dtype", "width", "words"),
    [
        ("mxfp8", torch.float32, 128, "decodes these weights into bfloat16, and with inputs in float32"),
        ("nvfp4", torch.float32, 128, "decodes these weights into bfloat16, and with inputs in float32"),
        ("mxfp4", torch.float32, 128, "decodes these weights into bfloat16, and with inputs in float32"),
        ("fp8-block", torch.bfloat16, 192, "encodes inputs in groups of 128 columns"),
    ],
)
def test_the_record_says_what_transformers_cannot_compute_with_and_what_helps(
    recipe: str, dtype: torch.dtype, width: int, words: str, tmp_path: Path
) -> None:
    """The note is right: plainly loaded, the first product fails, and each remedy helps."""

    def logits(path: Path, **options: Any) -> Any:
        read = transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()
        with torch.no_grad():
            return read(torch.zeros(1, 4, dtype=torch.long)).logits

    model = lpq.convert(llama(dtype, width), recipe)
    made = lpq.export(model, tmp_path / "x", layout=COMPRESSED)
    (note,) = [note for note in made.notes if words in note]
    assert "layers (model.layers.0.self_attn.q_proj, " in note
    assert note in str(made)
    with pytest.raises(RuntimeError, match=r"same dtype|unflatten"):
        logits(tmp_path / "x")
    if recipe == "fp8-block":
        assert logits(tmp_path / "x", quantization_config=transformers.CompressedTensorsConfig(dequantize=True)).any()
        other = lpq.export(lpq.convert(model, "fp8-row"), tmp_path / "y", layout=COMPRESSED)
    else:
        assert logits(tmp_path / "x", dtype=torch.bfloat16).any()
        lpq.export(model, tmp_path / "z", layout=COMPRESSED, dtype=torch.bfloat16)
        assert logits(tmp_path / "z").any()
        other = lpq.export(model.to(torch.bfloat16), tmp_path / "y", layout=COMPRESSED)
    assert not any("transformers" in note for note in other.notes)
    assert logits(tmp_path / "y").any()


def test_the_configuration_has_the_dtype_of_the_model_now(tmp_path: Path) -> None:
    """transformers loads a model in that dtype, and keeps the one of its loading in the config."""
    llama(torch.float32).save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").bfloat16()
    assert model.config.dtype == torch.float32
    lpq.export(lpq.convert(model, "nvfp4"), tmp_path / "x", layout=COMPRESSED)
    assert json.loads((tmp_path / "x" / "config.json").read_text())["dtype"] == "bfloat16"
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    assert read(torch.zeros(1, 4, dtype=torch.long)).logits.dtype == torch.bfloat16


def test_transformers_reads_a_mixture(tmp_path: Path) -> None:
    """It decompresses each layer by its own group at the first forward; to do so while it loads, it takes the first."""
    model = lpq.convert(llama(), tiny.MIXTURE)
    lpq.export(model, tmp_path / "x", **tiny.MIXED.options(model))
    assert tiny.config(tmp_path / "x")["format"] == "mixed-precision"
    read = loaded(tmp_path / "x", tiny.MIXED, torch.bfloat16, dequantize=False)
    with torch.no_grad():
        read(torch.zeros(1, 4, dtype=torch.long))
    state = read.state_dict()
    for name, layer in layers(model).items():
        assert torch.equal(state[f"{name}.weight"], decoded(layer, torch.bfloat16)), name


@pytest.mark.parametrize(
    "case", [c for c in [*tiny.READ_BY_TRANSFORMERS, tiny.MIXED] if c.layout == COMPRESSED], ids=str
)
def test_compressed_tensors_takes_the_description_and_decompresses_in_fp32(case: Case, tmp_path: Path) -> None:
    """To the layout's own rounding: the upper scale of two is a quotient there, and a product in lpq."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, which `make install` brings")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = lpq.convert(llama(torch.float32), case.recipe)
    lpq.export(model, tmp_path / "x", **case.options(model))
    described = QuantizationConfig.model_validate(tiny.config(tmp_path / "x"))
    found = tiny.tensors(tmp_path / "x")
    for group in described.config_groups.values():
        names = [n for n in layers(model) if n in group.targets or group.targets == ["Linear"]]
        assert names
        for name in names:
            own = {key.removeprefix(f"{name}."): t for key, t in found.items() if key.startswith(f"{name}.")}
            two_levels = "weight_global_scale" in own
            if two_levels:
                codes, scale = own["weight_packed"], own["weight_scale"].float()
                assert torch.equal(codes, tiny.operand(layers(model)[name]).data)
                assert own["weight_global_scale"].shape == (1,)
                own["weight_scale"] = scale
            weight = BaseCompressor.get_value_from_registry(group.format).decompress(own, group)["weight"].float()
            ours = decoded(layers(model)[name], torch.float32)
            if two_levels:  # it unpacks to bf16
                assert torch.allclose(weight, ours, rtol=2**-8, atol=0)
            else:
                assert torch.equal(weight, ours), name


def test_the_converter_of_compressed_tensors_takes_what_is_written_for_modelopt() -> None:
    """NVFP4: it makes of them what lpq writes in its own layout, but for the last bit of the upper scales, whose
    reciprocal it takes."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, which `make install` brings")
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter

    model = lpq.convert(llama(), "nvfp4")
    amax = dict.fromkeys(layers(model), 3.75)
    given = dict(lpq.export.stream(model, "modelopt", input_amax=amax))
    expected = dict(lpq.export.stream(model, COMPRESSED, input_amax=amax))
    converter = ModelOptNvfp4Converter(targets=[r"re:.*_proj$"])
    found = converter.validate(dict(given))
    assert found.keys() == expected.keys()
    upper = [name for name in found if name.endswith("global_scale")]
    assert len(upper) == 14
    for name in upper:
        assert torch.allclose(found.pop(name), expected.pop(name), rtol=2**-22, atol=0)
    assert equal_states(found, expected)
