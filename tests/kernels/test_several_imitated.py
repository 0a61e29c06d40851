"""Several matrices that are encoded, measured or put in their places at once have the bytes that each has by itself,
where a CPU imitates the GPU."""

from __future__ import annotations

import imitated
import pytest
import torch
from ranks import spawn
from several_gathered import check
from support.several import (
    DTYPES,
    ENCODED,
    MEASURED,
    SHAPES,
    TILED,
    TURNED,
    WHOLE,
    check_derived,
    check_operands,
    check_places,
    check_rows,
    check_statistics,
    check_tiled,
    check_versions,
    real_transposes,
)

from lpq.formats.format import Direction
from lpq.operations import derived_operands

pytestmark = [*imitated.MARKS, pytest.mark.usefixtures("launched")]
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("text", ENCODED)
def test_each_has_its_own_operand(text: str, dtype: torch.dtype, launched: list[str]) -> None:
    check_operands(text, dtype, CPU)
    assert launched == ["encode_several"] * 2


@pytest.mark.parametrize(("shapes", "dtype"), [(SHAPES, DTYPES[0]), (WHOLE, DTYPES[1])], ids=["ragged", "whole"])
@pytest.mark.parametrize(("text", "direction"), TILED)
def test_each_has_its_own_tiles(
    text: str, direction: Direction, shapes: tuple[tuple[int, int], ...], dtype: torch.dtype, launched: list[str]
) -> None:
    check_tiled(text, direction, dtype, CPU, shapes)
    assert launched == ["pair_several"] * 4


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_rows_have_their_own_amaxes(dtype: torch.dtype, launched: list[str]) -> None:
    check_rows(dtype, CPU)
    assert launched == ["amaxes", "amaxes"]


@pytest.mark.parametrize("text", ENCODED[:1])
def test_the_same_versions_are_not_encoded_again(text: str, launched: list[str]) -> None:
    check_versions(text, CPU)
    assert launched == ["encode_several"] * 5


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("text", "direction"), MEASURED)
def test_each_has_its_own_statistics(text: str, direction: Direction, dtype: torch.dtype, launched: list[str]) -> None:
    check_statistics(text, direction, dtype, CPU)
    assert launched == ["amaxes", "amaxes"]


def test_each_is_put_in_its_place(launched: list[str]) -> None:
    check_places(CPU)
    assert launched == ["place", "place"]


@pytest.mark.parametrize("text", TURNED)
def test_each_is_transposed(text: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived_operands, "_bound_several", real_transposes)
    check_derived(text, CPU)
    assert launched == [f"transpose_several_of_{'nibbles' if text.startswith('nvfp4') else 'bytes'}"] * 2


@pytest.mark.parametrize(
    ("recipe", "kernels"), [
        ("fp8-current", {"amaxes", "encode_several", "place", "transpose_several_of_bytes"}),
        ("fp8-delayed", {"amaxes", "encode_several", "place", "transpose_several_of_bytes"}),
        ("fp8-row", {"amaxes", "pair_several", "place"}),
        ("nvfp4", {"amaxes", "pair_several", "place", "transpose_several_of_nibbles"}),
        ("mxfp8", {"pair_several", "place"}),
    ]
)  # fmt: skip
def test_gathered_weights(recipe: str, kernels: set[str]) -> None:
    """By several ranks, whose shards are measured and encoded together."""
    spawn(check, 2, recipe, kernels, (64, 96))


def test_gathered_weights_whose_shards_need_padding() -> None:
    """So that each begins at an address which is aligned, something follows the bytes of the one before it."""
    kernels = {"amaxes", "encode_several", "place", "transpose_several_of_bytes"}
    spawn(check, 2, "fp8-current", kernels, (36, 54))


def test_gathered_weights_whose_two_operands_are_sent_at_once() -> None:
    """As where weights stay gathered for backward: both in one tensor."""
    spawn(check, 2, "mxfp8-fwd-nvfp4-bwd", {"amaxes", "pair_several", "place"}, (64, 128), True)


def test_gathered_weights_whose_buffers_travel_one_by_one() -> None:
    """As where they are large: the row operands arrive in their places, and the column operands do not."""
    spawn(check, 2, "mxfp8", {"pair_several", "place"}, (64, 96), False, True)
