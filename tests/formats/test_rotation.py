"""Rotations are values: equal ones drop out of a product whoever declared them, others are undone, or refused in a
recipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lpq
from lpq import registry
from lpq.core import Rotation
from lpq.recipes import RecipeError
from lpq.registry.errors import PluginError

sys.path.insert(0, str(Path(__file__).parents[1] / "testing"))
import subtle_rotations as rotations
from broken_formats import Plugin

NVFP4 = lpq.quantizer("nvfp4(rht=true)").rotation


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    right = rotations.Pairs, rotations.Triples, rotations.Sixteens
    registry.register(Plugin(*right, names="right_{}"), name="right")
    registry.register(Plugin(*rotations.REFUSED, names="subtle_{}"), name="subtle")
    yield
    registry.refresh()


def columns(a: str, b: str) -> tuple[lpq.core.Storage, lpq.core.Storage]:
    x, w = torch.randn(96, 64), torch.randn(96, 32)
    return lpq.quantizer(a).quantize(x, row=False).col, lpq.quantizer(b).quantize(w, row=False).col


def off(made: Tensor, wanted: Tensor) -> float:
    """By how much of itself a product is off."""
    return float((made - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("right_pairs", "right_pairs(flip=true)"),
        ("right_triples", "right_triples(flip=true)"),
        ("right_pairs", "right_triples"),
        ("nvfp4(rht=true)", "right_pairs"),
    ],
)
def test_other_rotations_are_undone(a: str, b: str) -> None:
    """The rotations of two options of a format, of two formats of a plugin, and of two plugins."""
    first, second = columns(a, b)
    assert off(lpq.gemm(first, second, dtype=torch.float32), first.decode() @ second.decode().t()) < 1e-5
    with pytest.raises(RecipeError, match=r"wgrad cannot multiply its operands: dy\.col = .* is rotated by a .* of "):
        lpq.recipe({"fprop": "bf16", "dgrad": "bf16", "wgrad": {"x": lpq.quantizer(b), "dy": lpq.quantizer(a)}})


def test_the_same_block_with_other_signs_is_another_rotation() -> None:
    """A plain Hadamard transform of 16 beside NVFP4's: as one name they were one rotation."""
    assert lpq.quantizer("right_sixteens").basis != NVFP4
    first, second = columns("nvfp4(rht=true)", "right_sixteens")
    wanted = first.decode() @ second.decode().t()
    assert off(lpq.gemm(first, second, dtype=torch.float32), wanted) < 1e-5
    assert off(first.decode_rotated() @ second.decode_rotated().t(), wanted) > 1, (
        "they must not be multiplied as they are"
    )


def test_equal_rotations_of_two_plugins_drop_out() -> None:
    a, b = "nvfp4(rht=true)", "right_sixteens(signed=true)"
    assert lpq.quantizer(b).basis == NVFP4
    first, second = columns(a, b)
    made = lpq.gemm(first, second, dtype=torch.float32)
    assert torch.equal(made, first.decode_rotated() @ second.decode_rotated().t())
    assert off(made, first.decode() @ second.decode().t()) < 1e-5
    lpq.recipe({"fprop": "bf16", "dgrad": "bf16", "wgrad": {"x": lpq.quantizer(b), "dy": lpq.quantizer(a)}})


def test_a_matrix_is_the_rotation_whose_signs_it_has() -> None:
    signs = (1, -1, -1, 1)
    hadamard = [[signs[i] * (-1) ** (i & j).bit_count() / 2 for j in range(4)] for i in range(4)]
    by_matrix, by_signs = Rotation(matrix=tuple(map(tuple, hadamard))), Rotation(signs=signs)
    assert by_matrix == by_signs
    assert hash(by_matrix) == hash(by_signs)
    assert by_signs != Rotation(signs=(1, 1, 1, 1))
    assert by_signs != Rotation(matrix=tuple(map(tuple, torch.eye(4).tolist())))


def test_a_matrix_and_signs_are_kept_as_tuples_whatever_holds_them() -> None:
    matrix = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    rows = matrix.tolist()
    made = [Rotation(matrix=given) for given in (matrix, rows, tuple(map(tuple, rows)))]
    assert {*made} == {made[0]}
    signed = [Rotation(signs=given) for given in (torch.tensor([1, -1]), [1.0, -1.0], (1, -1))]
    signed.append(Rotation(matrix=torch.tensor([[1.0, 1.0], [-1.0, 1.0]]) / 2**0.5))
    assert {*signed} == {signed[0]}
    assert signed[0].signs == (1, -1)
    assert torch.allclose(made[0].undo(made[0].apply(torch.eye(5))), torch.eye(5), atol=1e-5)
    for wrong in ({"matrix": torch.ones(2)}, {"matrix": [["a"]]}, {"signs": torch.eye(2)}, {"signs": 1}):
        with pytest.raises(ValueError, match="numbers"):
            Rotation(**wrong)


@pytest.mark.parametrize("signs", [(1, -1), tuple([1, -1, -1] * 42 + [1, 1])])
def test_a_rotation_is_the_matrix_of_its_definition(signs: tuple[int, ...]) -> None:
    order, rotation = len(signs), Rotation(signs=signs)
    sylvester = torch.tensor([[(-1) ** (i & j).bit_count() for j in range(order)] for i in range(order)]).double()
    matrix = torch.tensor(signs).double()[:, None] * sylvester / order**0.5
    x = torch.randn(5, 3 * order - 1)
    made = rotation.apply(x)
    exact = torch.nn.functional.pad(x.double(), (0, 1)).unflatten(1, (-1, order)) @ matrix
    assert (made - exact.flatten(1)).abs().max() < 1e-5
    assert (rotation.undo(made)[:, :-1] - x).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({}, "a Rotation has signs, of a Hadamard transform, or the rows of a matrix, or its signs are drawn"),
        ({"signs": (1, -1), "drawn": 128}, "pass one of signs, matrix and drawn"),
        ({"drawn": 48}, "a Rotation has drawn=48: it is a power of two from 32 on"),
        ({"signs": (1, -1, 1)}, "signs of a Rotation are 1 or -1, as many as a power of two, and not [1, -1, 1]"),
        ({"signs": (1, 2)}, "signs of a Rotation are 1 or -1"),
        ({"matrix": ((1.0, 0.0),)}, "the matrix of a Rotation is square"),
        ({"matrix": ((1.0, 1.0), (1.0, -1.0))}, "the matrix of a Rotation is orthonormal"),
    ],
)
def test_what_is_no_rotation_is_refused(declared: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Rotation(**declared)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", rotations.REFUSED, ids=lambda format: format.__name__)
def test_a_rotation_that_could_not_be_undone_is_refused(format: type[rotations.Pairs]) -> None:
    """So are the declarations of plugin interface 1: a name, the options that change it, and ``decode_rotated``."""
    with pytest.raises(PluginError, match=re.escape(rotations.REFUSED[format]).replace(r"\*", ".*")):
        lpq.quantizer(f"subtle_{format.__name__.lower()}")
