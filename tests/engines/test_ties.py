"""Weights that a model of transformers ties otherwise than its configuration says, by which engines build it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

import lpq
from lpq.checkpoint import CheckpointError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def converted(tied: bool, **options: Any) -> Any:
    return lpq.convert(tiny.llama(tie_word_embeddings=tied), "fp8-row", **options)


def written(model: Any, path: Path) -> Any:
    """As transformers reads it."""
    lpq.export(model, path)
    return type(model).from_pretrained(path, dtype=torch.bfloat16)


def test_a_head_that_is_tied_by_hand_is_refused_and_not_left_out(tmp_path: Path) -> None:
    model = converted(False)
    assert torch.equal(written(model, tmp_path / "apart").lm_head.weight, model.lm_head.weight), "control"
    model.lm_head.weight = model.model.embed_tokens.weight
    words = rf"{HEAD} and {EMBEDDING} are one weight in the model.*tie_word_embeddings = True"
    with pytest.raises(CheckpointError, match=words):
        lpq.export(model, tmp_path / "x")
    with pytest.raises(CheckpointError, match=words):
        next(lpq.export.stream(model, "compressed-tensors"))
    model.config.tie_word_embeddings = True
    read = written(model, tmp_path / "x")
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert torch.equal(read.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("weights", [None, "quantized"])
def test_a_head_that_is_no_longer_tied_is_refused(weights: Any, tmp_path: Path) -> None:
    model = converted(True, weights=weights, include="all")
    assert "lm_head.weight_scale" not in {name for name, _ in lpq.export.stream(model, "compressed-tensors")}, "control"
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    words = rf"{HEAD} and {EMBEDDING} are two weights in the model.*tie_word_embeddings = False"
    with pytest.raises(CheckpointError, match=words):
        lpq.export(model, tmp_path / "x")
    model.config.tie_word_embeddings = False
    read = written(model, tmp_path / "x")
    assert torch.equal(read.lm_head.weight.view(torch.uint8), tiny.operand(model.lm_head).data.view(torch.uint8))
    assert torch.equal(read.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [None, "quantized"])
def test_a_checkpoint_whose_head_its_configuration_ties_otherwise_is_refused(
    tied: bool, stored: Any, tmp_path: Path
) -> None:
    model = converted(tied, weights=stored, include="all")
    lpq.checkpoint.save(model, tmp_path / "run")
    for name, config in (("base", model.config), ("other", tiny.llama(tie_word_embeddings=not tied).config)):
        config.architectures = [type(model).__name__]
        config.save_pretrained(tmp_path / name)
    lpq.export(tmp_path / "run", tmp_path / "x", base=tmp_path / "base")
    read = type(model).from_pretrained(tmp_path / "x", dtype=torch.bfloat16)
    assert (read.lm_head.weight is read.model.embed_tokens.weight) == tied
    words = rf"{HEAD} is .* in the checkpoint, and not by config\.json.*: set tie_word_embeddings to {tied} in base"
    with pytest.raises(CheckpointError, match=words):
        lpq.export(tmp_path / "run", tmp_path / "y", base=tmp_path / "other")
    assert not (tmp_path / "y").exists()
    lpq.export(tmp_path / "run", tmp_path / "z")  # without a configuration that says it
