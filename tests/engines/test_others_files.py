"""Whole models that transformers and the package compressed-tensors quantize and save, without lpq: read by lpq."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import layers, llama, tensors
from torch import Tensor

import lpq
from lpq.checkpoint import CheckpointError

transformers: Any = pytest.importorskip("transformers", reason="needs transformers, which `make install` brings")
pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, which `make install` brings")
pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("ignore::UserWarning")]
LARGEST = 448 * 6
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def amaxes(weight: Tensor, how: Any) -> Tensor:
    """The largest magnitudes for which a scheme has scales."""
    magnitudes = weight.abs()
    if how.strategy == "tensor":
        return magnitudes.amax().reshape(1)
    if how.strategy == "channel":
        return magnitudes.amax(1, keepdim=True)
    if how.strategy == "block":
        rows, cols = how.block_structure
        return magnitudes.unflatten(0, (-1, rows)).unflatten(2, (-1, cols)).amax((1, 3))
    return magnitudes.unflatten(1, (-1, how.group_size)).amax(-1)


def saved_by_others(preset: str, path: Path, made: Callable[[], Any] = llama) -> Any:
    """A model that is quantized by one of the schemes of compressed-tensors, with scales as it calculates them."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model, groups = made(), {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    apply_quantization_config(
        model, QuantizationConfig(config_groups=groups, ignore=["lm_head", "re:.*vision_tower.*"])
    )
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is None:
            continue
        weight, upper = module.weight.detach().float(), None
        if hasattr(module, "weight_global_scale"):
            upper = module.weight_global_scale
            upper.data.fill_(LARGEST / weight.abs().amax())
        found = amaxes(weight, scheme.weights)
        scale, _ = calculate_qparams(-found, found, scheme.weights, global_scale=upper)
        module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
        for name, value in (("input_scale", 0.03125), ("input_global_scale", 512.0)):
            if hasattr(module, name):
                getattr(module, name).data.fill_(value)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)
    how = transformers.CompressedTensorsConfig(dequantize=True)
    return type(model).from_pretrained(path, dtype=torch.bfloat16, quantization_config=how)


PRESETS = ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP8", "MXFP4"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_model_that_others_quantized_is_read_as_they_read_it(preset: str, tmp_path: Path) -> None:
    """The weights of each layer, bit for bit; its static scales; and exported again, all tensors are as they came, but
    for scales in bf16, which become fp32."""
    theirs = saved_by_others(preset, tmp_path / "theirs")
    read = lpq.load_quantized(llama(), tmp_path / "theirs").eval()
    assert len(layers(read)) == 7
    for name, layer in layers(read).items():
        assert torch.equal(layer.weight.dequantize(), theirs.get_parameter(f"{name}.weight")), name
        assert not torch.equal(layer.weight.dequantize(), llama().get_parameter(f"{name}.weight"))
        assert len(layer.static_values()) == (preset in ("FP8", "NVFP4"))
    with torch.no_grad():
        assert read(TOKENS).logits.isfinite().all()
    lpq.export(read, tmp_path / "again", layout="compressed-tensors")
    before, after = tensors(tmp_path / "theirs"), tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    for name, value in before.items():
        wide = value.dtype == torch.bfloat16 and "_scale" in name
        expected = value.float() if wide else value
        assert expected.dtype == after[name].dtype
        assert torch.equal(expected.view(torch.uint8), after[name].view(torch.uint8)), name


