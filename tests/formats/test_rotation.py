"""Rotations: what is one basis, and what is decoded before it is multiplied, or refused in a recipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lpq
from lpq import registry
from lpq.recipes import RecipeError
from lpq.registry.errors import PluginError

sys.path.insert(0, str(Path(__file__).parents[1] / "testing"))
import subtle_rotations as rotations
from broken_formats import Plugin


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    registry.register(Plugin(rotations.Pairs, rotations.NamesTheOption, names="right_{}"), name="right")
    registry.register(Plugin(rotations.MisspellsTheOption, names="subtle_{}"), name="subtle")
    yield
    registry.refresh()


def off(a: str, b: str) -> float:
    """By how much of itself the product of two column operands is off."""
    x, w = torch.randn(96, 64), torch.randn(96, 32)
    first, second = lpq.quantizer(a).quantize(x, row=False).col, lpq.quantizer(b).quantize(w, row=False).col
    wanted = first.decode() @ second.decode().t()
    return float((lpq.gemm(first, second, dtype=torch.float32) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("right_pairs", "right_pairs(flip=true)"),
        ("right_namestheoption", "right_namestheoption(flip=true)"),
        ("right_pairs", "right_namestheoption(flip=true)"),
        ("nvfp4(rht=true)", "right_pairs"),
    ],
)
def test_other_bases_of_one_name_are_not_multiplied_as_one(a: str, b: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two options of a format, two formats of a plugin, and two plugins, of which one takes the name of the other."""
    monkeypatch.setattr(rotations.Pairs, "rotation", "hadamard16")
    assert off(a, b) < 1e-5
    with pytest.raises(RecipeError, match=r"wgrad cannot multiply its operands: dy\.col = .* is rotated by .*:had"):
        lpq.recipe({"fprop": "bf16", "dgrad": "bf16", "wgrad": {"x": lpq.quantizer(b), "dy": lpq.quantizer(a)}})


def test_a_basis_is_that_of_all_options_that_change_it() -> None:
    x, dy = lpq.quantizer("nvfp4(rht=true)"), lpq.quantizer("nvfp4(rht=true, stochastic=true, block=16x16)")
    assert x.basis == dy.basis == "nvfp4:hadamard16"
    assert x.side("row").basis is None
    assert lpq.quantizer("right_pairs(flip=true)").basis == "right:pairs(flip=True)"
    lpq.recipe({"wgrad": {"x": x, "dy": dy}, "fprop": "bf16", "dgrad": "bf16"})


def test_an_option_that_is_not_there_is_named() -> None:
    with pytest.raises(PluginError, match=r"has rotation_options=\('flop',\), and no option 'flop'"):
        lpq.quantizer("subtle_misspellstheoption")
