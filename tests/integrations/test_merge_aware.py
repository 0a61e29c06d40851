"""Adapters over a frozen quantized base: they train, and merge-aware ones keep their effect when they are merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_models import Mlp
from torch import Tensor, nn

import lpq
from lpq.checkpoint import CheckpointError
from lpq.core import QuantizedTensor

peft: Any = pytest.importorskip("peft", reason="needs peft, which `make install` brings")
from lpq.integrations.peft import merge_aware  # noqa: E402  (where peft is)

STEPS = 60


def mlp() -> Mlp:
    torch.manual_seed(0)
    return Mlp(between=torch.tanh)


X = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
SHIFT = torch.randn(64, 3, generator=torch.Generator().manual_seed(2))
SHIFT = (0.004 * X.float() @ SHIFT @ SHIFT.t()).bfloat16()


def base(path: Path) -> Any:
    """A frozen base from an engine's files: its codes, calibrated inputs, and nothing in high precision."""
    if not path.exists():
        net = lpq.convert(mlp().bfloat16(), "nvfp4")
        lpq.calibrate(net, [X])
        lpq.export(net, path, layout="compressed-tensors")
    return lpq.load_quantized(mlp().bfloat16(), path)


def adapted(path: Path, aware: bool, **options: Any) -> Any:
    torch.manual_seed(3)
    made = peft.get_peft_model(base(path), peft.LoraConfig(r=4, target_modules=["up", "down"], **options))
    return merge_aware(made) if aware else made


def trained(path: Path, aware: bool) -> tuple[Any, Tensor, float]:
    """A model whose adapters learned a small shift of the outputs; the target, and the error before."""
    with torch.no_grad():
        target = base(path)(X) + SHIFT
    model = adapted(path, aware)
    weights = [p for p in model.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 or p.dtype == torch.bfloat16 for p in weights)
    optimizer = torch.optim.Adam(weights, lr=4e-3)
    before = error(model, target)
    for _ in range(STEPS):
        (model(X).float() - target.float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, target, before


def error(model: nn.Module, target: Tensor) -> float:
    with torch.no_grad():
        return (model(X).float() - target.float()).square().mean().item()


def test_merging_keeps_what_merge_aware_adapters_learned(tmp_path: Path) -> None:
    """To the bit. Control: adapters that are added beside the product learn more, and lose all of it but a tenth."""
    for aware in (True, False):
        model, target, before = trained(tmp_path / "base", aware)
        codes = [layer.weight.row.data.clone() for layer in base(tmp_path / "base").children()]
        after = error(model, target)
        with torch.no_grad():
            expected = model(X)
        merged = model.merge_and_unload()
        assert all(isinstance(layer.weight, QuantizedTensor) for layer in merged.children())
        assert not all(torch.equal(layer.weight.row.data, c) for layer, c in zip(merged.children(), codes, strict=True))
        assert torch.equal(merged(X), expected) == aware
        if aware:
            assert error(merged, target) == after < 0.9 * before
        else:
            assert after < 0.5 * before < 0.9 * before < error(merged, target)


def test_adapters_beside_weights_are_not_exported(tmp_path: Path) -> None:
    """Their names are none that an engine has, and what they learned would be lost. Nor is a checkpoint of them."""
    model = adapted(tmp_path / "base", False)
    lpq.checkpoint.save(model, tmp_path / "run")
    for what in (
        lambda: lpq.export(model, tmp_path / "x", layout="modelopt"),
        lambda: lpq.export(tmp_path / "run", tmp_path / "x", layout="modelopt"),
        lambda: lpq.export.stream(model, "modelopt"),
    ):
        with pytest.raises(CheckpointError, match=r"model\.up.* have adapters .*\.merge_and_unload\(\)"):
            what()
    assert not (tmp_path / "x").exists()


@torch.no_grad()
def moved(model: Any, x: Tensor) -> Tensor:
    """Move the adapters of a model away from zero; return what it computes then."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.1)
    y: Tensor = model(x)
    return y


def test_merged_models_are_exported(tmp_path: Path) -> None:
    model = adapted(tmp_path / "base", True)
    expected = moved(model, X)
    lpq.export(model.merge_and_unload(), tmp_path / "merged", layout="compressed-tensors")
    with torch.no_grad():
        assert torch.equal(lpq.load_quantized(mlp().bfloat16(), tmp_path / "merged")(X), expected)


REMEMBERED_INPUTS = "x=fp8(scaling=delayed), w=fp8(), dy=fp8()"


@pytest.mark.parametrize(
    ("recipe", "weights"),
    [("fp8-current", None), ("fp8-delayed", None), ("fp8-current", "quantized"), (REMEMBERED_INPUTS, "quantized")],
)
def test_other_bases_keep_them_too(recipe: str, weights: Any) -> None:
    torch.manual_seed(3)
    base = lpq.convert(mlp(), recipe, weights=weights)
    model = merge_aware(peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["up", "down"])))
    model(X.float()).sum().backward()
    expected = moved(model.eval(), X.float())
    with torch.no_grad():
        assert torch.equal(model.merge_and_unload()(X.float()), expected)


def test_a_stored_weight_that_training_encodes_by_what_is_remembered_is_refused() -> None:
    base = lpq.convert(mlp(), "fp8-delayed", weights="quantized")
    made = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["up"]))
    with pytest.raises(
        ValueError, match=r"up: its adapter 'default' is over a weight that is stored as fp8\(scaling=del"
    ):
        merge_aware(made)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_dropout": 0.1}, "has dropout"),
        ({"lora_bias": True}, "has a bias of its own"),
        ({"use_dora": True}, "is a Dora"),
    ],
)
def test_what_cannot_be_merged_so_is_refused(options: Any, words: str, tmp_path: Path) -> None:
    plain = lpq.convert(mlp(), "mxfp8")
    with pytest.raises(ValueError, match=words):
        merge_aware(peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=["up"], **options)))
    with pytest.raises(ValueError, match="no LoRA adapter of the model is over a layer"):
        merge_aware(peft.get_peft_model(mlp(), peft.LoraConfig(r=4, target_modules=["up"])))
    model = adapted(tmp_path / "base", True)
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["up"]))
    merge_aware(model).base_model.set_adapter(["default", "other"])
    with pytest.raises(RuntimeError, match=r"the adapters default, other of a layer are active together"):
        model(X)
    model.set_adapter("default")
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="load the base again"):
        model.unmerge_adapter()


def test_a_model_that_had_adapters_first_is_known_after_they_are_merged() -> None:
    """A record on PEFT's wrapper would stay on it. Control: a model that was never converted is refused."""
    options = {"r": 4, "target_modules": ["up", "down"]}
    wrapped = lpq.convert(peft.get_peft_model(mlp().bfloat16(), peft.LoraConfig(**options)), "nvfp4", steps=10)
    before = [entry.name for entry in lpq.report(wrapped).converted]
    assert before == [f"base_model.model.{name}.base_layer" for name in ("up", "down")]
    merged = wrapped.merge_and_unload()
    known = lpq.report(merged)
    assert [entry.name for entry in known.converted] == ["up", "down"]
    assert not known.left
    lpq.set_step(merged, 1)
    with pytest.raises(ValueError, match="was not converted"):
        lpq.report(mlp())