def llava() -> Any:
    """A model of images and text, whose tensors have names of earlier transformers in files."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=63)
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).bfloat16()


@pytest.mark.parametrize("weights", ["quantized", None])
def test_tensors_may_have_the_names_that_transformers_gives_them_in_files(weights: Any, tmp_path: Path) -> None:
    theirs = saved_by_others("FP8", tmp_path, llava)
    assert "language_model.model.layers.0.self_attn.q_proj.weight_scale" in tensors(tmp_path)
    model = llava()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    read = lpq.load_quantized(model, tmp_path, weights=weights)
    assert len(layers(read)) == 9
    for name, parameter in read.named_parameters():
        value = parameter.dequantize() if weights and name.removesuffix(".weight") in layers(read) else parameter
        assert torch.equal(value, theirs.get_parameter(name)), name
    assert all(len(layer.static_values()) == 1 for layer in layers(read).values())
    strange = {**tensors(tmp_path), "language_model.strange.weight": torch.ones(2)}
    save_file(strange, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no place: language_model\.strange\.weight"):
        lpq.load_quantized(llava(), tmp_path, weights=weights)


@pytest.mark.parametrize("preset", ["MXFP8", "MXFP4"])
def test_inputs_are_encoded_as_they_encode_them(preset: str, tmp_path: Path) -> None:
    """Bit for bit, where their scales are powers of two; control: values at which the rules of scales differ."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    saved_by_others(preset, tmp_path)
    read = lpq.load_quantized(llama(), tmp_path)
    x = torch.randn(32, 256, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    how = preset_name_to_scheme(preset, ["Linear"]).input_activations
    theirs = fake_quantize(x[None], *compute_dynamic_scales_and_zp(x[None], how, torch.nn.Module()), how)[0]
    for layer in layers(read).values():
        assert torch.equal(layer.recipe.x.side("row").quantize(x, col=False).dequantize(), theirs)
    if preset == "MXFP4":
        for scale in ("floor", "ceil"):
            other = lpq.quantizer("mxfp4", scale=scale).quantize(x, col=False).dequantize()
            assert not torch.equal(other, theirs)


FINE_GRAINED: dict[str, dict[str, Any]] = {
    "FP8 per block": {},
    "FP8 per block, powers of two": {"scale_fmt": "ue8m0"},
    "FP8 per tensor": {"weight_block_size": None},
    "FP8 per tensor, powers of two": {"weight_block_size": None, "scale_fmt": "ue8m0"},
    "FP8 per tensor, static": {"weight_block_size": None, "activation_scheme": "static"},
    "MXFP8": {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
}


@pytest.mark.filterwarnings("ignore::lpq.checkpoint.CheckpointWarning")  # scales of siblings differ
@pytest.mark.parametrize("kind", FINE_GRAINED)
def test_a_model_that_transformers_quantized_is_read_as_it_reads_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own configuration, with all of its keys, and with its own scales. It quantizes on GPUs only, which it
    needs for products."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    read = transformers.AutoModelForCausalLM.from_pretrained
    given = transformers.FineGrainedFP8Config(**FINE_GRAINED[kind])
    llama().save_pretrained(tmp_path / "base")
    with monkeypatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None)
        quantized = read(tmp_path / "base", dtype=torch.bfloat16, quantization_config=given)
    for name, parameter in quantized.named_parameters():
        if name.endswith("activation_scale"):  # which it leaves as the memory was
            parameter.data.fill_(0.25)
    quantized.save_pretrained(tmp_path / "x")
    theirs = read(tmp_path / "x", dtype=torch.bfloat16)
    ours = lpq.load_quantized(llama(), tmp_path / "x").eval()
    assert len(layers(ours)) == 7
    for name, layer in layers(ours).items():
        assert torch.equal(layer.weight.dequantize(), theirs.get_parameter(f"{name}.weight")), name
        assert not torch.equal(layer.weight.dequantize(), llama().get_parameter(f"{name}.weight"))
        assert len(layer.static_values()) == ("static" in kind)
    with torch.no_grad():
        assert ours(TOKENS).logits.isfinite().all()
    again = lpq.export(ours, tmp_path / "again", layout="compressed-tensors")
    assert [title.partition(",")[0] for title in again.layers] == [kind.partition(",")[0]]


@pytest.mark.parametrize("preset", ["W8A8", "W4A16"])
def test_integers_of_others_are_refused_by_name(preset: str, tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    model = llama()
    model.config.quantization_config = QuantizationConfig(config_groups=groups, ignore=["lm_head"]).to_dict()
    model.save_pretrained(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"no format that is installed has weights as in its group_0"):
        lpq.load_quantized(llama(), tmp_path / "x")
